"""Where devices share rows, model and loss see whole rows: what people write is as on one device.

Most cases were refused, or silently another number, while a model was traced at the size of a part.
"""

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import CONTEXT, DDP, PIPE, TENSOR, Schedule
from hfjax.models.attention import causal_attention
from hfjax.models.layers import Dropout, local_ops, stack_layers
from hfjax.models.loss import next_tokens
from hfjax.parallel.jaxprs.walk import equations_in
from tests.test_context_parallel import apart, doubled

RNG = np.random.default_rng(0)
TOKENS = {"tokens": RNG.integers(0, 64, (2, 32), np.int32)}


class Table(nnx.Module):
    """An embedding as wide as its parameters are."""

    def __init__(self, rows, width, rngs):
        self.rows = nnx.Param(jax.random.normal(rngs.params(), (rows, width)))

    def __call__(self, tokens):
        return self.rows[...][tokens]


class Own(nnx.Module):
    """A model whose positions meet in ways of its own: each makes an output."""

    def __init__(self, meets, rngs):
        self.embedding = Table(64, 32, rngs)
        self.meets = tuple(meets.items())

    def __call__(self, batch):
        x = self.embedding(batch["tokens"])
        return {name: meet(x) for name, meet in self.meets}


def squares(outputs, batch):
    """Return the sum of the means of squares, each a metric as well."""
    means = {
        name: hfjax.Mean((jnp.abs(y) ** 2).mean(), jnp.float32(1)) for name, y in outputs.items()
    }
    return hfjax.Mean(sum(m.total for m in means.values()), jnp.float32(1), means)


def made(model: Any, sizes, loss=squares, forward=None, axes=None, strategy=DDP, **execution):
    """Return a step of a model (a function of rngs, or how the positions of `Own` meet)."""
    mesh = hfjax.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    strategy = strategy | CONTEXT if "context" in sizes else strategy
    strategy = strategy | TENSOR if "tensor" in sizes else strategy
    model = model if callable(model) else own(model)
    wide: Any = lambda rngs: doubled(model(rngs))
    layout = hfjax.layout(
        wide, optax.sgd(0.1), mesh, strategy.edit(replicate_below=0), forward=forward, axes=axes
    )
    return hfjax.train_step(layout, loss, **execution)


def own(meets):
    return lambda rngs: Own(meets, rngs)


def traced(model, sizes=None, batch=TOKENS, **how):
    return made(model, sizes or {"context": 4}, **how).trace(batch)


def of_a_step(model, sizes, batch=TOKENS, **how):
    """Return metrics and parameters after a step."""
    step = made(model, sizes, **how)
    state, metrics = step(hfjax.init(step.layout), batch)
    return dict(metrics), hfjax.full_array(state.params)


def same_as_one_device(model, sizes=None, batch=TOKENS, context="auto", close=1e-9, **how):
    """Assert that a step is that of one device, each metric and all gradients; return both."""
    with jax.enable_x64(True):
        wanted = of_a_step(model, {"data": 1}, batch, **how)
        found = of_a_step(model, sizes or {"context": 4}, batch, context=context, **how)
    for name, value in wanted[0].items():
        np.testing.assert_allclose(found[0][name], value, rtol=close, atol=1e-12, err_msg=name)
    assert apart(found[1], wanted[1]) < close
    return found, wanted


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
    "transforms": lambda x: jnp.fft.fft(x, axis=1).real,
    "writes": lambda x: x.at[:, 0].set(0),
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
    "sees a running sum in": lambda x: jax.lax.scan(
        lambda h, y: (h + y, jnp.tanh(h + y)), x[:, 0] * 0, x.swapaxes(0, 1)
    )[1].swapaxes(0, 1),
}


# Of a mesh of rows and positions in zigzag order, and of positions one after the other.
MESHES = {
    "zigzag": ({"context": 2, "data": 2}, {"context": 2}),
    "in order": ({"context": 4}, {"context": {"order": "contiguous"}}),
}


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.short("zigzag")
def test_sequence_programs_may_meet(mesh):
    sizes, given = MESHES[mesh]
    given = given if "order" in str(given) else {}
    same_as_one_device(MEETINGS | LENGTHS, sizes, **given)


