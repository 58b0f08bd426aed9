"""What hfjax refuses where devices share rows: positions that meet outside of attention.

Each case would be a wrong number without an error. Most are only traced.
"""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import CONTEXT, DDP, PIPE, TENSOR, Schedule
from hfjax.models.attention import causal_attention
from hfjax.models.loss import next_tokens
from hfjax.models.parts import Dropout, plain, stacked

RNG = np.random.default_rng(0)
TOKENS = {"tokens": RNG.integers(0, 64, (2, 32), np.int32)}


class Own(nnx.Module):
    """A model whose positions meet in a way of its own."""

    def __init__(self, meet, rngs):
        self.embedding = nnx.Embed(64, 32, rngs=rngs)
        self.meet = meet

    def __call__(self, batch):
        return self.meet(self.embedding(batch["tokens"])) @ self.embedding.embedding[...].T


def squares(y, batch):
    return (y**2).mean()


def made(model, sizes, loss=squares, forward=None, axes=None, **execution):
    """Return a step of a model (a function of rngs, or how the positions of `Own` meet)."""
    mesh = hfjax.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    strategy = DDP | CONTEXT if "context" in sizes else DDP
    strategy = strategy | TENSOR if "tensor" in sizes else strategy
    layout = hfjax.layout(model, optax.sgd(0.1), mesh, strategy, forward=forward, axes=axes)
    return hfjax.train_step(layout, loss, **execution)


def own(meet):
    return lambda rngs: Own(meet, rngs)


def traced(model, sizes=None, batch=TOKENS, **how):
    return made(model, sizes or {"context": 4}, **how).trace(batch)


def attend_here(x):
    return jax.nn.softmax(x @ x.swapaxes(1, 2)) @ x


def convolve(x):
    kernel = jnp.ones((3, 32, 32)) / 96
    names = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(x, kernel, (1,), "SAME", dimension_numbers=names)


def after_class(x):
    return jnp.concatenate([jnp.ones((x.shape[0], 1, x.shape[2])), x], axis=1)


MEETINGS = {
    "contracts": attend_here,
    "convolves": convolve,
    "accumulates": lambda x: jnp.cumsum(x, axis=1),
    "counts": lambda x: x + jnp.arange(x.shape[1])[None, :, None],
    "cuts or joins": lambda x: jnp.roll(x, 1, axis=1),
    "reduces": lambda x: x - x.mean(axis=1, keepdims=True),
    "does what hfjax does not know (fft) with": lambda x: jnp.fft.fft(x, axis=1).real,
    "does what hfjax does not know (scatter) with": lambda x: x.at[:, 0].set(0),
    "sorts": lambda x: x + jax.lax.top_k(x.swapaxes(1, 2), 2)[0].sum(-1)[:, None],
    "rearranges": lambda x: x.reshape(x.shape[0], x.shape[2], x.shape[1]).swapaxes(1, 2),
    "pairs": lambda x: x * (x[:, :, :1] + x[:, None, :, 0]).max(2)[..., None],
    "joins what it puts in front": lambda x: after_class(x) @ jnp.ones((32, 32)),
    "attends with a class in front": lambda x: attend_here(after_class(x))[:, 0],
    "convolves with step 2": lambda x: jax.lax.conv_general_dilated(
        x, jnp.ones((1, 32, 32)), (2,), "VALID", dimension_numbers=("NWC", "WIO", "NWC")
    ),
    "convolves features that are positions": lambda x: jax.lax.conv_general_dilated(
        x, jnp.ones((1, x.shape[1], 64)), (1,), "VALID", dimension_numbers=("NCW", "WIO", "NCW")
    ),
    "pools with step 2": lambda x: nnx.avg_pool(x, (1,), (2,)),
    "shifts by padding": lambda x: jax.lax.pad(x, 0.0, [(0, 0, 0), (1, -1, 0), (0, 0, 0)]),
    "runs a loop over": lambda x: jax.lax.scan(
        lambda h, y: (h + y, h), x[:, 0] * 0, x.swapaxes(0, 1)
    )[1].swapaxes(0, 1),
}


