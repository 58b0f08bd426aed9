"""A permute that XLA puts into a stage's branch is refused before anything waits for it."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import hfjax
from hfjax import PIPE, TENSOR, Schedule
from hfjax.compat.haiscale.partition import partition
from hfjax.compat.haiscale.pipe import GPipe
from hfjax.models.layers import no_constraint
from hfjax.testing import assert_strategies_agree
from tests.constant_stack import Stack, Tied, fixed, rows, weighted


class Placed(Tied):
    """Puts together what it cuts."""

    def __init__(self, rngs, **changes):
        super().__init__(rngs, **changes)
        self.place = no_constraint

    def head(self, x):
        return self.place(x @ self.before[...].T, (None, None))[:, :2] + x @ self.after[...]


class Rolls(nnx.Module):
    """Layers that shift the dimension that tensor splits."""

    def __init__(self, rngs):
        self.up = nnx.Param(fixed(4, 8, 16), axes=("embed", "mlp"))
        self.down = nnx.Param(fixed(4, 16, 8), axes=("mlp", "embed"))

    def __call__(self, x):
        return x + jnp.roll(jnp.tanh(x @ self.up[...]), 1, axis=1) @ self.down[...]


class Shifts(Stack):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.layers = Rolls(rngs)


def layout_of(model):
    mesh = hfjax.make_mesh(pipe=2, tensor=2, devices=jax.devices()[:4])
    strategy = (PIPE | TENSOR).edit(replicate_below=0)
    return hfjax.layout(model, optax.adamw(1e-2, eps=1e-4), mesh, strategy)


@pytest.mark.parametrize(
    ("model", "schedule", "op"), [(Tied, "1f1b", "slice"), (Shifts, "zb-h1", "concatenate")]
)
def test_a_permute_in_a_branch_is_refused_with_what_to_do(model, schedule, op):
    layout = layout_of(model)
    step = hfjax.train_step(layout, weighted, schedule=Schedule(schedule, 2))
    with pytest.raises(ValueError, match=rf"for '{op}'.*over tensor.*place\(x, \(None"):
        step(hfjax.init(layout), rows())


@pytest.mark.slow
def test_a_batch_of_other_keys_is_another_program():
    def loss(outputs, batch):
        y = batch["z"] if "z" in batch else batch["y"]
        x = jnp.roll(outputs, 1, axis=1) if "z" in batch else outputs
        return weighted(x, batch | {"y": jnp.concatenate([y, y], axis=1)})

    class Wide(Stack):
        def head(self, x):
            return x @ self.before[...].T

    layout, batch = layout_of(Wide), rows()
    step = hfjax.train_step(layout, loss, schedule=Schedule("1f1b", 2))
    state, _ = step(hfjax.init(layout), batch)
    batch["z"] = batch.pop("y")  # the same shapes
    with pytest.raises(ValueError, match="may wait for ever"):
        step(state, batch)


class Waves(nnx.Module):
    def __init__(self):
        self.weight = nnx.Param(fixed(8, 8), axes=("embed", "mlp"))

    def __call__(self, x):
        return jnp.sin(x @ self.weight[...])


def test_pipes_are_checked_too():
    mesh = hfjax.make_mesh(pipe=2, tensor=2, devices=jax.devices()[:4])
    parts, strategy = partition([Waves() for _ in range(4)], stages=2), PIPE | TENSOR
    pipe = GPipe(parts, microbatches=2, mesh=mesh, strategy=strategy.edit(replicate_below=0))
    apart, x = lambda y, wanted: jnp.mean((jnp.roll(y, 1, 1) - wanted) ** 2), jnp.ones((16, 8))
    with pytest.raises(ValueError, match="may wait for ever"):
        pipe.forward_backward(x, criterion=apart, labels=(x,))


def test_predictions_by_a_pipeline_are_checked_too():
    layout = layout_of(Tied)
    with pytest.raises(ValueError, match="may wait for ever"):
        hfjax.predict_step(layout)(hfjax.init(layout), rows())


def test_the_error_names_the_line():
    limit = jax.config.values["jax_traceback_in_locations_limit"]
    jax.config.update("jax_traceback_in_locations_limit", 10)
    try:
        layout = layout_of(Tied)
        step = hfjax.train_step(layout, weighted, schedule=Schedule("gpipe", 2))
        with pytest.raises(ValueError, match=r"tests/constant_stack\.py:\d+: it waits"):
            step(hfjax.init(layout), rows())
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)


@pytest.mark.slow
@pytest.mark.parametrize("model", [Placed, Shifts])
def test_arrays_put_together_and_layers_without_branches_train_as_one_device(model):
    strategy = (PIPE | TENSOR).edit(replicate_below=0)
    execution = {"schedule": Schedule("1f1b", 2), "gradient_accumulation_steps": 2}
    cases = {"1F1B": (strategy, {"pipe": 2, "tensor": 2}, execution)}
    assert_strategies_agree(model, weighted, rows(), cases, steps=2)


def test_a_program_that_is_checked_is_compiled_once(caplog):
    layout = layout_of(Placed)
    step = hfjax.train_step(layout, weighted, schedule=Schedule("1f1b", 2))
    state = hfjax.init(layout)
    with jax.log_compiles():
        state, _ = step(state, rows())
        step(state, rows())
    assert caplog.text.count("Finished XLA compilation of jit(step)") == 1