def sines(x):
    return np.sin(np.arange(x.shape[1], dtype=np.float32))[None, :, None]


def frequencies(x):
    return ((1e4 * x.shape[1]) ** (np.arange(32, dtype=np.float32) / 32))[None, None]


LENGTHS = {
    "a table of sines": lambda x: x + sines(x),
    "one in a jit": jax.jit(lambda x: x + sines(x)),
    "the length": lambda x: x / x.shape[1],
    "a vector": lambda x: x / frequencies(x),
    "a vector in a jit": jax.jit(lambda x: x / frequencies(x)),
    "a number for all": lambda x: x * np.full((1, x.shape[1], 1), 1 / x.shape[1], np.float32),
    "a power": lambda x: (1 + 0.1 * jnp.tanh(x)) ** x.shape[1],
    "a branch on a part": lambda x: 2 * x if x.shape[1] <= 8 else x,
    "a branch on a whole row": lambda x: 2 * x if x.shape[1] == 32 else x,
    "a branch on what divides": lambda x: 2 * x if x.shape[1] % 4 == 0 else x,
    "a branch between alike operations": lambda x: x - 1 if x.shape[1] <= 8 else 1 - x,
}


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


LOSSES |= {
    "what counts, as a Mean": lambda y, batch: hfjax.Mean(*(x.sum() for x in own_loss(y, batch))),
    "entropies": lambda y, batch: -jnp.log(jax.nn.sigmoid(y)).mean(),
    "never finite": lambda y, batch: 0 * jnp.log(-1 - y**2).mean(),
    "in chunks": lambda y, batch: in_chunks(y, batch),
    "targets that are shifted here": lambda y, batch: shifted(y, batch),
}


def shifted(logits, batch):
    targets = batch["tokens"][:, 1:]
    return optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], targets).mean()


def in_chunks(y, batch):
    """A mean over chunks of four positions."""
    return (y.reshape(y.shape[0], -1, 4, y.shape[-1]) ** 2).mean((2, 3)).mean()


def test_a_loss_is_that_of_whole_rows():
    """Of sums by row, counts, likelihoods: with every metric of `hfjax.Mean`, and its gradient."""

    def all_of_them(outputs, batch):
        y = outputs["y"] @ RNG_OF_LOSSES
        found = {name: loss(y, batch) for name, loss in LOSSES.items()}
        as_mean = lambda m: m if isinstance(m, hfjax.Mean) else hfjax.Mean(m, jnp.float64(1))
        means = {name: as_mean(m) for name, m in found.items()}
        finite = [m.total / m.weight for n, m in means.items() if n not in NEVER_FINITE]
        by_row = hfjax.Mean(y.sum((1, 2)).sum(), y.shape[0], {})
        return hfjax.Mean(sum(finite) * 4, 4, means | {"a sum by row": by_row})

    for sizes in ({"context": 4}, {"context": 2, "data": 2}):
        same_as_one_device({"y": lambda x: x}, sizes, loss=all_of_them)


RNG_OF_LOSSES = np.random.default_rng(1).normal(size=(32, 64))
NEVER_FINITE = ("never finite", "a sum of what only probabilities have")


R = jax.random
DRAWS = {
    "a table from a constant key": lambda y, key, example_keys: R.normal(R.key(7), y.shape[1:])[
        None
    ],
    "noise from a constant raw key": lambda y, key, example_keys: R.normal(R.PRNGKey(7), y.shape),
    "noise of positions from keys of rows": lambda y, key, example_keys: jax.vmap(
        lambda key: R.normal(key, y.shape[1:])
    )(example_keys),
    "from a key of another kind": lambda y, key, example_keys: R.normal(
        R.key(7, impl="rbg"), y.shape
    ),
    "the same for all positions": lambda y, key, example_keys: R.normal(R.key(7), (1, 1, 64)),
    "noise from a key of the device": lambda y, key, example_keys: R.normal(key, y.shape),
    "noise of rows": lambda y, key, example_keys: jax.vmap(R.normal)(example_keys)[:, None, None],
}