@pytest.mark.parametrize("what", MEETINGS)
def test_positions_that_meet_outside_of_attention_are_refused(what):
    verbs = f"cuts or joins|convolves|pools|reduces|pairs|{re.escape(what)}"
    with pytest.raises(ValueError, match=f"the model ({verbs}) positions of a row"):
        traced(own(MEETINGS[what]))


def sines(x):
    return np.sin(np.arange(x.shape[1], dtype=np.float32))[None, :, None]


def frequencies(x):
    return ((1e4 * x.shape[1]) ** (np.arange(32, dtype=np.float32) / 32))[None, None]


NUMBER = "computes with the number of positions"
OTHER = "does something else with another number of positions"


@pytest.mark.parametrize(
    ("meet", "message"),
    [
        (lambda x: x + sines(x), "holds an array"),
        (lambda x: jax.jit(lambda x: x + sines(x))(x), "holds an array"),
        (lambda x: x / x.shape[1], NUMBER),
        (lambda x: x / frequencies(x), NUMBER),
        (lambda x: jax.jit(lambda x: x / frequencies(x))(x), NUMBER),
        (lambda x: x * np.full((1, x.shape[1], 1), 1 / x.shape[1], np.float32), NUMBER),
        (lambda x: x ** x.shape[1], NUMBER),
        (lambda x: 2 * x if x.shape[1] <= 8 else x, OTHER),
        (lambda x: 2 * x if x.shape[1] == 32 else x, OTHER),
        (lambda x: 2 * x if x.shape[1] % 4 == 0 else x, OTHER),
        (lambda x: x - 1 if x.shape[1] <= 8 else 1 - x, OTHER),
    ],
    ids=[
        *("a table of sines", "one in a jit", "the length", "a vector", "a vector in a jit"),
        *("a number for all", "a power", "a branch on a part", "a branch on a whole row"),
        *("a branch on what divides", "a branch between alike operations"),
    ],
)
def test_what_is_made_of_the_length_of_a_part_is_refused(meet, message):
    with pytest.raises(ValueError, match=f"the model {message}"):
        traced(own(meet))
    traced(own(meet), context={"check": False})


def own_loss(y, batch):
    """Return the cross entropy of each target, and which targets count."""
    counts = batch["tokens"] != -100
    labels = jnp.where(counts, batch["tokens"], 0)
    return optax.softmax_cross_entropy_with_integer_labels(y, labels) * counts, counts


def rows_of_counting(y, batch):
    losses, counts = own_loss(y, batch)
    return (losses.sum(1) / jnp.maximum(counts.sum(1), 1)).mean()


def of_probabilities(y, batch):
    return -jnp.log(1 - y).sum((1, 2)).mean() + jnp.log(y).mean()


