"""One stack of layers of two kinds, and caps: one device's result on any mesh."""

# pyright: reportArgumentType=false

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import CONTEXT, DDP, FSDP, GRID, PIPE, SEQUENCE, TENSOR, ContextParallel, Schedule
from hfjax.models.attention import block_attention, capped, windowed
from hfjax.models.llama import Llama, LlamaConfig, LocalLayers
from hfjax.models.loss import next_token_loss
from hfjax.models.moe import MoEConfig, MoELlama, Router
from hfjax.models.rope import Rope
from hfjax.testing import assert_strategies_agree
from tests.small_gpt import tokens

SHAPE = {"vocab": 64, "length": 32, "layers": 4, "embed": 32, "mlp": 48, "heads": 4, "kv_heads": 2}
LOCAL = LocalLayers((0, 1, 3), windowed(9), Rope(100.0))
NORMS = {"norms_after": True, "norm_plus_one": True, "embedding_scale": 32**0.5}
LIKE_GEMMA3 = LlamaConfig(
    **SHAPE,
    **NORMS,
    head=12,
    qk_norm=True,
    activation="gelu_tanh",
    query_scale=0.2,
    rotary=Rope(1000.0, "linear", factor=8.0),
    local=LOCAL,
)
LIKE_GEMMA2 = LlamaConfig(
    **SHAPE,
    **NORMS,
    tied=True,
    pad_vocab_to=48,
    logit_cap=3.0,
    attention=capped(2.0),
    local=LocalLayers((0, 2), capped(2.0, window=9)),
)
ROWS = tokens(length=32)


def gemma3(rngs):
    return Llama(LIKE_GEMMA3, rngs=rngs)


def gemma2(rngs):
    return Llama(LIKE_GEMMA2, rngs=rngs)


def mixture(rngs, experts=4):
    shape = {**SHAPE, "mlp": 16, "head": 12, "qkv_bias": True, "qk_norm": True, "norms_after": True}
    how = {"experts": experts, "capacity": None, "block": 8, "router": Router(balance_loss=0)}
    return MoELlama(MoEConfig(**shape, **how, local=LOCAL), rngs=rngs)


def some_mixtures(rngs):
    return mixture(rngs, (4, 0, 4, 4))


split = lambda strategy: strategy.edit(replicate_below=0)
PIPES = {"pipe": 2, "context": 2}
CASES = {
    "FSDP, recomputed": (split(FSDP), {"fsdp": 4}, {"remat": "full"}),
    "interleaved": (split(PIPE), {"pipe": 2}, {"schedule": Schedule("interleaved", 4, 2)}),
    "TENSOR+SEQUENCE": (split(TENSOR | SEQUENCE), {"tensor": 2, "data": 2}),
    "ring": (split(CONTEXT), {"context": 2}, {"context": "ring"}),
}
ZERO_BUBBLE = {"schedule": Schedule("zb-h1", 4)}
ONE_F_ONE_B = {"schedule": Schedule("1f1b", 2)}
ZIGZAG = {"context": ContextParallel("ring", order="zigzag")}
RECOMPUTED = {"context": "allgather", "remat": "full"}
MORE = {
    "1F1B": (split(PIPE), {"pipe": 2, "data": 2}, ONE_F_ONE_B),
    "zero bubble": (split(PIPE), {"pipe": 2}, ZERO_BUBBLE),
    "1F1B, TENSOR+SEQUENCE": (
        split(PIPE | TENSOR | SEQUENCE),
        {"pipe": 2, "tensor": 2},
        ONE_F_ONE_B,
    ),
    "ring of four": (split(CONTEXT), {"context": 4}, ZIGZAG),
    "all-gather": (split(CONTEXT | FSDP), {"context": 2, "fsdp": 2}, RECOMPUTED),
    "Ulysses": (split(CONTEXT), {"context": 2}, {"context": "ulysses"}),
    "Ulysses in a pipeline": (split(CONTEXT | PIPE), PIPES, {"context": "ulysses"} | ONE_F_ONE_B),
    "grid": (split(GRID), {"row": 2, "tensor": 2}),
    "rows in parts": (split(FSDP), {"fsdp": 2}, {"tensor_overlap_chunks": 2}),
    "offload": (split(FSDP), {"fsdp": 2}, {"offload": 0.5, "remat": "dots"}),
    "kernels' plain form": (split(FSDP), {"fsdp": 2}, {"kernels": {"flash_block": "reference"}}),
}


DAILY = [*((gemma3, name) for name in CASES), (gemma2, "FSDP, recomputed")]
SELDOM = [
    *((gemma3, name) for name in MORE),
    *((gemma2, name) for name in (CASES | MORE) if name != "FSDP, recomputed"),
    *((model, "FSDP, recomputed") for model in (mixture, some_mixtures)),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"), [*DAILY, *(pytest.param(*case, marks=pytest.mark.slow) for case in SELDOM)]
)
def test_layers_of_two_kinds_train_as_on_one_device(model, name):
    cases = {name: (CASES | MORE)[name]}
    assert_strategies_agree(model, next_token_loss, ROWS, cases, steps=1)