@pytest.mark.slow
def test_random_numbers_are_those_of_one_device():
    """From constant keys, keys of rows, and a key of the step."""

    def forward(model, batch, key, example_keys):
        (y,) = model(batch).values()
        y = jnp.concatenate([y, y], -1)
        return {name: y * 0.1 + draw(y, key, example_keys) for name, draw in DRAWS.items()}

    for sizes in ({"context": 4}, {"context": 2, "data": 2}):
        same_as_one_device({"x": lambda x: x}, sizes, forward=forward)


def test_a_plain_mean_weighs_each_row_once():
    found, _ = same_as_one_device({"x": lambda x: x}, loss=lambda y, batch: (y["x"] ** 2).mean())
    assert float(found[0]["weight"]) == 2.0


class Attending(nnx.Module):
    """A model with an attention of its own, of (the model, q, k, v, and documents if any)."""

    def __init__(self, attend, heads, groups, rngs):
        self.embedding = Table(64, heads * 4, rngs)
        self.keys = nnx.Linear(heads * 4, groups * 4, rngs=rngs)
        self.temperature = nnx.Param(jnp.ones(()) * 1.5)
        self.slopes = nnx.Param(2.0 ** -jnp.arange(1, heads + 1))
        self.dropout = Dropout(0.5, rngs=rngs)
        self.attend, self.kernels = attend, local_ops

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
FLOAT32 = 1e-6  # in which its products are


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


DOCUMENTS = TOKENS | {"documents": np.sort(RNG.integers(0, 3, (2, 32), np.int32), 1)}
SIX = {"tokens": RNG.integers(0, 64, (2, 30), np.int32)}
ATTENTIONS = {
    "slopes": (alibi, 4, 4, {"context": 4}, TOKENS),
    "slopes of three heads": (alibi, 3, 3, {"context": 3}, SIX),
    "signs that alternate": (alternating, 4, 4, {"context": 4}, TOKENS),
    "documents in half of the heads": (half_inside_documents, 4, 4, {"context": 2}, DOCUMENTS),
    "heads of keys in turn": (tiled, 4, 2, {"context": 2}, TOKENS),
    "slopes that are parameters": (learned_slopes, 4, 4, {"context": 2, "data": 2}, TOKENS),
    "dropout of scores": (dropping, 4, 4, {"context": 2}, TOKENS),
    "slopes, heads split over tensor": (alibi, 4, 4, {"context": 2, "tensor": 2}, TOKENS),
    "grouped": (alike, 6, 3, {"context": 3}, SIX),
    "a parameter for all heads": (with_temperature, 4, 4, {"context": 2}, TOKENS),
    "of few heads, by its equations": (alibi, 2, 2, {"context": 4}, TOKENS),
    "groups of fewer heads, by its equations": (alike, 4, 2, {"context": 4}, TOKENS),
}


@pytest.mark.parametrize("what", ATTENTIONS)
@pytest.mark.short("heads of keys in turn", "grouped")
def test_an_attention_of_ones_own_is_run_on_its_heads(what):
    """Under Ulysses each device runs it on some of its heads; without, on its queries."""
    attend, heads, groups, sizes, batch = ATTENTIONS[what]
    names = {"keys/kernel": ("embed", "heads")} if "tensor" in sizes else None
    given = attending(attend, heads, groups), sizes, batch
    same_as_one_device(*given, loss=mean_square, axes=names, close=FLOAT32)


def mean_square(y, batch):
    return (y**2).mean()


def test_heads_of_keys_that_would_be_repeated_are_not_in_ones_own_attention():
    given = attending(alike, 4, 2), {"context": 4}
    with pytest.raises(ValueError, match=r"own attention has 2 heads of keys .* Repeat them in"):
        traced(*given, loss=mean_square, context="ulysses")


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


@pytest.mark.slow
@pytest.mark.parametrize("attend", [gated, pytest.param(gated_by_head, marks=pytest.mark.slow)])
def test_an_attention_may_close_over_positions(attend):
    model = lambda rngs: Closing(attend, 4, 4, rngs)
    same_as_one_device(model, {"context": 2}, SIXTEEN, loss=mean_square, close=FLOAT32)


@pytest.mark.slow
def test_an_attention_of_ones_own_goes_around_no_ring():
    given = attending(with_temperature), {"context": 4}
    same_as_one_device(*given, loss=mean_square, context="ring", close=FLOAT32)