LOSSES = {
    "targets of -100 in a mean that is no Mean": lambda y, batch: (
        own_loss(y, batch)[0].sum() / own_loss(y, batch)[1].sum()
    ),
    "targets of -100, row by row": rows_of_counting,
    "tokens above 40, row by row": lambda y, batch: (
        ((y**2).mean(2) * (batch["tokens"] > 40)).sum(1) / (batch["tokens"] > 40).sum(1)
    ).mean(),
    "a sum of what only probabilities have": of_probabilities,
    "a sum over positions, a mean over rows": lambda y, batch: y.sum((1, 2)).mean(),
    "a weight that counts rows": lambda y, batch: hfjax.Mean(y.sum(), y.shape[0]),
    "a likelihood of whole rows": lambda y, batch: jax.nn.softplus(y.mean((1, 2))).mean(),
    "a masked mean that is no Mean": lambda y, batch: (
        (y.sum(2) * batch["tokens"]).sum() / batch["tokens"].sum()
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_whole_rows_that_its_parts_do_not_make_is_refused(name):
    with pytest.raises(ValueError, match=r"not that of their parts together .* hfjax\.Mean"):
        traced(own(lambda x: x), loss=LOSSES[name])


def test_losses_that_are_means_over_positions_pass_without_a_warning(recwarn):
    def counting(y, batch):
        losses, counts = own_loss(y, batch)
        return hfjax.Mean(losses.sum(), counts.sum())

    entropy = lambda y, batch: -jnp.log(jax.nn.sigmoid(y)).mean()
    for loss in (counting, entropy):
        traced(own(lambda x: x), loss=loss)
    assert not [w for w in recwarn if "could not try" in str(w.message)]


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda y, batch: jnp.log(-1 - y**2).mean(), "no numbers that were tried"),
        (lambda y, batch: jax.lax.psum(y.mean(), "data"), r"parts \(\w+Error"),
    ],
    ids=["it is never finite", "it sends"],
)
def test_a_loss_that_cannot_be_tried_is_warned_of(loss, why):
    with pytest.warns(UserWarning, match=f"could not try whether the loss of whole rows.*{why}"):
        traced(own(lambda x: x), loss=loss)


R = jax.random
DRAWS = {
    "a table from a constant key": lambda y, key, row_keys: R.normal(R.key(7), y.shape[1:])[None],
    "noise from a constant raw key": lambda y, key, row_keys: R.normal(R.PRNGKey(7), y.shape),
    "noise of positions from keys of rows": lambda y, key, row_keys: jax.vmap(
        lambda key: R.normal(key, y.shape[1:])
    )(row_keys),
    "the same for all positions": lambda y, key, row_keys: R.normal(R.key(7), (1, 1, 64)),
    "noise from a key of the device": lambda y, key, row_keys: R.normal(key, y.shape),
    "noise of rows": lambda y, key, row_keys: jax.vmap(R.normal)(row_keys)[:, None, None],
}


def test_random_numbers_for_positions_differ_by_position():
    def drawing(name):
        def forward(model, batch, key, row_keys):
            y = model(batch)
            return y + DRAWS[name](y, key, row_keys)

        traced(own(lambda x: x), forward=forward)

    for name in list(DRAWS)[:3]:
        with pytest.raises(ValueError, match=r"draws random numbers for the positions.*the same"):
            drawing(name)
    for name in list(DRAWS)[3:]:
        drawing(name)


def test_keys_of_rows_are_those_of_one_device_and_a_plain_mean_weighs_each_row_once():
    forward = lambda model, batch, row_keys: model(batch) * DRAWS["noise of rows"](0, 0, row_keys)
    told = []
    for sizes in ({"data": 1}, {"context": 2}):
        step = made(own(lambda x: x), sizes, forward=forward)
        _, metrics = step(hfjax.init(step.layout), TOKENS)
        assert float(metrics["weight"]) == 2.0
        told.append(float(metrics["loss"]))
    assert abs(told[0] - told[1]) < 1e-6


def test_devices_that_share_rows_draw_other_numbers_from_a_key_of_the_device():
    def told(y, batch):
        count = jnp.float32(y.size)
        return hfjax.Mean(y.sum(), count, {"square": hfjax.Mean((y**2).sum(), count)})

    forward = lambda model, batch, key: 0 * model(batch) + R.normal(key)
    step = made(own(lambda x: x), {"context": 2}, loss=told, forward=forward)
    _, metrics = step(hfjax.init(step.layout), TOKENS)
    assert metrics["square"] - metrics["loss"] ** 2 > 1e-3  # the variance


