"""`axes=`: names of dimensions by pattern, and read from the model's own program."""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax import lax

import hfjax
from hfjax.models.layers import stack_layers
from hfjax.testing import assert_strategies_agree

RNG = np.random.default_rng(0)
X = {name: RNG.normal(size=(8, 8)) for name in "xy"}
IMAGES = {"x": RNG.normal(size=(8, 8, 8, 3)), "y": RNG.normal(size=(8, 10))}
TOKENS = {"x": RNG.integers(0, 64, (8, 6)), "y": RNG.normal(size=(8, 6, 64))}
on_x = lambda model, batch: model(batch["x"])
normal = lambda rngs, *shape: rngs.params.normal(shape) / np.sqrt(shape[-2])


def squares(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2)


def rms(x, axis=-1):
    return x * lax.rsqrt(jnp.mean(x**2, axis, keepdims=True) + 1e-6)


class Model(NamedTuple):
    """A model, and the names that one would write by hand, by pattern."""

    init: Callable
    names: dict[str, tuple]
    batch: Any = X
    forward: Callable | None = on_x


def exact_attention(query, key, value, mask=None, **_):
    """Flax's own has its softmax in float32."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / np.sqrt(query.shape[-1])
    scores = scores if mask is None else jnp.where(mask, scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), value)


def attention_of(library):
    return exact_attention if jax.config.read("jax_enable_x64") else library.dot_product_attention


class MLP(nnx.Module):
    def __init__(self, *, rngs):
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    def __init__(self, *, rngs):
        self.norms = nnx.List([nnx.LayerNorm(16, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(
            4, 16, attention_fn=attention_of(nnx), decode=False, rngs=rngs
        )
        self.up, self.down = nnx.Linear(16, 64, rngs=rngs), nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class ViT(nnx.Module):
    def __init__(self, *, rngs):
        self.patches = nnx.Conv(3, 16, (4, 4), strides=(4, 4), rngs=rngs)
        self.first = nnx.Param(rngs.params.normal((1, 1, 16)))
        self.positions = nnx.Param(rngs.params.normal((1, 5, 16)))
        self.blocks = nnx.List([Block(rngs=rngs) for _ in range(2)])
        self.norm, self.head = nnx.LayerNorm(16, rngs=rngs), nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x).reshape(len(x), -1, 16)
        first = jnp.broadcast_to(self.first[...], (len(x), 1, 16))
        x = jnp.concatenate([first, x], axis=1) + self.positions[...]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


class LinenLM(linen.Module):
    """A Transformer as Linen writes it: a table by integers, attention, a head over words."""

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(64, 16, name="words")(tokens)
        x = x + self.param("positions", linen.initializers.normal(1.0), (1, 6, 16))
        mask = linen.make_causal_mask(tokens)
        attention = linen.MultiHeadDotProductAttention(
            4, name="attention", attention_fn=attention_of(linen)
        )
        x = x + attention(linen.LayerNorm(name="norm")(x), mask=mask)
        h = linen.Dense(64, name="up")(linen.LayerNorm(name="norm_2")(x))
        x = x + linen.Dense(16, name="down")(linen.gelu(h))
        return linen.Dense(64, use_bias=False, name="head")(linen.LayerNorm(name="last")(x))


def linen_tree(rngs):
    return LinenLM().init(rngs.params(), TOKENS["x"])


def linen_bridge(rngs):
    return nnx.bridge.ToNNX(LinenLM(), rngs=rngs).lazy_init(TOKENS["x"])


def haiku_attention():
    def net(x):
        init = hk.initializers.VarianceScaling(1.0)
        h = hk.MultiHeadAttention(2, 4, w_init=init)(rms(x), rms(x), rms(x))
        return hk.nets.MLP([32, 8])(rms(x + h))

    return hk.without_apply_rng(hk.transform(net))


HAIKU = haiku_attention()


def gpt(rngs):
    """A plain pytree: layers stacked for a scan, heads by reshape, the table tied to the head."""
    stack = lambda *shape: normal(rngs, 3, *shape)
    layers = {"q": stack(16, 16), "k": stack(16, 16), "v": stack(16, 16), "o": stack(16, 16)}
    layers |= {"up": stack(16, 32), "up_bias": jnp.zeros((3, 32)), "down": stack(32, 16)}
    return {"words": normal(rngs, 64, 16), "layers_": layers}


def attend(x, w, heads, kv_heads):
    split = lambda y, n: y.reshape(*y.shape[:2], n, -1)
    q = split(x @ w["q"], heads)
    k, v = (jnp.repeat(split(x @ w[n], kv_heads), heads // kv_heads, 2) for n in "kv")
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return mixed.reshape(x.shape[0], x.shape[1], -1) @ w["o"]


def run_gpt(params, batch):
    @jax.checkpoint
    def layer(x, w):
        x = x + attend(rms(x), w, 4, 4)
        return x + jax.nn.silu(rms(x) @ w["up"] + w["up_bias"][None, None]) @ w["down"], None

    x, _ = lax.scan(layer, params["words"][batch["x"]], params["layers_"])
    return rms(x) @ params["words"].T


def llama(rngs):
    """A gated MLP, and attention with fewer keys than queries."""
    block = lambda: {
        **{"q": normal(rngs, 16, 16), "k": normal(rngs, 16, 8), "v": normal(rngs, 16, 8)},
        **{"o": normal(rngs, 16, 16), "gate": normal(rngs, 16, 64), "up": normal(rngs, 16, 64)},
        "down": normal(rngs, 64, 16),
    }
    words, head = normal(rngs, 64, 16), normal(rngs, 16, 64)
    return {"words": words, "blocks": [block(), block()], "head": head}


def run_llama(params, batch):
    x = params["words"][batch["x"]]
    for w in params["blocks"]:
        x = x + attend(rms(x), w, 4, 2)
        x = x + (jax.nn.silu(rms(x) @ w["gate"]) * (rms(x) @ w["up"])) @ w["down"]
    return rms(x) @ params["head"]


def rotary_llama(rngs):
    """Projections with heads as a dimension of their own, and fewer keys than queries."""
    block = lambda: {
        **{"q": normal(rngs, 16, 4, 4), "k": normal(rngs, 16, 2, 4), "v": normal(rngs, 16, 2, 4)},
        **{"o": normal(rngs, 4, 4, 16), "up": normal(rngs, 16, 64), "down": normal(rngs, 64, 16)},
        "gain": jnp.ones(16),
    }
    words, head = normal(rngs, 64, 16), normal(rngs, 16, 64)
    return {"words": words, "blocks": [block(), block()], "head": head}


def rotate(x):
    """Rotary embeddings, of halves of each head."""
    positions, rates = np.arange(x.shape[2])[:, None], np.geomspace(1, 0.01, x.shape[3] // 2)
    angles = (positions * rates)[None, None]
    sin, cos = np.sin(angles).astype(x.dtype), np.cos(angles).astype(x.dtype)
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def softmax_of(scores):
    scores = jnp.where(np.tri(scores.shape[-1], dtype=bool)[None, None], scores / 2, -1e9)
    return jax.nn.softmax(scores, axis=-1)


def attend_in_groups(q, k, v):
    """The queries of one head of keys are a dimension; as Llama 3 in JAX has it."""
    b, heads, t, d = q.shape
    groups = (b, k.shape[1], heads // k.shape[1], t)
    scores = jnp.einsum("bhgtd,bhsd->bhgts", q.reshape(*groups, d), k)
    weights = softmax_of(scores.reshape(b, heads, t, t)).reshape(*groups, t)
    return jnp.einsum("bhgts,bhsd->bhgtd", weights, v).reshape(b, heads, t, d)


def attend_repeated(q, k, v):
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    return jnp.einsum("bhts,bhsd->bhtd", softmax_of(jnp.einsum("bhtd,bhsd->bhts", q, k)), v)


def run_rotary_llama(attention):
    def run(params, batch):
        x = params["words"][batch["x"]]
        for w in params["blocks"]:
            h = w["gain"][None, None] * rms(x)
            q, k, v = (jnp.einsum("btd,dhq->bhtq", h, w[n]) for n in "qkv")
            x = x + jnp.einsum("bhtq,hqd->btd", attention(rotate(q), rotate(k), v), w["o"])
            x = x + jax.nn.silu(rms(x) @ w["up"]) @ w["down"]
        return rms(x) @ params["head"]

    return run


class Parts(nnx.Module):
    """A model in three parts, of stacked layers."""

    def __init__(self, *, rngs):
        self.enter, self.leave = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)
        self.layers = stack_layers(3, lambda rngs: Block(rngs=rngs), rngs)

    def embed(self, batch):
        return self.enter(batch["x"][:, None])

    def head(self, x):
        return self.leave(x)[:, 0]


class RNN(nnx.Module):
    def __init__(self, *, rngs):
        self.rnn, self.out = nnx.RNN(nnx.LSTMCell(8, 16, rngs=rngs)), nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.out(jnp.asarray(self.rnn(x[:, None]))[:, 0])


def in_flax(prefix, stack=()):
    """Names of flax's attention and of Dense layers up and down."""
    qkv, bias = (*stack, None, "heads", None), (*stack, "heads", None)
    names: dict[str, tuple] = {
        f"{prefix}attention/{n}/kernel": qkv for n in ("query", "key", "value")
    }
    names |= {f"{prefix}attention/{n}/bias": bias for n in ("query", "key", "value")}
    names[f"{prefix}attention/out/kernel"] = (*stack, "heads", None, None)
    names[f"{prefix}up/kernel"], names[f"{prefix}up/bias"] = (*stack, None, "mlp"), (*stack, "mlp")
    return names | {f"{prefix}down/kernel": (*stack, "mlp", None)}