class OtherShapes(Attending):
    """Attentions without heads, of a pair, and given by name."""

    def __call__(self, batch):
        x = self.embedding(batch["tokens"])
        of_heads, kernels = x.reshape(*x.shape[:2], 4, 4), self.kernels
        bare = kernels.attention(lambda q, k, v: jax.nn.softmax(q @ k.swapaxes(1, 2)) @ v)(x, x, x)
        pair = kernels.attention(lambda q, k, v: (dot_product(q, k, v), q.sum(-1) * k.mean(-1)))
        y, sums = pair(of_heads, of_heads, of_heads)
        inside = jnp.cumsum(batch["tokens"] == 3, axis=1)
        causal = kernels.attention(causal_attention)
        z = causal(of_heads, v_BSGD=of_heads, k_BSGD=of_heads, documents_BS=inside)
        return bare + y.reshape(x.shape) + sums.sum(-1, keepdims=True) + z.reshape(x.shape)


@pytest.mark.parametrize("context", ["auto", "ring", "ulysses"])
@pytest.mark.short("ring")
def test_attentions_of_other_shapes_are_run_by_their_equations(context):
    model = lambda rngs: OtherShapes(alike, 4, 4, rngs)
    how = {"loss": mean_square, "context": context, "close": FLOAT32}
    same_as_one_device(model, {"context": 2, "data": 2}, SIXTEEN, **how)


class Crossed(Attending):
    """Attention of all positions to the first five, and to one more than there are."""

    def __call__(self, batch):
        x = self.embedding(batch["tokens"])
        x = x.reshape(*x.shape[:2], 4, 4)
        keys = jnp.pad(x, ((0, 0), (1, 0), (0, 0), (0, 0)))
        attend = self.kernels.attention(partial(self.attend, self))
        return attend(x, x[:, :5], x[:, :5]) + attend(x, keys, keys)


@pytest.mark.slow
def test_attention_to_other_positions_than_the_rows_is_run_by_its_equations():
    model = lambda rngs: Crossed(alike, 4, 4, rngs)
    same_as_one_device(model, {"context": 2}, SIXTEEN, loss=mean_square, close=FLOAT32)


SIXTEEN = {"tokens": TOKENS["tokens"][:, :16]}


def test_a_model_sees_the_length_of_whole_rows_only():
    lengths = set()

    def noting(x):
        lengths.add(x.shape[1])
        return x

    traced({"x": noting})
    assert lengths == {32}


def test_an_error_of_ones_own_has_the_numbers_of_the_rows():
    def failing(y, batch):
        raise RuntimeError(f"no loss of {y['x'].shape[1]} positions")

    with pytest.raises(RuntimeError, match="no loss of 16 positions"):
        traced({"x": lambda x: x}, {"context": 2}, SIXTEEN, loss=failing)


def test_outputs_have_all_positions_in_their_order():
    def predicted(sizes, **how):
        mesh = hfjax.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
        layout = hfjax.layout(own({"x": lambda x: x}), optax.sgd(0.1), mesh, DDP | CONTEXT)
        forward = lambda model, batch: (model(batch), model.embedding(batch["tokens"]).sum(1))
        return hfjax.predict_step(layout, forward, **how)(hfjax.init(layout), TOKENS)

    wanted = predicted({"data": 1})
    for order in ("zigzag", "contiguous"):
        found = predicted({"context": 4}, context=hfjax.ContextParallel(order=order))
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), found, wanted)


class Normalising(nnx.Module):
    """BatchNorm of some positions, and transforms of what lies on several devices."""

    def __init__(self, rngs):
        wide: Any = jnp.zeros(()).dtype  # float64 in x64 mode
        self.table = Table(64, 8, rngs)
        self.norm = nnx.BatchNorm(8, dtype=wide, param_dtype=wide, rngs=rngs)

    def __call__(self, batch):
        x = self.table(batch["tokens"])
        normed = self.norm(x, mask=(batch["tokens"] > 20)[..., None])
        return {
            "rows": jnp.fft.fft(x, axis=0).real,
            "row": jnp.fft.fft(x, axis=1).real,
            "x": normed,
        }