class Attending(nnx.Module):
    """A model with an attention of its own, of (the model, q, k, v, and documents if any)."""

    def __init__(self, attend, heads, groups, rngs):
        self.embedding = nnx.Embed(64, heads * 4, rngs=rngs)
        self.keys = nnx.Linear(heads * 4, groups * 4, rngs=rngs)
        self.temperature = nnx.Param(jnp.ones(()) * 1.5)
        self.slopes = nnx.Param(2.0 ** -jnp.arange(1, heads + 1))
        self.dropout = Dropout(0.5, rngs=rngs)
        self.attend, self.kernels = attend, plain

    def __call__(self, batch):
        x = self.embedding(batch["tokens"])
        by_head = lambda y: y.reshape(*y.shape[:2], -1, 4)
        inside = (batch["documents"],) if "documents" in batch else ()
        k = by_head(self.keys(x))
        attend = self.kernels.attention(partial(self.attend, self))
        return attend(by_head(x), k, k, *inside).reshape(x.shape)


def attending(attend, heads=4, groups=None):
    return lambda rngs: Attending(attend, heads, groups or heads, rngs)


dot_product = jax.nn.dot_product_attention


def alike(_, q, k, v):
    return dot_product(q, k, v)


def far(q):
    return abs(jnp.arange(q.shape[1])[:, None] - jnp.arange(q.shape[1])[None])[None, None]


def alibi(_, q, k, v):
    slopes = 2.0 ** -jnp.arange(1, q.shape[2] + 1)
    return dot_product(q, k, v, bias=-slopes[None, :, None, None] * far(q))


def alternating(_, q, k, v):
    signs = np.array([(-1.0) ** head for head in range(q.shape[2])], np.float32)
    return dot_product(q * signs[None, None, :, None], k, v)


