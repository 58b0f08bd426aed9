"""A batch or a loss of another form than is read: words say what was given, what to write."""

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.strategy import DDP
from tests.small_gpt import gpt

X = np.ones((8, 8), np.float32)
TOKENS = np.ones((8, 9), np.int32)
BATCH = {"x": X, "y": X}
FLOAT = {"tokens": TOKENS.astype(np.float32), "mask": TOKENS > 0}
NO_DICTIONARY: Any = [1.0]
squares = lambda outputs, batch: (outputs**2).mean()
on_x = lambda model, batch: model(batch["x"])


class Linear(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


class Doubled(Linear):
    def __call__(self, x):
        return self.linear(2 * x)


class Flat(Linear):
    def __call__(self, x):
        return self.linear(x.reshape(-1, 8))


class Two(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x, y):
        return self.linear(x) + y


class Embedding(nnx.Module):
    def __init__(self, *, rngs):
        self.embed = nnx.Embed(64, 8, rngs=rngs)

    def __call__(self, batch):
        return self.embed(batch["tokens"])


class Taken(Embedding):
    def __call__(self, batch):
        return jnp.take(self.embed.embedding[...], batch["tokens"], axis=0)


def of_linen(rngs):
    return nnx.bridge.ToNNX(linen.Embed(64, 8), rngs=rngs).lazy_init(TOKENS)


def made(kind):
    return lambda rngs: kind(rngs=rngs)


OF_TOKENS = gpt()


@cache
def laid_out(init, **options):
    return hfjax.layout(init, optax.sgd(0.1), hfjax.make_mesh(data=8), DDP, **options)


@cache
def train_step(init, loss, **options):
    return hfjax.train_step(laid_out(init, **options), loss)


@cache
def state_of_tokens():
    return hfjax.init(laid_out(OF_TOKENS))


def trace(init, batch, loss=squares, **options):
    train_step(init, loss, **options).lower(batch)


@pytest.mark.parametrize(
    ("init", "options"),
    [
        (gpt(), {}),
        (made(Embedding), {}),
        (made(Taken), {}),
        (of_linen, {"forward": lambda model, batch: model(batch["tokens"])}),
    ],
    ids=["GPT", "nnx.Embed", "jnp.take", "linen.Embed"],
)
def test_tokens_that_are_no_whole_numbers_are_named(init, options):
    with pytest.raises(
        ValueError, match=r"an embedding .* no whole numbers: tokens \(float32\)\. .*astype"
    ):
        trace(init, FLOAT, **options)


@pytest.mark.parametrize(
    ("batch", "kind"), [((TOKENS, TOKENS), "a tuple"), ([TOKENS], "a list"), (TOKENS, "an array")]
)
def test_a_batch_without_keys_is_refused_where_keys_are_read(batch, kind):
    with pytest.raises(ValueError, match=rf"by key, and this batch is {kind}. Give a dictionary"):
        trace(OF_TOKENS, batch, next_token_loss)


def of_x(model, batch):
    return model(batch["x"])


@pytest.mark.parametrize(
    ("loss", "forward", "says"),
    [
        (lambda batch, y: ((y - batch["y"]) ** 2).mean(), of_x, "got idx='y'"),
        (lambda batch, y: batch["y"].mean(), lambda m, b: [of_x(m, b)], "not str"),
    ],
    ids=["an array", "a list"],
)
def test_swapped_arguments_are_told(loss, forward, says):
    with pytest.raises(ValueError, match=rf"is one, of x, y\. .*are the two swapped\?.*{says}"):
        trace(made(Linear), BATCH, loss, forward=forward)


@pytest.mark.parametrize("at", ["a", 1.0, (0, 1)], ids=str)
@pytest.mark.parametrize("kind", [list, tuple, range])
def test_what_python_says_of_a_list_is_not_told_of_an_embedding(kind, at):
    table = range(3) if kind is range else kind((1, 2, 3))
    loss = lambda outputs, batch: table[at] * outputs.mean()
    with pytest.raises((TypeError, ValueError), match=f"{kind.__name__} indices must be integers"):
        trace(made(Linear), BATCH, loss, forward=of_x)


@pytest.mark.parametrize("kind", [Linear, Doubled, Flat, Two])
def test_a_model_of_arrays_that_is_given_a_dictionary_is_told_to_select(kind):
    with pytest.raises(
        ValueError,
        match=r"a dictionary of x, y, .*forward=lambda model, batch: model\(batch\[\"…\"\]\)\) "
        r"with one of x, y\.",
    ):
        trace(made(kind), BATCH)


def test_a_model_of_two_arguments_that_is_given_a_pair_is_told_to_select():
    with pytest.raises(ValueError, match=r"forward=lambda model, batch: model\(batch\[0\]\)\)"):
        trace(made(Two), (X, X))


def test_a_loss_that_takes_the_whole_batch_for_an_array_is_told_to_select():
    with pytest.raises(
        ValueError, match=r"whole batch, .* Take an array of it: batch\[\"…\"\] with"
    ):
        trace(made(Linear), BATCH, lambda y, batch: (y - batch).mean(), forward=on_x)


class Lacking(Embedding):
    def __call__(self, batch):
        two: Any = Two(rngs=nnx.Rngs(0))
        return two(super().__call__(batch))


def test_an_error_of_the_model_itself_is_left_as_it_is():
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'y'"):
        trace(made(Lacking), {"tokens": TOKENS})
    with pytest.raises(TypeError, match="dot_general requires contracting"):
        trace(made(Linear), {"x": X[:, :4]}, forward=on_x)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, batch: None, "the loss is of type NoneType: a scalar is expected"),
        (lambda y, batch: True, "the loss is bool: a real floating-point number is expected"),
        (lambda y, batch: squares, "the loss is of type function: a scalar"),
        (lambda y, batch: hfjax.Mean(y.sum(), y), r"its weight has shape \(8, 8\)"),
        (
            lambda y, batch: hfjax.Mean(y.sum(), 1.0, metrics=NO_DICTIONARY),
            "of the loss: a dictionary by name is expected, not list",
        ),
        (
            lambda y, batch: hfjax.Mean(y.sum(), 1.0, metrics={"right": (y > 0).all()}),
            "metric 'right' is bool: a number is expected",
        ),
    ],
)
def test_a_loss_that_returns_something_else_is_refused(loss, message):
    with pytest.raises(ValueError, match=message):
        trace(made(Linear), BATCH, loss, forward=on_x)


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (TOKENS > 0, r"tokens of dtype bool: whole numbers are expected"),
        (TOKENS + 0j, r"tokens of dtype complex64: whole numbers are expected"),
        (TOKENS[:, 0], r"tokens of shape \[\d\]: \[rows, positions\] are expected"),
        (TOKENS[:, :, None], r"tokens of shape \[\d, 9, 1\]: \[rows, positions\]"),
        (TOKENS[:, :1], r"tokens of shape \[\d, 1\]: .* each token predicts the next"),
        (TOKENS.astype(str), r"tokens is of dtype <U\d+\. Turn text into tokens"),
        (TOKENS.astype(object), r"tokens is of dtype object\. .* padded"),
        (TOKENS.astype("S1"), r"tokens is of dtype \|S1\."),
    ],
)
def test_tokens_that_no_model_of_language_reads_are_refused_in_words(tokens, said):
    with pytest.raises(ValueError, match=said):
        trace(OF_TOKENS, {"tokens": tokens}, next_token_loss)
    evaluate = hfjax.eval_step(laid_out(OF_TOKENS), next_token_loss)
    with pytest.raises(ValueError, match=said):
        evaluate(state_of_tokens(), {"tokens": tokens})


