"""The update of all shards at once, placed as the optimizer state, by any optax transformation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from hfjax.optimizer_step.gather_updated_params import all_gather_params
from hfjax.optimizer_step.gradients import Gradients
from hfjax.optimizer_step.update import (
    UpdatableState,
    UpdateAfterGradients,
    constrain,
)
from hfjax.optimizers.layout_axes import use_shardings
from hfjax.optimizers.transforms import params_from_master
from hfjax.utils.paths import Flat, flatten, nest


@dataclass(frozen=True, eq=False)
class ShardedUpdate(UpdateAfterGradients):
    """The update of a layout whose state is in device memory."""

    def apply(
        self,
        gradients: Gradients,
        mean: Callable[[Flat], Flat],
        params: Flat,
        old_state: UpdatableState,
        finite: jax.Array,
    ) -> UpdatableState:
        """Return the state after the step."""

        def apply_update(old_state: UpdatableState) -> UpdatableState:
            new = self._update_params(mean(gradients.sums), old_state)
            return UpdatableState(*new, gradients.variables)

        after = self.update_if_finite(finite, apply_update, old_state)
        parameters = all_gather_params(self.engine.context, after.parameters, params)
        return after._replace(parameters=parameters)

    def _update_params(self, gradients: Flat, old_state: UpdatableState) -> tuple[Flat, Any]:
        """Return parameters and optimizer state, each device's shard."""
        params, param_specs = old_state.parameters, self.layout.param_specs
        gradients = {path: jnp.zeros_like(x) for path, x in params.items()} | gradients
        inputs = nest(constrain(gradients, param_specs)), old_state.optimizer, nest(params)
        shardings = {
            path: NamedSharding(p.mesh, p.optimizer_state) for path, p in param_specs.items()
        }
        with use_shardings(shardings):
            updates, optimizer = self.layout.optimizer.update(*inputs)
        new_params = flatten(cast(dict, optax.apply_updates(nest(params), updates)))
        return constrain(params_from_master(new_params, optimizer), param_specs), optimizer
