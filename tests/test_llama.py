"""Llama: the values of a plain implementation, published sizes, one device's result on any mesh."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.attention import block_attention, dot_product, rotate
from hfjax.models.gpt import GPTConfig
from hfjax.models.llama import PRESETS, Llama, LlamaConfig
from hfjax.models.loss import next_token_loss
from hfjax.models.rope import Rope
from hfjax.parallel.strategy import SEQUENCE, TENSOR
from hfjax.testing import assert_strategies_agree, strategies
from tests.h200 import OPTIMIZED, h200s
from tests.small_gpt import tokens

SHAPE = {"length": 24, "layers": 2, "embed": 32, "mlp": 48, "vocab": 64}
KERNELS = ("attention/qkv", "attention/out", "mlp/gate_up", "mlp/down")


def llama(**changes):
    config = LlamaConfig.tiny(**(SHAPE | changes))
    return lambda rngs: Llama(config, rngs=rngs)


def plan(strategy, sizes, devices=None, **changes):
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    return hfjax.layout(llama(**changes), optax.sgd(0.1), mesh, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_strategies_equal_one_device(tied):
    names, known = ("HSDP+TENSOR+SEQUENCE",), strategies(8)
    cases = {name: (known[name][0].edit(replicate_below=0), known[name][1]) for name in names}
    model = llama(tied=tied)
    assert_strategies_agree(
        model, next_token_loss, tokens(), cases, steps=2, gradient_accumulation_steps=2, unroll=1
    )


@pytest.mark.slow
def test_in_float64_every_strategy_agrees_to_the_last_digits():
    known = {name: (s.edit(replicate_below=0), sizes) for name, (s, sizes) in strategies(8).items()}
    with jax.enable_x64(True):
        found = assert_strategies_agree(llama(), next_token_loss, tokens(), known, precision="fp64")
    assert max(found.values()) < 1e-12


def plain_rms_norm(x, scale, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def plain_rotary(x_SD, base):
    """Rotation as a product of complex numbers."""
    length, half = len(x_SD), x_SD.shape[1] // 2
    speeds = np.array([base ** (-2 * i / (2 * half)) for i in range(half)])
    turned = (x_SD[:, :half] + 1j * x_SD[:, half:]) * np.exp(
        1j * np.arange(length)[:, None] * speeds
    )
    return np.concatenate([turned.real, turned.imag], axis=1)


def plain_softmax(x):
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def plain_attention(p, x_SD, config):
    """One row, one head after the other."""
    qkv, out = p["attention/qkv/kernel"], p["attention/out/kernel"]
    queries, y = config.heads // config.kv_heads, np.zeros_like(x_SD)
    for head in range(config.heads):
        kv, member = divmod(head, queries)
        q = plain_rotary(x_SD @ qkv[:, kv, member], config.rotary.base)
        k = plain_rotary(x_SD @ qkv[:, kv, queries], config.rotary.base)
        v = x_SD @ qkv[:, kv, queries + 1]
        scores = q @ k.T / math.sqrt(q.shape[1])
        scores[np.triu_indices(len(x_SD), 1)] = -np.inf
        y += plain_softmax(scores) @ v @ out[head]
    return y


def plain_mlp(p, x_SD):
    gate, up = (x_SD @ p["mlp/gate_up/kernel"][..., i] for i in (0, 1))
    return (gate / (1 + np.exp(-gate)) * up) @ p["mlp/down/kernel"]


def plain_llama(p, tokens_S, config):
    """The logits of one row of tokens."""
    x, epsilon = p["tokens"][tokens_S], config.epsilon
    for number in range(config.layers):
        layer = {k.removeprefix("layers/"): v[number] for k, v in p.items() if "layers/" in k}
        x = x + plain_attention(layer, plain_rms_norm(x, layer["norm1/scale"], epsilon), config)
        x = x + plain_mlp(layer, plain_rms_norm(x, layer["norm2/scale"], epsilon))
    head = p["tokens"].T if config.tied else p["unembed/kernel"]
    return plain_rms_norm(x, p["norm/scale"], epsilon) @ head


@pytest.mark.parametrize("changes", [{}, {"tied": True, "kv_heads": 1}, {"kv_heads": 8}])
def test_logits_are_those_of_a_plain_implementation(changes):
    rng = np.random.default_rng(0)
    config = LlamaConfig.tiny(**SHAPE, rotary=Rope(100.0), epsilon=0.1, **changes)
    with jax.enable_x64(True):
        model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
        graph, parameters = nnx.split(model)
        parameters = jax.tree.map(lambda x: rng.normal(0.3, 0.3, x.shape), parameters)
        batch = tokens(rows=2)
        found = jax.jit(lambda parameters: nnx.merge(graph, parameters)(batch))(parameters)
        assert found.dtype == np.float64
    plain = {"/".join(map(str, path)): v[...] for path, v in nnx.to_flat_state(parameters)}
    wanted = [plain_llama(plain, row, config) for row in batch["tokens"][:, :-1]]
    np.testing.assert_allclose(found, np.stack(wanted), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("length", [16, 10], ids=["in blocks", "in one"])
def test_a_group_of_heads_shares_its_key_and_value(length):
    normal = np.random.default_rng(0).normal
    q, k, v = (normal(size=(2, length, heads, 4)).astype(np.float32) for heads in (6, 3, 3))
    each = lambda x: np.repeat(x, 2, axis=2)
    wanted = jax.jit(dot_product)(q, each(k), each(v))
    for attend in (block_attention, dot_product):
        np.testing.assert_allclose(jax.jit(attend)(q, k, v), wanted, atol=1e-6)


def test_rotation_keeps_lengths_and_depends_on_the_distance_alone():
    x, y = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)
    everywhere = lambda x: rotate(jnp.broadcast_to(x, (1, 12, 1, 8)), Rope())[0, :, 0]
    turned, other = everywhere(x), everywhere(y)
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), np.linalg.norm(x), rtol=1e-5)
    products = np.asarray(turned @ other.T)
    for distance in range(-11, 12):
        assert np.ptp(np.diagonal(products, distance)) < 1e-4
    assert np.ptp(products[0]) > 0.1


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_presets_have_as_many_parameters_as_published(name, size):
    config = LlamaConfig.preset(name)
    model = nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0)))
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model))) == size


def test_presets():
    assert set(PRESETS) == {"tiny", "llama2-7b", "llama3-8b", "llama3-70b", "llama3-405b"}
    with pytest.raises(ValueError, match=r"Llama preset 'huge': one of tiny, llama2-7b"):
        LlamaConfig.preset("huge")
    with pytest.raises(ValueError, match=r"embed=72 does not divide by 2 \* heads=8"):
        LlamaConfig.tiny(embed=72)
    with pytest.raises(ValueError, match=r"heads=8 does not divide by kv_heads=3. Choose kv_heads"):
        LlamaConfig.tiny(kv_heads=3)


def test_rows_longer_than_the_model_is_made_for_are_refused():
    with pytest.raises(ValueError, match=r"24 tokens a row, the model is made for 8: shorten"):
        llama(length=8)(nnx.Rngs(0))(tokens(rows=1))


def test_a_tensor_axis_that_does_not_divide_the_kv_heads_is_refused():
    message = r"attention/qkv/kernel .*dimension 2 \(heads, 2\) does not divide by 4 .*: \[2\] fit"
    with pytest.raises(ValueError, match=message):
        plan(TENSOR, {"data": 2, "tensor": 4}, kv_heads=2)


def test_tensor_splits_kv_heads_mlp_and_vocabulary():
    specs = plan(TENSOR, {"data": 2, "tensor": 4}).specs
    split = {path: spec.index("tensor") for path, spec in specs.items() if "tensor" in spec}
    dims = dict(zip(KERNELS, (2, 1, 2, 1), strict=True))
    wanted = {f"layers/{name}/kernel": dim for name, dim in dims.items()}
    assert split == wanted | {"tokens": 0, "unembed/kernel": 1}


@pytest.mark.slow
def test_tensor_parallel_layers_add_four_activations_a_layer_and_move_nothing_else():
    layout = plan(TENSOR, {"data": 2, "tensor": 4})
    found = hfjax.collectives(hfjax.train_step(layout, next_token_loss).lower(tokens()).compile())
    over_tensor = [row for row in found if row.axes == ("tensor",)]
    stream, losses, norm = (8, 24, 32), (8, 24), ()
    assert {row.kind for row in over_tensor} == {"all-reduce"}
    assert {row.shape for row in over_tensor} == {stream, losses, norm}
    assert sum(row.count for row in over_tensor if row.shape == stream) == 4 * 2 + 2


@pytest.mark.cuda
def test_on_h200s_sequence_parallel_layers_gather_and_scatter_four_times_a_layer():
    layout = plan(TENSOR | SEQUENCE, {"data": 4, "tensor": 2}, h200s(), length=64, embed=128)
    step = hfjax.train_step(layout, next_token_loss)
    found = hfjax.collectives(step.lower(tokens(length=64)).compile(OPTIMIZED))
    stream = [row for row in found if row.axes == ("tensor",) and row.bytes == 4 * 64 * 128 * 4]
    count = lambda kind: sum(row.count for row in stream if row.kind == kind)
    assert count("all-gather") == count("reduce-scatter") == 4 * 2 + 2
    assert {row.kind for row in stream} == {"all-gather", "reduce-scatter"}
    assert {row.kind for row in found} == {"all-gather", "reduce-scatter", "all-reduce"}


NAN, INF = float("nan"), float("inf")
SIZES = ("vocab", "length", "layers", "heads", "embed")


@pytest.mark.parametrize(
    ("kind", "names", "wrong"),
    [
        (GPTConfig, (*SIZES, "pad_vocab_to"), (NAN, INF, -5, 0, True, 1.5, "3")),
        (GPTConfig, ("dropout",), (NAN, INF, -0.1, True, "3")),
        (
            LlamaConfig,
            (*SIZES, "kv_heads", "mlp", "pad_vocab_to"),
            (NAN, INF, -5, 0, True, 1.5, "3"),
        ),
        (
            LlamaConfig,
            ("epsilon", "query_scale", "embedding_scale", "logit_cap"),
            (NAN, INF, -5, True, "3"),
        ),
    ],
)
def test_a_size_of_a_model_that_is_no_number_is_refused(kind, names, wrong):
    for name, given in itertools.product(names, wrong):
        with pytest.raises(ValueError, match=f"{kind.__name__}: {name}={given!r}; .* (from|expec)"):
            kind(**{name: given})
    with pytest.raises(ValueError, match="logit_cap=0; a finite number is expected, above 0"):
        LlamaConfig(logit_cap=0)