LINEN = in_flax("params/") | {
    "params/words/embedding": ("vocab", None),
    "params/head/kernel": (None, "vocab"),
}
QKVO = {f"*/{n}": (None, "heads") for n in "qkv"} | {"*/o": ("heads", None)}
STACKED = {path: ("layers", *names) for path, names in QKVO.items()}
ROTARY = {f"*/{n}": (None, "heads", None) for n in "qkv"} | {"*/o": ("heads", None, None)}
ROTARY |= {"*/up": (None, "mlp"), "*/down": ("mlp", None)}
ROTARY |= {"words": ("vocab", None), "head": (None, "vocab")}
MODELS = {
    "NNX MLP": Model(
        lambda rngs: MLP(rngs=rngs),
        {"up/kernel": (None, "mlp"), "up/bias": ("mlp",), "down/kernel": ("mlp", None)},
    ),
    "NNX ViT": Model(lambda rngs: ViT(rngs=rngs), in_flax("blocks/*/"), IMAGES),
    "Linen tree": Model(linen_tree, LINEN, TOKENS, lambda p, batch: LinenLM().apply(p, batch["x"])),
    "Linen bridge": Model(
        linen_bridge, {p.removeprefix("params/"): n for p, n in LINEN.items()}, TOKENS
    ),
    "equinox MLP": Model(
        lambda rngs: eqx.nn.MLP(8, 8, 16, 2, key=rngs.params()),
        {
            "layers/0/weight": ("mlp", None),
            "layers/0/bias": ("mlp",),
            "layers/1/weight": (None, "mlp"),
        },
        forward=lambda model, batch: jax.vmap(model)(batch["x"]),
    ),
    "Haiku attention": Model(
        lambda rngs: HAIKU.init(rngs.params(), X["x"]),
        {
            **{f"*/{n}/w": (None, "heads") for n in ("query", "key", "value")},
            **{f"*/{n}/b": ("heads",) for n in ("query", "key", "value")},
            "multi_head_attention/linear/w": ("heads", None),
            **{"mlp/~/linear_0/w": (None, "mlp"), "mlp/~/linear_0/b": ("mlp",)},
            "mlp/~/linear_1/w": ("mlp", None),
        },
        forward=lambda p, batch: HAIKU.apply(p, batch["x"]),
    ),
    "GPT under scan": Model(
        gpt,
        STACKED
        | {"*/up": ("layers", None, "mlp"), "*/up_bias": ("layers", "mlp")}
        | {"*/down": ("layers", "mlp", None), "words": ("vocab", None)},
        TOKENS,
        run_gpt,
    ),
    "Llama": Model(
        llama,
        QKVO
        | {"*/gate": (None, "mlp"), "*/up": (None, "mlp"), "*/down": ("mlp", None)}
        | {"words": ("vocab", None), "head": (None, "vocab")},
        TOKENS,
        run_llama,
    ),
    "rotary Llama, queries in groups": Model(
        rotary_llama, ROTARY, TOKENS, run_rotary_llama(attend_in_groups)
    ),
    "rotary Llama, keys repeated": Model(
        rotary_llama, ROTARY, TOKENS, run_rotary_llama(attend_repeated)
    ),
    "three parts": Model(
        lambda rngs: Parts(rngs=rngs), in_flax("layers/", ("layers",)), forward=None
    ),
}
SIZES = {"data": 2, "fsdp": 2, "tensor": 2}
EVERYTHING = (hfjax.FSDP | hfjax.TENSOR).edit(replicate_below=0)


