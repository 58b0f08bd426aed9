"""The update of all shards at once, placed as the optimizer state, by any optax transformation."""

from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp
import optax

from hfjax.optimizer_step.gather_updated_params import all_gather_params
from hfjax.optimizer_step.update import (
    Gradients,
    GradResult,
    UpdatableState,
    Update,
    constrain,
    update_if_finite,
)
from hfjax.optimizers.transforms import params_from_master
from hfjax.parallel.engine.reduce_gradients import mean_gradients
from hfjax.sharding.layout import State
from hfjax.utils.paths import Flat, flatten, nest


@dataclass(frozen=True, eq=False)
class ShardedUpdate(Update):
    """The update of a layout whose state is in device memory."""

    def __call__(self, state: State, batch: Any) -> GradResult:
        """Return the result of a pass over the batch."""
        gradients = Gradients.compute(self.engine, state, batch)

        def apply_update(old_state: UpdatableState) -> UpdatableState:
            grads = mean_gradients(gradients.sums, gradients.scale(), self.layout.working_dtypes)
            return UpdatableState(*self._update_params(grads, old_state), gradients.variables)

        context, param_specs = self.engine.context, self.layout.param_specs

        def update(old_state: UpdatableState, finite: Any) -> UpdatableState:
            after = update_if_finite(
                context.execution, param_specs, finite, apply_update, old_state
            )
            params = all_gather_params(context, after.parameters, flatten(state.params))
            return after._replace(parameters=params)

        return gradients.to_result(update)

    def _update_params(self, gradients: Flat, old_state: UpdatableState) -> tuple[Flat, Any]:
        """Return parameters and optimizer state, each device's shard."""
        params, param_specs = old_state.parameters, self.layout.param_specs
        gradients = {path: jnp.zeros_like(x) for path, x in params.items()} | gradients
        inputs = nest(constrain(gradients, param_specs)), old_state.optimizer, nest(params)
        updates, optimizer = self.layout.optimizer.update(*inputs)
        new_params = flatten(cast(dict, optax.apply_updates(nest(params), updates)))
        return constrain(params_from_master(new_params, optimizer), param_specs), optimizer
