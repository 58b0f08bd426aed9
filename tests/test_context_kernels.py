"""The kernel of attention in each hop between devices that share a row, interpreted and lowered."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.models.llama import Llama, LlamaConfig
from hfjax.parallel.extensions.context_parallel.sequence_layout import SequenceLayout
from tests.h200 import h200s
from tests.kernels import interpreted_ring, relative  # noqa: F401
from tests.test_context_attention import across, on_one_device


@pytest.mark.parametrize(
    "gathers", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["ring", "allgather"]
)
def test_the_kernels_of_each_hop_attend_as_one_device(interpreted_ring, gathers):  # noqa: F811
    keys, shapes = jax.random.split(jax.random.key(0), 4), 4 * [(1, 256, 1, 64)]
    x = [jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, shapes, strict=True)]
    found = across(SequenceLayout(2, "zigzag"), 256, gathers, kernels=True)(*x)
    wanted = on_one_device(*(a.astype(jnp.float32) for a in x))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert relative(a, b) < 1e-2


@pytest.mark.cuda
@pytest.mark.parametrize(
    "form", ["ring", *(pytest.param(x, marks=pytest.mark.slow) for x in ("allgather", "ulysses"))]
)
def test_a_step_with_kernels_compiles_for_h200s(form):
    config = LlamaConfig.preset("llama3-8b", length=4096, layers=1, embed=1024, mlp=2048, heads=8)
    mesh = hfjax.make_mesh(devices=h200s(8), context=8)
    strategy = hfjax.FSDP | hfjax.CONTEXT
    init = lambda rngs: Llama(config, rngs=rngs)
    layout = hfjax.layout(init, optax.adamw(1e-3), mesh, strategy)
    kernels = {"flash_block": "pallas", "*": "reference"}
    how = {"precision": "bf16", "remat": "full", "kernels": kernels, "context": form}
    step = hfjax.train_step(layout, next_token_loss, **how)
    program = step.lower({"tokens": np.zeros((1, 4097), np.int32)}).compile()
    assert "mosaic_gpu" in (program.as_text() or "")
    assert step.kernels.impls("flash_block") == {"pallas"}