@pytest.mark.parametrize("sizes", [{"context": 2, "data": 2}, {"data": 2}])
@pytest.mark.filterwarnings("ignore:.*examples meet, and no rule")
def test_statistics_and_transforms_are_of_all_rows_and_positions(sizes):
    same_as_one_device(lambda rngs: Normalising(rngs), sizes)


class Told(nnx.Module):
    """A layer that hands on a number for each row, beside the activations."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, stream):
        y = stream["x"] + jnp.tanh(self.linear(stream["x"]))
        return {"x": y, "told": stream["told"] + (y**2).mean((1, 2))}


class Tells(nnx.Module):
    """A model whose layers add up what they tell, from zeros on."""

    def __init__(self, rngs):
        self.table, self.layers = Table(64, 8, rngs), stack_layers(2, Told, rngs)

    def embed(self, batch):
        x = self.table(batch["tokens"])
        return {"x": x, "told": jnp.zeros(len(x))}

    def head(self, stream):
        return stream["x"] + stream["told"][:, None, None]


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"context": 2}, {"context": 2, "pipe": 2}])
def test_layers_hand_on_sums_of_whole_rows(sizes):
    with jax.enable_x64(True):
        found = [
            of_a_step(Tells, {"data": 1}, loss=mean_square),
            of_a_step(
                Tells,
                sizes,
                loss=mean_square,
                strategy=PIPE if "pipe" in sizes else DDP,
                schedule=Schedule("1f1b", 2) if "pipe" in sizes else None,
            ),
        ]
    (one, _), (many, _) = found
    np.testing.assert_allclose(many["loss"], one["loss"], rtol=1e-7)
    np.testing.assert_allclose(many["grad_norm"], one["grad_norm"], rtol=1e-6)


class Counting(Own):
    """A model that takes its own number of rows and positions only."""

    def __call__(self, batch):
        assert batch["tokens"].shape == (2, 32)
        return super().__call__(batch)


def test_a_model_is_traced_with_all_rows():
    model = lambda rngs: Counting({"x": lambda x: x.reshape(64, 32)}, rngs)
    same_as_one_device(model, {"context": 2, "data": 2})


# -- what is sent, and what of it is refused ----------------------------------------------------


def test_what_meets_is_told_with_its_line_and_bytes():
    step = made({"y": attend_here, "z": lambda x: x - x.mean(1, keepdims=True)}, {"context": 4})
    step.trace(TOKENS)
    told = str(step.sequence_comms)
    assert "gathered, 8.0 KiB" in told
    assert "summed over devices, 256 B" in told
    assert "test_sequence_programs.py" in told
    step = made({"y": lambda x: x**2}, {"context": 4})
    step.trace(TOKENS)
    assert str(step.sequence_comms) == "no positions meet"


def test_more_than_the_limit_is_refused_with_its_line_and_what_to_do():
    given = {"y": attend_here}, {"context": 4}
    said = (
        r"gather 16\.0 KiB in a microbatch, more than the limit of 1000 B \(.*"
        r"test_sequence_programs\.py.*"
        r"dot_general: 8\.0 KiB; .*8\.0 KiB\).*self\.kernels\.attention.*"
        r"hfjax\.ContextParallel\(gather=…\)"
    )
    with pytest.raises(ValueError, match=said):
        traced(*given, context={"gather": 1000})
    traced(*given, context={"gather": 20_000})
    step = made(*given, context={"gather": 1000})
    evaluate = hfjax.eval_step(step.layout, squares, context={"gather": 1000})
    with pytest.raises(ValueError, match=r"limit of 1000 B"):
        evaluate(hfjax.init(step.layout), TOKENS)


def test_nothing_larger_than_a_part_is_made_beside_what_is_gathered():
    """A mask of the user's, [S, S], costs [S / N, S]; its scores the same."""
    length = 64

    def masked(x):
        scores = x @ x.swapaxes(1, 2)
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        return jax.nn.softmax(jnp.where(mask[None], scores, -1e9)) @ x

    batch = {"tokens": np.zeros((1, length), np.int32)}
    traced_step = made({"y": masked}, {"context": 4}).trace(batch)
    sizes = [
        v.aval.shape
        for equation, _ in equations_in(traced_step.jaxpr.jaxpr)
        for v in equation.outvars
        if hasattr(v.aval, "shape") and v.aval.shape.count(length) > 1
    ]
    assert not sizes
    compiled = str(traced_step.lower().compile().as_text())
    shapes = {tuple(found.split(",")) for found in re.findall(r"\[([\d,]+)\]", compiled)}
    assert not [shape for shape in shapes if shape.count(str(length)) > 1]


