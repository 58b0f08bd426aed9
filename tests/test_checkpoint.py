"""The state is plain data: Orbax saves it under one strategy and restores it under another."""

import jax
import numpy as np
import orbax.checkpoint as ocp

import hfjax
from hfjax.models.gpt import next_token_loss
from hfjax.parallel.strategy import FSDP, TENSOR, ZERO1
from tests.small_gpt import gpt_layout, tokens


def test_a_state_saved_under_one_strategy_goes_on_under_another(tmp_path):
    first = gpt_layout(FSDP.edit(replicate_below=0), {"fsdp": 8}, dropout=0.1)
    second = gpt_layout(
        (ZERO1 | TENSOR).edit(replicate_below=0), {"data": 2, "tensor": 2}, dropout=0.1
    )
    steps = [hfjax.train_step(layout, next_token_loss) for layout in (first, second)]
    state, _ = steps[0](hfjax.init(first), tokens())
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", second.abstract_state())
    for x, wanted in zip(
        jax.tree.leaves(restored), jax.tree.leaves(second.shardings()), strict=True
    ):
        assert x.sharding.is_equivalent_to(wanted, x.ndim)
    here, there = steps[0](state, tokens()), steps[1](restored, tokens())
    np.testing.assert_allclose(here[1]["loss"], there[1]["loss"], rtol=1e-6)
