"""Layers that lie on the host are fetched one ahead of the one that runs; nothing else changes."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import hfjax
from hfjax import DDP, FSDP, HOST_OPTIMIZER, HOST_PARAMETERS, ZERO1
from hfjax.models.gpt import next_token_loss
from tests.small_gpt import gpt_layout, tokens

LAYERS = 3
ADAMW = optax.adamw(1e-3, eps=1e-4)


def run(layout, steps=2, **execution):
    """The metrics and the state at the end, in host memory; and what an evaluation tells."""
    state, step = hfjax.init(layout), hfjax.train_step(layout, next_token_loss, **execution)
    told = []
    for _ in range(steps):
        state, metrics = step(state, tokens())
        told.append({name: float(x) for name, x in metrics.items()})
    for x, where in zip(jax.tree.leaves(state), jax.tree.leaves(layout.shardings()), strict=True):
        assert x.sharding.is_equivalent_to(where, x.ndim)
        assert x.sharding.memory_kind == where.memory_kind
    evaluated = float(hfjax.eval_step(layout, next_token_loss)(state, tokens())["loss"])
    return told, hfjax.full((state.params, state.optimizer)), evaluated


def assert_equal(found, wanted):
    assert found[0] == wanted[0]
    assert found[2] == wanted[2]
    for a, b in zip(jax.tree.leaves(found[1]), jax.tree.leaves(wanted[1]), strict=True):
        np.testing.assert_array_equal(a, b)


CASES = {
    "DDP": (DDP, {"data": 2}, {}),
    "FSDP, remat": (FSDP, {"fsdp": 2}, {"remat": "full"}),
    "ZERO1, bf16": (ZERO1, {"data": 2}, {"precision": "bf16"}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("in_backward", [False, True], ids=["ordinary", "in backward"])
def test_parameters_on_the_host_train_and_evaluate(case, in_backward):
    strategy, sizes, execution = CASES[case]
    devices = jax.devices()[:2]
    layout = partial(gpt_layout, sizes=sizes, optimizer=ADAMW, devices=devices, layers=LAYERS)
    execution = execution | {"optimizer_in_backward": in_backward}
    found = run(layout(strategy | HOST_PARAMETERS), **execution)
    wanted = run(layout(strategy), **execution)
    assert_equal(found, wanted)
