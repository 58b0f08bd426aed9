"""Several documents in a row: each is trained as if it were alone, under every strategy."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.attention import block_attention, dot_product
from hfjax.models.gpt import next_token_loss
from hfjax.models.llama import Llama, LlamaConfig
from hfjax.parallel.strategy import DDP, FSDP, PIPE, SEQUENCE, TENSOR
from tests.small_gpt import gpt, gpt_layout, tokens

LENGTH = 24
LLAMA = LlamaConfig(vocab=64, length=24, layers=2, heads=4, kv_heads=2, embed=32, mlp=48)
MODELS = {"gpt": gpt(), "llama": lambda rngs: Llama(LLAMA, rngs=rngs)}


def packed(rows=16):
    """Rows of three documents, the last of them padded."""
    cuts = np.random.default_rng(1).integers(2, 11, (rows, 2)).cumsum(1)
    at = np.arange(LENGTH + 1)
    documents = 1 + (at >= cuts[:, :1]).astype(np.int32) + (at >= cuts[:, 1:])
    documents[:, 22:] = 0
    same = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] > 0)
    return tokens(rows, documents=documents, mask=same.astype(np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_document_in_a_row_has_the_logits_that_it_has_alone(name):
    model = MODELS[name](nnx.Rngs(0))
    batch = packed(4)
    run = nnx.jit(lambda model, batch: model(batch))
    logits = np.asarray(run(model, batch))
    for row, documents in enumerate(batch["documents"]):
        for number in (1, 2, 3):
            (at,) = np.nonzero(documents[:-1] == number)
            alone = np.zeros_like(batch["tokens"][:1])  # what comes later is not seen
            alone[0, : len(at) + 1] = batch["tokens"][row, [*at, at[-1] + 1]]
            wanted = np.asarray(run(model, {"tokens": alone}))[0, : len(at)]
            np.testing.assert_allclose(logits[row, at], wanted, atol=2e-6)


@pytest.mark.parametrize("length", [24, 25])
@pytest.mark.short("24")
def test_both_ways_to_attend_inside_documents_agree(length):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 4, length, 2, 8))
    documents = jnp.sort(jax.random.randint(jax.random.key(1), (4, length), 0, 4))
    found = jax.jit(block_attention)(q, k, v, documents)
    np.testing.assert_allclose(found, jax.jit(dot_product)(q, k, v, documents), atol=2e-6)
    assert not np.allclose(found, jax.jit(block_attention)(q, k, v))


def losses(layout, **execution):
    step = hfjax.train_step(layout, next_token_loss, **execution)
    state, found = hfjax.init(layout, schedule=execution.get("schedule")), []
    for _ in range(3):
        state, metrics = step(state, packed())
        found.append([float(metrics[name]) for name in ("loss", "grad_norm")])
    return found


@cache
def losses_of_one():
    return losses(gpt_layout(DDP, {"data": 1}, optax.adamw(1e-2), jax.devices()[:1]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mesh", "execution"),
    [
        pytest.param(FSDP, {"fsdp": 8}, {"remat": "full"}, marks=pytest.mark.slow),
        (
            FSDP | TENSOR | SEQUENCE,
            {"data": 2, "fsdp": 2, "tensor": 2},
            {"gradient_accumulation_steps": 2},
        ),
        (PIPE | DDP, {"pipe": 2, "data": 2}, {"schedule": hfjax.Schedule("1f1b", 4)}),
        pytest.param(
            *(PIPE | TENSOR, {"pipe": 2, "tensor": 2}, {"schedule": hfjax.Schedule("zb", 4)}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rows_of_documents_train_as_on_one_device(strategy, mesh, execution):
    many = gpt_layout(
        strategy, mesh, optax.adamw(1e-2), jax.devices()[: int(np.prod([*mesh.values()]))]
    )
    np.testing.assert_allclose(losses(many, **execution), losses_of_one(), rtol=2e-5)