def half_inside_documents(_, q, k, v, documents):
    same = documents[:, :, None] == documents[:, None, :]
    masks = [same if head < q.shape[2] // 2 else same | ~same for head in range(q.shape[2])]
    return dot_product(q, k, v, mask=jnp.stack(masks, 1))


def tiled(_, q, k, v):
    every = lambda x: jnp.tile(x, (1, 1, q.shape[2] // x.shape[2], 1))
    return dot_product(q, every(k), every(v))


def learned_slopes(model, q, k, v):
    slopes = model.slopes[...][: q.shape[2]]
    return dot_product(q, k, v, bias=-slopes[None, :, None, None] * far(q))


def dropping(model, q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
    return jnp.einsum("bhqk,bkhd->bqhd", model.dropout(jax.nn.softmax(scores)), v)


def with_temperature(model, q, k, v):
    return dot_product(q * model.temperature[...], k, v)


DOCUMENTS = TOKENS | {"documents": np.zeros((2, 32), np.int32)}
SIX = {"tokens": np.zeros((2, 30), np.int32)}
NOT_ALIKE = {
    "slopes": (alibi, 4, 4, {"context": 4}, TOKENS),
    "slopes of three heads": (alibi, 3, 3, {"context": 3}, SIX),
    "signs that alternate": (alternating, 4, 4, {"context": 4}, TOKENS),
    "documents in half of the heads": (half_inside_documents, 4, 4, {"context": 2}, DOCUMENTS),
    "heads of keys in turn": (tiled, 4, 2, {"context": 2}, TOKENS),
    "slopes that are parameters": (learned_slopes, 4, 4, {"context": 2}, TOKENS),
    "dropout of scores": (dropping, 4, 4, {"context": 2}, TOKENS),
    "slopes, heads split over tensor": (alibi, 4, 4, {"context": 2, "tensor": 2}, TOKENS),
}


@pytest.mark.parametrize("what", NOT_ALIKE)
def test_an_attention_of_ones_own_that_does_not_treat_heads_alike_is_refused(what):
    attend, heads, groups, sizes, batch = NOT_ALIKE[what]
    names = {"keys/kernel": ("embed", "heads")} if "tensor" in sizes else None
    with pytest.raises(ValueError, match=r"does not treat heads alike.*Context\(check=False\)"):
        traced(attending(attend, heads, groups), sizes, batch, axes=names)


ALIKE = {
    "grouped": (alike, 6, 3, {"context": 3}, SIX),
    "groups that are repeated": (alike, 4, 2, {"context": 4}, TOKENS),
    "a parameter for all heads": (with_temperature, 4, 4, {"context": 2}, TOKENS),
}


@pytest.mark.parametrize("what", ALIKE)
def test_an_attention_of_ones_own_that_treats_heads_alike_passes(what, recwarn):
    attend, heads, groups, sizes, batch = ALIKE[what]
    traced(attending(attend, heads, groups), sizes, batch)
    assert not [w for w in recwarn if "could not try" in str(w.message)]


class Closing(Attending):
    """A model whose attention closes over what was made of each token."""

    def __call__(self, batch):
        x = self.embedding(batch["tokens"])
        q = x.reshape(*x.shape[:2], -1, 4)
        attend = self.kernels.attention(partial(self.attend, x))
        return attend(q, q, q).reshape(x.shape)


def gated(x, q, k, v):
    return dot_product(q * jax.nn.sigmoid(x[:, :, None, :4]), k, v)


def gated_by_head(x, q, k, v):
    return dot_product(q * jax.nn.sigmoid(x.reshape(*x.shape[:2], -1, 4)), k, v)


def gated_by_row(x, q, k, v):
    return dot_product(q * jax.nn.sigmoid(x[:, :1, None, :4]), k, v)


@pytest.mark.parametrize("attend", [gated, gated_by_head, gated_by_row])
def test_an_attention_that_closes_over_positions_is_refused(attend, recwarn):
    said = r"closes over an array \[2, 16, 16\] with positions .*Ulysses gives it whole rows"
    with pytest.raises(ValueError, match=said):
        traced(lambda rngs: Closing(attend, 4, 4, rngs), {"context": 2}, SIXTEEN)
    assert not [w for w in recwarn if "could not try" in str(w.message)]


def test_an_attention_that_cannot_be_tried_is_warned_of(monkeypatch):
    def of_long_rows(_, q, k, v):
        if q.shape[1] < 16:
            raise ValueError("rows are too short")
        return dot_product(q, k, v)

    monkeypatch.setattr("hfjax.checks.heads_alike.POSITIONS_TRIED", 8)
    with pytest.warns(UserWarning, match="could not try whether the model's own.*too short"):
        traced(attending(of_long_rows), {"context": 2})


def test_an_attention_of_ones_own_is_given_whole_rows():
    told = []
    for sizes in ({"data": 1}, {"context": 4}):
        step = made(attending(with_temperature), sizes)
        told.append(float(step(hfjax.init(step.layout), TOKENS)[1]["loss"]))
    assert abs(told[0] - told[1]) < 1e-6
    with pytest.raises(ValueError, match="only Ulysses can give whole rows"):
        traced(attending(alike), context="ring")


def test_a_loss_that_shifts_targets_by_itself_is_refused():
    def shifted(logits, batch):
        targets = batch["tokens"][:, 1:]
        return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], targets).mean()

    with pytest.raises(ValueError, match="the loss cuts or joins positions of a row"):
        traced(own(lambda x: x), loss=shifted)


def test_lengths_in_errors_are_those_of_the_rows():
    with pytest.raises(ValueError, match=r"holds an array \[1, 32, 1\] with a number for each"):
        traced(own(lambda x: x + sines(x)))

    class Crossed(Attending):
        def __call__(self, batch):
            x = self.embedding(batch["tokens"]).reshape(2, -1, 4, 4)
            return self.kernels.attention(partial(self.attend, self))(x, x[:, :5], x[:, :5])

    with pytest.raises(ValueError, match=r"attention of 32 queries to 5 keys.* the 32 positions"):
        traced(lambda rngs: Crossed(alike, 4, 4, rngs))

    class WithOneMore(Attending):
        def __call__(self, batch):
            x = self.embedding(batch["tokens"]).reshape(2, -1, 4, 4)
            keys = jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, 0)))
            return self.kernels.attention(partial(self.attend, self))(x, keys, keys)

    model = lambda rngs: WithOneMore(alike, 4, 4, rngs)
    for check in (True, False):
        with pytest.raises(ValueError, match=r"attention of 16 queries to 17 keys.* 16 positions"):
            traced(model, {"context": 2}, SIXTEEN, context={"check": check})


