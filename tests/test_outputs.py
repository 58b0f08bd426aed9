"""Outputs and text of a model are those of one device, under any strategy and schedule."""

import functools
import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.moe import MoEConfig, MoELlama
from tests.small_gpt import tokens
from tests.test_given_params import (
    CASES,
    INTERLEAVED,
    Listed,
    alone,
    given,
    loss_of,
    made,
    same,
    squares,
)

NONE: Any = "layout"


def plain(name, batch):
    """Return what the model itself returns in evaluation mode."""
    model = hfjax.to_model(alone(name), hfjax.init(alone(name), parameters=given(name)))
    model.eval()
    return jax.tree.map(np.asarray, model(batch))


PREDICTED = [name for name in CASES if name not in ("PIPE, padded", "ema", "master")]


@pytest.mark.parametrize("name", PREDICTED)
@pytest.mark.short("PIPE, a list")
def test_predicted_outputs_are_those_of_the_model_row_by_row(name):
    layout, schedule, batch = made(name), CASES[name][2], loss_of(name)[1]
    state = hfjax.init(layout, schedule=schedule, parameters=given(name))
    found = hfjax.predict_step(layout, schedule=schedule)(state, batch)
    rows = jax.sharding.NamedSharding(layout.mesh, jax.P(("data", "fsdp")))
    of_model = plain(name, batch)
    for mine, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(of_model), strict=True):
        limit = 0.05 if "HOST" in name else 1e-5  # its parameters are bfloat16
        np.testing.assert_allclose(np.asarray(mine, np.float32), wanted, atol=limit)
        assert mine.sharding.is_equivalent_to(rows, mine.ndim)
    assert isinstance(found, dict) == (loss_of(name)[0] is squares)
    own = hfjax.to_model(layout, state)  # the model itself, from any layout and schedule
    own.eval()
    same(own(batch), of_model)


@pytest.mark.slow
def test_forward_takes_the_place_of_the_layouts_own():
    layout, batch = made("FSDP"), loss_of("FSDP")[1]
    state = hfjax.init(layout, parameters=given("FSDP"))
    forward = lambda model, batch, train: (model(batch).argmax(-1), batch["tokens"] * (2 - train))
    best, twice = hfjax.predict_step(layout, forward)(state, batch)
    np.testing.assert_array_equal(best, plain("FSDP", batch).argmax(-1))
    np.testing.assert_array_equal(twice, 2 * batch["tokens"])
    half = hfjax.predict_step(layout, precision="bf16")(state, batch)
    assert half.dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["FSDP", "PIPE, interleaved"])
@pytest.mark.short("FSDP")
def test_any_number_of_rows_is_predicted(name):
    layout, schedule = made(name), CASES[name][2]
    state = hfjax.init(layout, schedule=schedule, parameters=given(name))
    predict = hfjax.predict_step(layout, schedule=schedule)
    for rows in (1, 6):
        found, wanted = predict(state, batch := tokens(rows=rows)), plain(name, batch)
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    within = jax.jit(lambda state, batch: predict(state, batch))(state, batch)
    np.testing.assert_allclose(within, wanted, atol=1e-5)


def test_a_prediction_runs_inside_a_program_of_the_users():
    layout, batch = made("FSDP"), loss_of("FSDP")[1]
    state, predict = hfjax.init(layout, parameters=given("FSDP")), hfjax.predict_step(layout)
    best = jax.jit(lambda state, batch: predict(state, batch).argmax(-1))(state, batch)
    np.testing.assert_array_equal(best, plain("FSDP", batch).argmax(-1))


@pytest.mark.parametrize(
    ("predict", "message"),
    [
        (lambda layout: hfjax.predict_step(NONE), "a layout of hfjax.layout is .* found str"),
        (
            lambda layout: hfjax.predict_step(layout, forward=lambda model: 0),
            r"forward\(model\): it is called with \(model, batch\)",
        ),
        (
            lambda layout: hfjax.predict_step(layout)(hfjax.init(layout), tokens(rows=0)),
            "the same number of examples, at least one; found",
        ),
        (
            lambda layout: hfjax.predict_step(
                made("PIPE, interleaved"), lambda m, x: m(x), schedule=INTERLEAVED
            ),
            "schedule .* with forward= of the layout: stages are made of a model in three parts",
        ),
    ],
)
def test_what_cannot_be_predicted_is_refused(predict, message):
    with pytest.raises(ValueError, match=message):
        predict(made("FSDP"))


# -- text ---------------------------------------------------------------------------------------


WITH_TEXT = ("FSDP+TENSOR", "PIPE, interleaved", "HOST_PARAMETERS")


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_TEXT)
def test_text_is_that_of_one_device(name):
    layout, one = made(name), hfjax.init(alone(name), parameters=given(name))
    state = hfjax.init(layout, schedule=CASES[name][2], parameters=given(name))
    prompts = [[1, 2, 3], [7], [9, 8, 7, 6, 5]]
    fields: dict[str, Any] = {"length": 8, "temperature": 0}
    found = hfjax.generate(layout, state, prompts, 6, **fields)
    assert found == hfjax.generate(alone(name), one, prompts, 6, **fields)
    assert [len(tokens) for tokens in found] == [6, 6, 6]