def layout_of(model, axes: Any, strategy=hfjax.TENSOR, sizes=(("data", 4), ("tensor", 2)), **more):
    mesh = hfjax.make_mesh(**dict(sizes))
    options = {"forward": model.forward, "axes": axes, "example": model.batch} | more
    return hfjax.layout(model.init, optax.adamw(1e-3), mesh, strategy, **options)


@pytest.mark.parametrize("name", MODELS)
def test_the_arrays_that_one_would_name_by_hand_are_split(name):
    model = MODELS[name]
    read, by_hand = (layout_of(model, axes) for axes in ("auto", model.names))
    assert read.specs == by_hand.specs
    assert layout_of(model, read.axes).specs == read.specs  # it can be pasted


def as_float64(init):
    """Return the initialiser of the model in float64; what a mesh rounds differently is equal."""

    def cast(x):
        is_float = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.round(x.astype(np.float64) * 4096) / 4096 if is_float else x

    def make(rngs):
        model = init(rngs)
        if not isinstance(model, nnx.Module):
            return jax.tree.map(lambda x: cast(x) if eqx.is_array(x) else x, model)
        nnx.update(model, jax.tree.map(cast, nnx.state(model, nnx.Param)))
        return model

    return make


def check_equal_to_one_device(name, cases):
    model = MODELS[name]
    with jax.enable_x64(True):
        init = as_float64(model.init)
        options: dict[str, Any] = {"forward": model.forward, "axes": "auto"}
        found = assert_strategies_agree(init, squares, model.batch, cases, steps=2, **options)
    assert max(found.values()) < 1e-10, found