SIXTEEN = {"tokens": TOKENS["tokens"][:, :16]}  # of 16 positions the look makes 13


class Fours(Own):
    def __call__(self, batch):
        if (length := batch["tokens"].shape[1]) % 4:
            raise RuntimeError(f"{length} is no multiple of 4")
        return super().__call__(batch)


def in_chunks(y, batch):
    """A mean over chunks of four positions."""
    return (y.reshape(y.shape[0], -1, 4, y.shape[-1]) ** 2).mean((2, 3)).mean()


@pytest.mark.parametrize(
    ("model", "loss", "said"),
    [
        (Own, in_chunks, "TypeError: cannot reshape"),
        (Fours, squares, "RuntimeError: 13 is no multiple of 4"),
    ],
    ids=["a loss in chunks", "a multiple of 4"],
)
def test_what_takes_some_lengths_only_runs_unchecked_and_the_message_says_so(model, loss, said):
    given = [lambda rngs: model(lambda x: x, rngs), {"context": 2}, SIXTEEN]
    message = rf"takes rows of 16 positions, but not of 13, .*Context\(check=False\).*{said}"
    with pytest.raises(ValueError, match=message):
        traced(*given, loss=loss)
    traced(*given, loss=loss, context={"check": False})


def test_an_error_of_ones_own_has_the_numbers_of_the_rows():
    def failing(y, batch):
        raise RuntimeError(f"no loss of {y.shape[1]} positions")

    with pytest.raises(RuntimeError, match="no loss of 16 positions"):
        traced(own(lambda x: x), {"context": 2}, SIXTEEN, loss=failing)


def test_unchecked_nothing_is_traced_at_another_length_and_outputs_have_all_positions():
    lengths = set()

    def noting(x):
        lengths.add(x.shape[1])
        return x

    def predicted(sizes, **how):
        mesh = hfjax.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
        layout = hfjax.layout(own(noting), optax.sgd(0.1), mesh, DDP | CONTEXT)
        forward = lambda model, batch: (model(batch), model.embedding(batch["tokens"]))
        return hfjax.predict_step(layout, forward, **how)(hfjax.init(layout), TOKENS)

    context = hfjax.Context(check=False)  # 32 positions, and a width of 32
    found = predicted({"context": 4}, context=context)
    assert lengths == {32, 8}
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), found, predicted({"data": 1}))


def drawing_a_table(model, batch):
    y = model(batch)
    return y + R.normal(R.key(7), y.shape[1:])[None]


@pytest.mark.parametrize(
    ("meet", "loss", "how"),
    [
        (attend_here, squares, {}),
        (lambda x: x / x.shape[1], squares, {}),
        (lambda x: x + sines(x), squares, {}),
        (lambda x: x, rows_of_counting, {}),
        (lambda x: x, squares, {"forward": drawing_a_table}),
    ],
    ids=["meeting", "a number", "an array", "a loss", "a draw"],
)
def test_what_is_refused_is_told_of_the_switch(meet, loss, how):
    with pytest.raises(ValueError, match=r"hfjax\.Context\(check=False\)"):
        traced(own(meet), loss=loss, **how)
    traced(own(meet), loss=loss, **how, context={"check": False})


class Prepared(nnx.Module):
    """A model that shifts its targets as docs/long_sequences.md says."""

    def __init__(self, rngs):
        self.embedding = nnx.Embed(64, 64, rngs=rngs)

    def __call__(self, batch):
        return self.embedding(self.prepare(batch)["tokens"])

    @staticmethod
    def prepare(batch):
        return next_tokens(batch)