class Prepared(nnx.Module):
    """A model that shifts its targets as docs/long_sequences.md says."""

    def __init__(self, rngs):
        self.embedding = Table(64, 64, rngs)

    def __call__(self, batch):
        return self.embedding(self.prepare(batch)["tokens"])

    @staticmethod
    def prepare(batch):
        return next_tokens(batch)


def test_a_model_that_prepares_its_batch_is_the_same_on_one_device():
    def loss(y, batch):
        targets = Prepared.prepare(batch)["targets"]
        return optax.softmax_cross_entropy_with_integer_labels(y, targets).mean()

    batch = {"tokens": RNG.integers(0, 64, (2, 33), np.int32)}
    same_as_one_device(lambda rngs: Prepared(rngs), {"context": 2}, batch, loss=loss)


class Listed(nnx.Module):
    """A model in three parts whose layers, a list, are not of one shape."""

    def __init__(self, rngs):
        self.embedding = Table(64, 16, rngs)
        self.layers = nnx.List([Mixing(width, rngs) for width in (8, 24)])

    def embed(self, batch):
        return self.embedding(batch["tokens"])

    def head(self, x):
        return x


class Mixing(nnx.Module):
    def __init__(self, width, rngs):
        self.up, self.down = nnx.Linear(16, width, rngs=rngs), nnx.Linear(width, 16, rngs=rngs)
        self.kernels = local_ops

    def __call__(self, x):
        q = x.reshape(*x.shape[:2], 4, 4)
        x = x + self.kernels.attention(causal_attention)(q, q, q).reshape(x.shape)
        return x + self.down(jax.nn.relu(self.up(x)))


class Stacked(Listed):
    def __init__(self, rngs):
        self.embedding = Table(64, 16, rngs)
        self.layers = stack_layers(2, lambda rngs: Mixing(8, rngs), rngs)


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
        hfjax.train_step(layout, mean_square, context="ring", **execution).trace(TOKENS)
    step = hfjax.train_step(layout, mean_square, **execution)
    step.trace(TOKENS)
    assert step.context is not None
    assert step.context.option.kind != "ring"


def test_groups_of_one_beside_ulysses_are_refused():
    said = r'ulysses=1.* all 4 devices exchange heads under form="ulysses".* Leave ulysses= out'
    with pytest.raises(ValueError, match=said):
        traced(attending(alike), loss=mean_square, context={"form": "ulysses", "ulysses": 1})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"gather": "all"}, r"ContextParallel\(gather='all'\): a number of bytes, or None"),
        ({"gather": -1}, r"ContextParallel\(gather=-1\): a number of bytes, or None"),
        (
            {"sequence": {"x": 1.5}},
            r"ContextParallel\(sequence={'x': 1.5}\): the number of a dimension",
        ),
        ({"sequence": {"x": True}}, r"sequence={'x': True}\): the number of a dimension, or None"),
        ({"sequence": {"x": "3"}}, r"sequence={'x': '3'}\): the number of a dimension, or None"),
    ],
)
def test_a_field_of_context_that_is_no_number_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        hfjax.ContextParallel(**fields)


def test_a_field_that_context_does_not_have_is_refused_with_those_that_it_has():
    for made_of in (lambda x: hfjax.Execution(context=x), lambda x: hfjax.ContextParallel(**x)):
        with pytest.raises(TypeError, match=r"'orders'\. Did you mean order\? All: form, ulysses"):
            made_of({"orders": 1})


def test_pipes_of_haiscale_take_no_shared_rows():
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], pipe=2, context=2)
    layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(0)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"a pipe takes whole rows, .* context would share them"):
        hfjax.compat.PipeDream(hfjax.compat.partition(layers, stages=2), microbatches=2, mesh=mesh)