def test_numbers_are_those_of_one_device():
    check_equal_to_one_device("Haiku attention", {"FSDP|TENSOR": (EVERYTHING, SIZES)})


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_numbers_of_every_model_are_those_of_one_device(name):
    cases = {"TENSOR": (hfjax.TENSOR, {"data": 4, "tensor": 2}), "both": (EVERYTHING, SIZES)}
    check_equal_to_one_device(name, cases)


def bytes_of_all_reduces(layout, batch):
    step = hfjax.train_step(layout, squares)
    return hfjax.collectives(step.lower(batch).compile()).total("all-reduce")


def batch_of(model):
    as_float32 = lambda x: np.asarray(x, np.float32 if x.dtype == float else x.dtype)
    return jax.tree.map(as_float32, model.batch)


def check_bytes(name):
    model = MODELS[name]
    read, by_hand = (
        bytes_of_all_reduces(layout_of(model, axes), batch_of(model))
        for axes in ("auto", model.names)
    )
    assert 0 < read <= by_hand


def test_no_more_is_summed_than_by_hand():
    check_bytes("NNX MLP")


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_no_model_sums_more_than_by_hand(name):
    check_bytes(name)


GROUPED = ["rotary Llama, queries in groups", "rotary Llama, keys repeated"]


@pytest.mark.parametrize("name", GROUPED)
def test_rotary_heads_are_not_sent_between_devices(name):
    model = MODELS[name]
    step = hfjax.train_step(layout_of(model, "auto"), squares)
    sent = hfjax.collectives(step.lower(batch_of(model)).compile())
    assert sent.total("all-gather") == sent.total("all-to-all") == sent.total("permute") == 0
    check_bytes(name)