def test_each_of_several_prompts_gets_what_it_gets_by_itself():
    layout = alone("FSDP")
    state = hfjax.init(layout, parameters=given("FSDP"))
    prompts = [[1, 2, 3], "ab", np.array([5])]
    text = hfjax.data.load_tokenizer("bytes")
    fields: dict[str, Any] = {
        "length": 8,
        "temperature": 1.0,
        "top_k": 8,
        "tokenizer": text,
        "vocab": 64,
    }
    text.encode = lambda texts: [np.array([1, 2])] * len(texts)  # tokens of this small model
    together = hfjax.generate(layout, state, prompts, 6, seed=5, **fields)
    for i, prompt in enumerate(prompts[:2]):
        assert hfjax.generate(layout, state, prompt, 6, seed=5 + i, **fields) == together[i]
    assert isinstance(together[1], str)
    assert len(together[1]) == 6
    assert hfjax.generate is hfjax.trainer.generate


@functools.cache
def begun(name):
    layout = alone(name)
    return layout, hfjax.init(layout)


@pytest.mark.parametrize(
    ("call", "message", "kind"),
    [
        (lambda f: f("text", 4), "a text is given and no tokenizer. Give tokens, or", ValueError),
        (lambda f: f([[]], 4), "the prompt has no token", ValueError),
        (lambda f: f([1], 0), "0 tokens are asked for", ValueError),
        (lambda f: f([1], 1.5), "1.5 tokens are asked for, at least 1 is needed, a", ValueError),
        (lambda f: f([1], 2, length=0), "length=0; a whole number of tokens, at least", ValueError),
        (lambda f: f([1], 2, vocab=1.5), "vocab=1.5; a whole number of tokens", ValueError),
        (lambda f: f([1.5, 2], 2), "the prompt holds 1.5; tokens are whole numbers", ValueError),
        (lambda f: f([[1], [True]], 2), "the prompt holds True; tokens are whole", ValueError),
        (lambda f: f([3, -1], 2), "the prompt holds -1; tokens are whole numbers", ValueError),
        (lambda f: f([1, 64], 2, vocab=64), "holds 64; .* from 0 to 63. Give tokens", ValueError),
        (lambda f: f([1, 9999], 2), r"holds 9999; .* from 0 to \d+. Give tokens of", ValueError),
        (lambda f: f([1], 2, seed=1.5), "--seed 1.5: a number .* a whole one", ValueError),
        (lambda f: f([1], 2, temperature=np.nan), "temperature=nan, .* of at least 0", ValueError),
        (lambda f: f([1], 30), "31 tokens a row, the model has 24 positions", ValueError),
        (lambda f: f([1], 2, topk=3), "no keyword 'topk'. Did you mean top_k", TypeError),
    ],
)
def test_what_cannot_be_written_is_refused(call, message, kind):
    layout, state = begun("FSDP")
    with pytest.raises(kind, match=message):
        call(lambda *given, **fields: hfjax.generate(layout, state, *given, **fields))


def test_no_token_is_chosen_by_logits_that_are_not_finite():
    layout = alone("FSDP")
    state = hfjax.init(layout)
    broken = replace(state, params=jax.tree.map(lambda x: x * jnp.nan, state.params))
    ways: Any = ({"temperature": 0}, {"seed": 3})
    for fields in ways:
        with pytest.raises(ValueError, match=r"logits of prompt 0 are not finite.* earlier step"):
            hfjax.generate(layout, broken, [[1], [2]], 2, **fields)


def mixture(rngs):
    return MoELlama(MoEConfig.tiny(), rngs=rngs)


def told_of(model):
    """What flax knows of each variable, beside the meshes that it may lie on."""
    flat = nnx.to_flat_state(nnx.state(model))
    return {keys: x.get_metadata() | {"eager_sharding": None} for keys, x in flat}


@pytest.mark.slow
def test_a_module_is_like_ones_own_and_has_no_hooks_of_which_flax_warns():
    mesh = hfjax.make_mesh(fsdp=4, devices=jax.devices()[:4])
    for model_init in (Listed, mixture):
        layout = hfjax.layout(model_init, optax.sgd(0.1), mesh, hfjax.FSDP)
        model, own = hfjax.to_model(layout, hfjax.init(layout)), model_init(nnx.Rngs(0))
        assert told_of(model) == told_of(own)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
            optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))


def test_an_output_of_as_many_entries_as_the_padded_batch_is_not_cut():
    """The model returns its bias, of 8: the batch of 5 examples would be filled up to 8."""
    model = lambda rngs: nnx.Linear(8, 8, rngs=rngs)
    layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
    both = lambda model, x: (model(x), 2 * model.bias[...])
    state, batch = hfjax.init(layout), np.ones((5, 8), np.float32)
    assert hfjax.predict_step(layout)(state, batch).shape == (5, 8)
    with pytest.raises(ValueError, match=r"a batch of 5 examples .*\. Give 8 examples"):
        hfjax.predict_step(layout, both)(state, batch)