def test_a_model_that_prepares_its_batch_is_the_same_on_one_device():
    def loss(y, batch):
        targets = Prepared.prepare(batch)["targets"]
        return optax.softmax_cross_entropy_with_integer_labels(y, targets).mean()

    batch, told = {"tokens": RNG.integers(0, 64, (2, 33), np.int32)}, []
    for sizes in ({"data": 1}, {"context": 2}):
        step = made(lambda rngs: Prepared(rngs), sizes, loss)
        told.append(float(step(hfjax.init(step.layout), batch)[1]["loss"]))
    assert abs(told[0] - told[1]) < 1e-6


class Listed(nnx.Module):
    """A model in three parts whose layers, a list, are not of one shape."""

    def __init__(self, rngs):
        self.embedding = nnx.Embed(64, 16, rngs=rngs)
        self.layers = nnx.List([Mixing(width, rngs) for width in (8, 24)])

    def embed(self, batch):
        return self.embedding(batch["tokens"])

    def head(self, x):
        return x


class Mixing(nnx.Module):
    def __init__(self, width, rngs):
        self.up, self.down = nnx.Linear(16, width, rngs=rngs), nnx.Linear(width, 16, rngs=rngs)
        self.kernels = plain

    def __call__(self, x):
        q = x.reshape(*x.shape[:2], 4, 4)
        x = x + self.kernels.attention(causal_attention)(q, q, q).reshape(x.shape)
        return x + self.down(jax.nn.relu(self.up(x)))


class Stacked(Listed):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(64, 16, rngs=rngs)
        self.layers = stacked(2, lambda rngs: Mixing(8, rngs), rngs)


BRANCHES = {
    "schedule zb-h1 has branches": (Stacked, {"schedule": Schedule("zb-h1", 2)}),
    'remat="except_last" has branches': (
        Stacked, {"schedule": Schedule("1f1b", 2), "remat": "except_last"},
    ),
    "a pipeline of a list of layers has a branch": (Listed, {"schedule": Schedule("1f1b", 2)}),
}  # fmt: skip


@pytest.mark.parametrize("why", BRANCHES)
def test_a_ring_in_a_branch_is_refused_by_name(why):
    model, execution = BRANCHES[why]
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], pipe=2, context=2)
    layout = hfjax.layout(lambda rngs: model(rngs), optax.sgd(0.1), mesh, PIPE | CONTEXT)
    with pytest.raises(ValueError, match=f"{why}.* a permute in one waits for ever"):
        hfjax.train_step(layout, squares, context="ring", **execution).trace(TOKENS)
    step = hfjax.train_step(layout, squares, **execution)
    step.trace(TOKENS)
    assert step.context is not None
    assert step.context.option.form != "ring"


def test_groups_of_one_beside_ulysses_are_refused():
    said = r'ulysses=1.* all 4 devices exchange heads under form="ulysses".* Leave ulysses= out'
    with pytest.raises(ValueError, match=said):
        traced(attending(alike), context={"form": "ulysses", "ulysses": 1})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"check": "no"}, r"Context\(check='no'\): true or false"),
        ({"check": float("nan")}, r"Context\(check=nan\): true or false"),
        ({"sequence": {"x": 1.5}}, r"Context\(sequence={'x': 1.5}\): the number of a dimension"),
        ({"sequence": {"x": True}}, r"sequence={'x': True}\): the number of a dimension, or None"),
        ({"sequence": {"x": "3"}}, r"sequence={'x': '3'}\): the number of a dimension, or None"),
    ],
)
def test_a_field_of_context_that_is_no_number_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        hfjax.Context(**fields)


def test_a_field_that_context_does_not_have_is_refused_with_those_that_it_has():
    for made_of in (lambda x: hfjax.Execution(context=x), lambda x: hfjax.Context(**x)):
        with pytest.raises(TypeError, match=r"'orders'\. Did you mean order\? All: form, ulysses"):
            made_of({"orders": 1})


def test_pipes_of_haiscale_take_no_shared_rows():
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], pipe=2, context=2)
    layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"a pipe takes whole rows, .* context would share them"):
        hfjax.PipeDream(hfjax.partition(layers, stages=2), microbatches=2, mesh=mesh)