@pytest.mark.parametrize("name", GROUPED)
def test_an_attention_whose_heads_cannot_be_split_is_left_as_a_whole(name):
    layout = layout_of(MODELS[name], "auto", sizes=(("data", 2), ("tensor", 4)))
    assert not [path for path in layout.axes if path[-1] in "qkvo"]
    left = ", ".join(f"blocks/*/{n}" for n in "koqv")
    assert f"left {left}: heads: 2 do not divide by 4" in str(layout)


# -- what looks like a pair of matmuls -----------------------------------------------------------


def pair(function, **shapes):
    """Return the shapes of a model, and the model: between `a` and `c` something happens."""
    return {"a": (8, 32), "c": (32, 8)} | shapes, function


def one_head(w, x):
    q, k, v = (x @ w[n] for n in "qkv")
    scores = jax.nn.softmax(jnp.einsum("qd,kd->qk", q, k))
    return scores @ v @ w["o"]


def fused(w, x):
    q, k, v = jnp.split((x @ w["qkv"]).reshape(8, 1, 2, 12), 3, axis=-1)
    return (q + k + v).reshape(8, 8) @ w["o"]


def fused_by_kind(w, x):
    q, k, v = (x @ w["qkv"]).reshape(8, 3, 2, 4).swapaxes(0, 1)
    return (q + k + v).reshape(8, 8) @ w["o"]


def heads(count, width):
    def run(w, x):
        y = attend(x[:, None], w, count, count)
        return y[:, 0]

    size = count * width
    return {"q": (8, size), "k": (8, size), "v": (8, size), "o": (size, 8)}, run


SPLIT_A_AND_C = {"a": (None, "mlp"), "c": ("mlp", None)}
TRAPS = {  # what is computed: shapes and function; names; what is said of what is left
    "a norm": (pair(lambda w, x: rms(x @ w["a"]) @ w["c"]), {}, "reduce_sum at .* works along it"),
    "a softmax": (pair(lambda w, x: jax.nn.softmax(x @ w["a"]) @ w["c"]), {}, "reduce_max at"),
    "a norm over rows": (pair(lambda w, x: rms(x @ w["a"], 0) @ w["c"]), SPLIT_A_AND_C, ""),
    "a slice": (pair(lambda w, x: (x @ w["a"])[:, :16] @ w["c"], c=(16, 8)), {}, "slice at"),
    "reversed": (pair(lambda w, x: (x @ w["a"])[:, ::-1] @ w["c"]), {}, "rev at"),
    "rolled": (pair(lambda w, x: jnp.roll(x @ w["a"], 1, 1) @ w["c"]), {}, " at .* works along it"),
    "sorted": (pair(lambda w, x: jnp.sort(x @ w["a"]) @ w["c"]), {}, "sort at"),
    "a running sum": (pair(lambda w, x: jnp.cumsum(x @ w["a"], 1) @ w["c"]), {}, "cumsum at"),
    "concatenated": (
        pair(
            lambda w, x: jnp.concatenate([x @ w["a"], x @ w["b"]], 1) @ w["c"], b=(8, 32), c=(64, 8)
        ),
        {},
        "concatenate at",
    ),
    "rows concatenated": (
        pair(
            lambda w, x: (
                jnp.concatenate([x @ w["a"], x @ w["b"]]).reshape(2, 8, 32).sum(0) @ w["c"]
            ),
            b=(8, 32),
        ),
        SPLIT_A_AND_C | {"b": (None, "mlp")},
        "",
    ),
    "rows stacked": (
        pair(
            lambda w, x: sum(jnp.unstack(jnp.stack([x @ w["a"], x @ w["b"]]))) @ w["c"], b=(8, 32)
        ),
        SPLIT_A_AND_C | {"b": (None, "mlp")},
        "",
    ),
    "repeated": (
        pair(lambda w, x: jnp.tile(x @ w["a"], (1, 2)) @ w["c"], c=(64, 8)),
        {},
        "tile at",
    ),
    "also elsewhere": (
        pair(lambda w, x: (x @ w["a"]) @ w["c"] + rms(x @ w["a"]) @ w["b"], b=(32, 8)),
        {},
        "reduce_sum at",
    ),
    "a residual": (
        pair(lambda w, x: ((h := x @ w["a"]) + jnp.tanh(h @ w["b"])) @ w["c"], b=(32, 32)),
        {},
        "b has it twice",
    ),
    "tied": (pair(lambda w, x: jnp.tanh(x @ w["a"]) @ w["a"].T), {"a": (None, "mlp")}, ""),
    "one matrix twice": (
        pair(lambda w, x: jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["b"] @ w["c"], b=(32, 32)),
        {},
        "b has it twice",
    ),
    "three in a row": (
        pair(lambda w, x: jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) @ w["c"], b=(32, 32)),
        {"a": (None, "mlp"), "b": ("mlp", None)},
        "b is split along its other dimension",
    ),
    "one head": (
        ({n: (8, 8) for n in "qkvo"}, one_head),
        {"v": (None, "mlp"), "o": ("mlp", None)},
        "k, q: dot_general at",
    ),
    "3 heads": (heads(3, 4), {}, "heads: 3 do not divide by 2"),
    "2 heads of 3": (heads(2, 3), {n: (None, "heads") for n in "qkv"} | {"o": ("heads", None)}, ""),
    "queries, keys and values of each head in one": (
        ({"qkv": (8, 24), "o": (8, 8)}, fused),
        {"qkv": (None, "heads"), "o": ("heads", None)},
        "",
    ),
    "queries before keys before values": (
        ({"qkv": (8, 24), "o": (8, 8)}, fused_by_kind),
        {},
        " works along it",
    ),
    "columns of a parameter alone": (
        pair(lambda w, x: x @ (w["a"] @ w["c"])),
        {},
        "left a: ",
    ),
}