@pytest.mark.parametrize("batch", [None, {}, [], {"tokens": None}, {"tokens": 3}, "text"])
def test_what_is_no_batch_is_refused_in_words(batch):
    with pytest.raises(ValueError, match="a batch is a pytree of arrays"):
        trace(OF_TOKENS, batch, next_token_loss)
    layout = laid_out(OF_TOKENS)
    for step in (hfjax.eval_step(layout, next_token_loss), hfjax.predict_step(layout)):
        with pytest.raises(ValueError, match="a batch is a pytree of arrays"):
            step(state_of_tokens(), batch)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"documents": FLOAT["tokens"]}, r"documents float32\[\d, 9\] beside tokens \[\d, 9\]: .*"),
        ({"documents": TOKENS > 0}, r"documents bool\[\d, 9\] .* the whole number of its document"),
        ({"documents": TOKENS[:, :3]}, r"documents int32\[\d, 3\] beside tokens \[\d, 9\]"),
        ({"mask": TOKENS[:, :2]}, r"mask int32\[\d, 2\] beside targets \[\d, 8\]: what each"),
        ({"mask": TOKENS[:, 1:] + 0j}, r"mask complex64\[\d, 8\] .*true and false or a number"),
    ],
)
def test_what_lies_beside_tokens_has_their_form(more, said):
    with pytest.raises(ValueError, match=said):
        trace(OF_TOKENS, {"tokens": TOKENS, **more}, next_token_loss)
    trace(OF_TOKENS, {"tokens": TOKENS, "mask": TOKENS[:, :1]}, next_token_loss)  # one for a row


@pytest.mark.parametrize("number", ["a", None, 1.5, True, 0, -1, [8]])
def test_numbers_of_rows_and_microbatches_are_whole(number):
    layout = hfjax.layout(made(Linear), optax.sgd(0.1), hfjax.make_mesh(data=8), DDP)
    with pytest.raises(
        ValueError, match=r"process_batch_slice: global_batch_size=.*; a whole number, at least 1"
    ):
        hfjax.process_batch_slice(layout, number)
    with pytest.raises(ValueError, match=r"microbatches=.*: a whole number, at least 1"):
        hfjax.shard_batch(layout, BATCH, number)


def test_numbers_that_devices_hold_in_few_bits_are_numbers():
    half = X.astype(jnp.bfloat16)
    trace(made(Linear), {"x": half, "kept": TOKENS > 0}, forward=on_x)


@pytest.mark.parametrize("call", ["init", "shard_batch", "eval_step", "predict_step", "to_model"])
def test_what_is_no_layout_is_refused_in_words(call):
    given = {"init": (), "eval_step": (squares,), "predict_step": ()}.get(call, (BATCH,))
    with pytest.raises(ValueError, match=r"layout.* found NoneType|not NoneType"):
        getattr(hfjax, call)(None, *given)
