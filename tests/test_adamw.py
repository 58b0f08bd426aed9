"""hfjax.adamw is optax.adamw: its numbers, its state, its program, its checkpoints."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.trainer.config import OptimizerConfig, TrainConfig
from hfjax.trainer.optimizer import build_optimizer

RATE = optax.linear_schedule(1e-2, 1e-3, 4)
HOW: dict[str, Any] = {
    "eps": 1e-4,
    "weight_decay": 0.1,
    "mask": hfjax.optimizers.matching("*/kernel"),
}
ADAMW = hfjax.adamw(RATE, **HOW)


class MLP(nnx.Module):
    def __init__(self, *, rngs):
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


def squares(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2)


def batch():
    rng = np.random.default_rng(0)
    return {name: rng.normal(size=(16, 8)).astype(np.float32) for name in "xy"}


def layout_of(optimizer: Any = ADAMW):
    mesh = hfjax.make_mesh(devices=jax.devices()[:1], data=1)
    call = lambda model, batch: model(batch["x"])
    return hfjax.layout(lambda rngs: MLP(rngs=rngs), optimizer, mesh, hfjax.DDP, forward=call)


def test_it_has_the_state_and_the_numbers_of_optax():
    mine, theirs = (make(RATE, **HOW) for make in (hfjax.adamw, optax.adamw))
    params = {"a": {"kernel": jnp.ones((3, 2))}, "b": jnp.ones(4)}
    states = [optimizer.init(params) for optimizer in (mine, theirs)]
    assert jax.tree.structure(states[0]) == jax.tree.structure(states[1])
    moved = [o.update(params, s, params) for o, s in zip((mine, theirs), states, strict=True)]
    for x, y in zip(*map(jax.tree.leaves, moved), strict=True):
        np.testing.assert_array_equal(x, y)


def test_its_checkpoint_is_that_of_optax(tmp_path):
    theirs = layout_of(optax.adamw(RATE, **HOW))
    state, _ = hfjax.train_step(theirs, squares)(hfjax.init(theirs), batch())
    hfjax.save(tmp_path, theirs, state)
    found = hfjax.restore(tmp_path, layout_of()).state
    assert jax.tree.structure(found) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, found, state)


def test_numbers_that_change_from_step_to_step_are_refused():
    with pytest.raises(ValueError, match=r"adamw: b1=Array.*a plain number.*optax.adamw"):
        hfjax.adamw(1e-3, b1=jnp.float32(0.9))  # pyright: ignore[reportArgumentType]


def test_the_ordinary_program_is_that_of_optax_to_the_letter():
    texts = [
        hfjax.train_step(layout_of(o), squares, max_grad_norm=1.0).lower(batch()).as_text()
        for o in (hfjax.adamw(RATE, **HOW), optax.adamw(RATE, **HOW))
    ]
    assert texts[0] == texts[1]


def test_hfjax_train_makes_it():
    config = TrainConfig(optimizer=OptimizerConfig(weight_decay=0.2, no_decay=("*/bias",)))
    mine = build_optimizer(config, hfjax.lr_schedule(1e-3, steps=10))
    params = {"up": {"kernel": jnp.ones(2), "bias": jnp.ones(2)}}
    still = jax.tree.map(jnp.zeros_like, params)
    moved = mine.update(still, mine.init(params), params)[0]["up"]
    assert (moved["bias"] == 0).all()
    np.testing.assert_allclose(moved["kernel"], -1e-3 * 0.2, rtol=1e-6)