def layout_of(strategy, **sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    return hfjax.layout(gemma3, optax.sgd(0.1), mesh, split(strategy))


@pytest.mark.slow
def test_kinds_are_saved_and_restored_under_another_cut(tmp_path):
    before, after = layout_of(FSDP, fsdp=2), layout_of(PIPE, pipe=2)
    hfjax.save(tmp_path, before, hfjax.init(before))
    state = hfjax.restore(tmp_path, after).state
    kinds = jax.tree.leaves(hfjax.full_array(hfjax.to_model_order(after, state)).variables)
    assert [x.tolist() for x in kinds] == [[True, True, False, True]]


def test_keys_go_around_no_ring_in_a_pipeline_of_two_kinds():
    layout = layout_of(CONTEXT | PIPE, **PIPES)
    why = 'form="ring".: layers of two kinds have a branch for each, and a permute in one waits'
    step = hfjax.train_step(layout, next_token_loss, context="ring", **ONE_F_ONE_B)
    with pytest.raises(ValueError, match=why):
        step.lower(ROWS)


def test_devices_that_share_rows_gather_the_keys_of_a_capped_attention_once():
    """Not what is repeated for the queries; and advice is about an attention of one's own."""
    mesh = hfjax.make_mesh(devices=jax.devices()[:4], context=4)
    layout = hfjax.layout(gemma2, optax.sgd(0.1), mesh, FSDP | CONTEXT)
    run = lambda **how: hfjax.train_step(
        layout, next_token_loss, context=hfjax.ContextParallel(**how)
    )
    step = run(gather=2**20)
    step.trace(ROWS)
    keys = len(ROWS["tokens"]) * 32 * 2 * 8 * 4  # of 32 positions and 2 heads, in float32
    limit = 4 * 2 * 2 * keys  # of 4 layers, of both kinds, keys and values
    gathered = [join for join in step.sequence_comms.comms if join.action == "gather"]
    assert sum(join.bytes * join.times for join in gathered) == limit
    with pytest.raises(ValueError, match=r"limit of .*a function of its own .*capped is one"):
        run(gather=limit - 1).trace(ROWS)


@pytest.mark.slow
def test_a_kernel_makes_no_logits_that_are_capped():
    mesh = hfjax.make_mesh(devices=jax.devices()[:1], data=1)
    layout = hfjax.layout(gemma2, optax.sgd(0.1), mesh, DDP)
    step = hfjax.train_step(layout, next_token_loss, kernels={"cross_entropy": "reference"})
    step.lower(ROWS)
    assert "xla  the model hands over logits of its own" in str(step.kernels)


def test_scores_are_capped_softly():
    normal = np.random.default_rng(0).normal
    q, k, v = (normal(size=(1, 6, 2, 4)).astype(np.float32) for _ in range(3))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / 2
    scores = 0.7 * np.tanh(scores / 0.7)
    scores[:, :, np.triu_indices(6, 1)[0], np.triu_indices(6, 1)[1]] = -np.inf
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    wanted = np.einsum("bhqk,bkhd->bqhd", weights, v)
    np.testing.assert_allclose(jax.jit(capped(0.7))(q, k, v), wanted, atol=1e-6)
    np.testing.assert_allclose(jax.jit(capped(1e6))(q, k, v), block_attention(q, k, v), atol=1e-6)


def test_layers_of_one_kind_hold_no_kinds():
    model = nnx.eval_shape(lambda: Llama(LlamaConfig.tiny(), rngs=nnx.Rngs(0)))
    assert not jax.tree.leaves(nnx.state(model, nnx.Not(nnx.Param)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"head": 7}, "head=7: an even number of dimensions"),
        ({"head": 0}, "head=0: an even number"),
        ({"rotary": 1e4}, "rotary=10000.0; a hfjax.models.rope.Rope is expected"),
        ({"activation": "relu"}, "activation='relu'; one of silu, gelu_tanh"),
        ({"qk_norm": 1}, "qk_norm=1; true or false"),
        ({"local": windowed(4)}, "local=.*; a LocalLayers, or None, is expected"),
        ({"local": LocalLayers((), windowed(4))}, r"layers=\(\): numbers of some of 4 layers"),
        ({"local": LocalLayers((4,), windowed(4))}, "numbers of some of 4 layers, from 0 to 3"),
        ({"local": LocalLayers((0, 0), windowed(4))}, "numbers of some of 4 layers"),
        ({"local": LocalLayers((0, 1, 2, 3), windowed(4))}, "set attention= and rotary= in place"),
        ({"local": LocalLayers((0,), 4)}, "local.attention=4: a function of"),
        ({"local": LocalLayers((0,), windowed(4), 1e4)}, "local.rotary=10000.0: a hfjax"),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields, message):
    with pytest.raises(ValueError, match=f"LlamaConfig: .*{message}"):
        LlamaConfig(**(SHAPE | fields))


def test_gates_of_experts_have_one_activation():
    with pytest.raises(ValueError, match="activation='gelu_tanh': the gates of experts have silu"):
        MoEConfig(activation="gelu_tanh")


@pytest.mark.parametrize("given", [{"cap": 0}, {"cap": "3"}, {"cap": 1.0, "window": 0}])
def test_caps_that_make_no_sense_are_refused(given):
    with pytest.raises(ValueError, match=r"capped\(.*(above 0 is|at least 1)"):
        capped(**given)
