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
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding

from hfjax.optimizer_step.gradients import (
    Gradients,
    compute_gradients,
    gradient_norm,
    mean_scale,
)
from hfjax.optimizer_step.optimizer_parts import OptimizerParts
from hfjax.parallel.engine.gradient_engine import GradientEngine
from hfjax.parallel.engine.reduce_gradients import mean_gradients
from hfjax.parallel.execution import guard
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
    finite: Any = True  # False if it is known already that the step is not


@dataclass(frozen=True, eq=False)
class Update(ABC):
    """One call of a step: from a state and a batch to the updated state."""

    layout: Layout
    engine: GradientEngine  # what runs the model forward and backward

    @cached_property
    def parts(self) -> OptimizerParts:
        """The optimizer state, divided by what it belongs to."""
        return OptimizerParts(self.layout)

    @abstractmethod
    def __call__(self, state: State, batch: Any) -> GradResult:
        """Return the result of a pass over the batch."""

    def update_if_finite(
        self, finite: jax.Array, update: Callable, old_state: UpdatableState
    ) -> UpdatableState:
        """Return `update(old_state)`, or `old_state` unchanged if the step is not finite.

        On a CPU a branch costs nothing, a selection one more copy; on a GPU a branch waits for the
        host, a selection costs nothing.
        """
        on_nonfinite = self.engine.context.execution.on_nonfinite
        if platform_of(self.layout.mesh) == "cpu" and on_nonfinite != "apply":
            return lax.cond(finite, update, lambda old_state: old_state, old_state)
        return guard(on_nonfinite, finite, update(old_state), old_state)


class UpdateAfterGradients(Update):
    """An update that begins once all gradients are there, so that a user may change them."""

    def __call__(self, state: State, batch: Any) -> GradResult:
        """Return the result of a pass over the batch."""
        gradients, _ = compute_gradients(self.engine, state, batch)
        return self.result(gradients, state)

    def result(self, gradients: Gradients, state: State) -> GradResult:
        """Return the result of a pass whose gradients are these."""
        if gradients.norm is None:
            squares, norm = gradient_norm(gradients.sums, gradients.mean)
            gradients = replace(gradients, squares=squares, norm=norm)
        limit = self.engine.context.execution.max_grad_norm

        def mean(sums: Flat) -> Flat:
            scale = mean_scale(gradients, limit)
            return mean_gradients(sums, scale, self.layout.working_dtypes)

        update = partial(self.apply, gradients, mean, flatten(state.params))
        squares: Any = gradients.squares
        norm, finite = gradients.norm, gradients.finite
        return GradResult(gradients.mean, norm, gradients.variables, squares, update, finite)

    @abstractmethod
    def apply(
        self,
        gradients: Gradients,
        mean: Callable[[Flat], Flat],
        params: Flat,
        old_state: UpdatableState,
        finite: jax.Array,
    ) -> UpdatableState:
        """Return the state after the step.

        Args:
            gradients: The gradients of the batch.
            mean: Turns some of their sums into gradients of the mean, clipped.
            params: The parameters, placed as the model reads them.
            old_state: The state before the step, placed as the optimizer state.
            finite: Whether the step is finite.
        """


def constrain(
    arrays: Flat, param_specs: Mapping[str, ParamSpecs], column: str = "optimizer_state"
) -> Flat:
    """Return arrays of parameters with the shardings of a column: that of the optimizer state."""
    sharding_of = lambda path: NamedSharding(
        param_specs[path].mesh, getattr(param_specs[path], column)
    )
    return {path: lax.with_sharding_constraint(x, sharding_of(path)) for path, x in arrays.items()}