def trap(shapes, function):
    """Return a model with a pair that is good, and then a trap."""

    def init(rngs):
        good = {"good_up": normal(rngs, 8, 64), "good_down": normal(rngs, 64, 8)}
        return {name: normal(rngs, *shape) for name, shape in shapes.items()} | good

    def forward(w, batch):
        x = batch["x"] + jax.nn.relu(batch["x"] @ w["good_up"]) @ w["good_down"]
        return function(w, rms(x))

    return Model(init, {}, X, forward)


GOOD = {"good_up": (None, "mlp"), "good_down": ("mlp", None)}


@pytest.mark.parametrize("name", TRAPS)
def test_what_only_looks_like_a_pair_is_left(name):
    made, names, said = TRAPS[name]
    layout = layout_of(trap(*made), "auto")
    assert layout.axes == names | GOOD
    assert re.search(said, str(layout))


def read(function, *more, **shapes):
    return layout_of(trap(shapes, function), "auto", *more)


def test_a_loop_and_a_branch_keep_dimensions():
    def loop(w, x):
        step = lambda _, x: x + jnp.tanh(x @ w["a"]) @ w["c"]
        x = lax.fori_loop(0, 3, step, x)
        grow = lambda x: jnp.tanh(x @ w["b"])
        return lax.cond(x.sum() > 0, grow, lambda x: x @ w["d"], x) @ w["e"]

    shapes = {"a": (8, 32), "c": (32, 8), "b": (8, 64), "d": (8, 64), "e": (64, 8)}
    out, into = (None, "mlp"), ("mlp", None)
    names = {"a": out, "c": into, "b": out, "d": out, "e": into}
    assert read(loop, **shapes).axes == names | GOOD


def test_recurrent_layers_are_left_and_what_follows_them_is_named():
    class Both(RNN):
        def __init__(self, *, rngs):
            super().__init__(rngs=rngs)
            self.mlp = MLP(rngs=rngs)

        def __call__(self, x):
            return self.mlp(super().__call__(x))

    layout = layout_of(Model(lambda rngs: Both(rngs=rngs), {}), "auto")
    assert sorted(layout.axes) == ["mlp/down/kernel", "mlp/up/bias", "mlp/up/kernel"]


