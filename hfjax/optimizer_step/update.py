"""What the four ways to update a state have in common: one interface, and a step's gradients.

| way | when |
|---|---|
| `sharded.ShardedUpdate` | any optimizer, all shards at once |
| `cpu_offload.StreamedUpdate` | the state is partly on the host (HOST_OPTIMIZER, HOST_PARAMETERS) |
| `in_backward.InBackwardUpdate` | optimizer_in_backward: each layer in the backward pass |
| `async_pipeline.AsynchronousUpdate` | pipedream, 2bw: each stage by itself |

`hfjax/step/build.py` chooses one when a step is built.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from hfjax.parallel.engine.gradient_engine import GradientEngine
from hfjax.parallel.execution import Execution, guard
from hfjax.parallel.mesh import platform_of
from hfjax.parallel.param_specs import ParamSpecs
from hfjax.sharding.layout import Layout, State
from hfjax.utils.mean import Mean
from hfjax.utils.paths import Flat, flatten


class UpdatableState(NamedTuple):
    """The part of a state that a step changes."""

    parameters: Flat
    optimizer: Any
    variables: Flat  # those that the model wrote to


class GradResult(NamedTuple):
    """The result of a pass over a batch: nothing is updated yet."""

    mean: Mean
    norm: jax.Array  # of the gradient of the mean
    variables: Flat  # what the model wrote to
    # Path -> sum of the squares of a gradient, per layer of a stack where layers are updated one
    # by one; empty where they are not all known.
    squares: Flat
    # (arrays before the step, whether all is finite) -> arrays after it.
    update: Callable[[UpdatableState, jax.Array], UpdatableState]


@dataclass(frozen=True, eq=False)
class Update(ABC):
    """One call of a step: from a state and a batch to the updated state."""

    layout: Layout
    engine: GradientEngine  # what runs the model forward and backward

    @abstractmethod
    def __call__(self, state: State, batch: Any) -> GradResult:
        """Return the result of a pass over the batch."""


class Gradients(NamedTuple):
    """Summed gradients, all computed before any of them is used."""

    sums: Flat
    mean: Mean
    variables: Flat
    squares: Flat
    norm: jax.Array
    max_grad_norm: float | None

    @classmethod
    def compute(cls, engine: GradientEngine, state: State, batch: Any) -> "Gradients":
        """Return the gradients of a batch."""
        params, variables = flatten(state.params), flatten(state.variables)
        seed = (
            engine.context.loss_seed(state.scale.value, engine.num_microbatches)
            if state.scale
            else None
        )
        gradients, mean, new_variables = engine.gradients(
            params, variables, batch, state.step, seed
        )
        if seed is not None:
            gradients = {path: g / seed for path, g in gradients.items()}
        squares = {path: (g * g).sum() for path, g in gradients.items()}
        norm = jnp.sqrt(jnp.stack(list(squares.values())).sum()) / mean.weight
        return cls(
            gradients, mean, new_variables, squares, norm, engine.context.execution.max_grad_norm
        )

    def scale(self) -> jax.Array:
        """Return the factor that turns gradients of the total into those of the mean, clipped."""
        scale = 1 / self.mean.weight.astype(self.norm.dtype)
        if self.max_grad_norm is not None and self.max_grad_norm <= float(
            jnp.finfo(self.norm.dtype).max
        ):
            scale *= self.max_grad_norm / jnp.maximum(self.norm, self.max_grad_norm)
        return scale

    def to_result(
        self, update: Callable[[UpdatableState, jax.Array], UpdatableState]
    ) -> GradResult:
        """Return the result with the function that updates a state by these gradients."""
        return GradResult(self.mean, self.norm, self.variables, self.squares, update)


def constrain(
    arrays: Flat, param_specs: Mapping[str, ParamSpecs], column: str = "optimizer_state"
) -> Flat:
    """Return arrays of parameters with the shardings of a column: that of the optimizer state."""
    sharding_of = lambda path: NamedSharding(
        param_specs[path].mesh, getattr(param_specs[path], column)
    )
    return {path: lax.with_sharding_constraint(x, sharding_of(path)) for path, x in arrays.items()}


def update_if_finite(
    execution: Execution,
    param_specs: Mapping[str, ParamSpecs],
    finite: jax.Array,
    update: Any,
    old_state: UpdatableState,
) -> UpdatableState:
    """Return `update(trainable)`, or `old_state` unchanged if the step is not finite.

    On a CPU a branch costs nothing, a selection one more copy; on a GPU a branch waits for the
    host, a selection costs nothing.
    """
    on_cpu = platform_of(next(iter(param_specs.values())).mesh) == "cpu"
    if on_cpu and execution.on_nonfinite != "apply":
        return lax.cond(finite, update, lambda old_state: old_state, old_state)
    return guard(execution.on_nonfinite, finite, update(old_state), old_state)