def test_only_tables_of_words_are_looked_up_by_vocabulary():
    def init(rngs):
        shapes = {"words": (64, 16), "kinds": (2, 16), "positions": (32, 16), "unlike": (128, 8)}
        return {name: normal(rngs, *shape) for name, shape in shapes.items()}

    def forward(w, batch):
        positions = w["positions"][jnp.arange(6)][None]
        x = rms(w["words"][batch["x"]] + w["kinds"][batch["x"] % 2] + positions)
        return x @ w["words"].T

    layout = layout_of(Model(init, {}, TOKENS, forward), "auto")
    assert layout.axes == {"words": ("vocab", None)}
    assert "left kinds: another table has more rows" in str(layout)


def test_names_of_the_model_win():
    class Named(nnx.Module):
        def __init__(self, *, rngs):
            self.good, self.own = MLP(rngs=rngs), MLP(rngs=rngs)
            kernel = self.own.up.kernel[...]
            self.own.up.kernel = nnx.Param(kernel, axes=("embed", "wide"))

        def __call__(self, x):
            return self.own(self.good(x))

    layout = layout_of(Model(lambda rngs: Named(rngs=rngs), {}), "auto")
    assert layout.axes["own/up/kernel"] == ("embed", "wide")
    assert "own/down/kernel" not in layout.axes
    assert "left own/down/kernel: the model names own/up/kernel ('embed', 'wide')" in str(layout)
    assert layout.axes["good/up/kernel"] == (None, "mlp")


def test_shapes_suffice_as_an_example_and_numbers_of_layers_are_written_once():
    model = MODELS["NNX ViT"]
    example = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, np.float32), IMAGES)
    said = str(layout_of(model, "auto", example=example))
    assert """named blocks/*/attention/key/bias ('heads', None), blocks/*/attent""" in said
    assert "left head/kernel: it is in the model's output" in said


# -- what is refused -----------------------------------------------------------------------------


def test_names_are_not_read_without_an_example_or_without_a_program():
    with pytest.raises(ValueError, match=r'axes="auto" traces the model: give a batch or its'):
        layout_of(MODELS["NNX MLP"], "auto", example=None)
    with pytest.raises(ValueError, match=r"bare pytree is in the loss\. Give forward=lambda"):
        layout_of(MODELS["Llama"], "auto", forward=None)
    with pytest.raises(ValueError, match=r"axes='all': .*pattern: names.* or \"auto\""):
        layout_of(MODELS["NNX MLP"], "all")


def test_if_nothing_can_be_named_the_error_says_why():
    model = Model(lambda rngs: RNN(rngs=rngs), {})
    with pytest.raises(ValueError, match=r'(?s)named heads, mlp, vocab.*axes="auto" left .*rnn/'):
        layout_of(model, "auto")


REFUSED: dict[str, tuple[Any, str]] = {
    "no match": ({"*/upp/kernel": (None, "mlp")}, r"no parameter '\*/upp/kernel'\. Nearest: "),
    "never counts": (
        {"*kernel": (None, "mlp"), "up/k*": (None, "mlp")},
        r"'up/k\*' never counts, since entries before it",
    ),
    "too few": (
        {"*/kernel": ("mlp",)},
        r"kernel: axes \('mlp',\) of '\*/kernel' name 1 dimensions",
    ),
    "a word": ({"up/bias": "mlp"}, r"'up/bias': 'mlp': a tuple with a name for each dimension"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_patterns_that_do_not_fit_are_refused(name):
    axes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        layout_of(MODELS["NNX MLP"], axes)


def test_a_path_counts_before_patterns_and_the_first_pattern_before_others():
    axes = {"*": (None, None), "up/kernel": (None, "mlp")}
    with pytest.raises(ValueError, match=r"bias: axes \(None, None\) of '\*' name 2"):
        layout_of(MODELS["NNX MLP"], axes)
    axes = {"*bias": (None,), "*": (None, None), "up/kernel": (None, "mlp")}
    assert layout_of(MODELS["NNX MLP"], axes).axes == {"up/kernel": (None, "mlp")}
