"""The update of all shards at once, each where its moments lie, by any optax transformation."""

from dataclasses import dataclass
from typing import Any, cast

import jax.numpy as jnp
import optax

from hfjax.optimizer_step.param_all_gather import gathered
from hfjax.optimizer_step.update import Found, Gradients, Held, Update, constrain, unless_nonfinite
from hfjax.optimizers.transforms import from_master
from hfjax.parallel.engine.reduce_gradients import mean_gradients
from hfjax.sharding.layout import State
from hfjax.utils.paths import Flat, flatten, nest


@dataclass(frozen=True, eq=False)
class WholeUpdate(Update):
    """The update of a layout whose state lies on the device."""

    def __call__(self, state: State, batch: Any) -> Found:
        """Return what a pass over the batch finds."""
        gradients = Gradients.of(self.plane, state, batch)

        def new(held: Held) -> Held:
            given = mean_gradients(gradients.summed, gradients.scale(), self.layout.working_dtypes)
            return Held(*self._updated(given, held), gradients.variables)

        context, placed = self.plane.context, self.layout.placed

        def update(held: Held, finite: Any) -> Held:
            after = unless_nonfinite(context.execution, placed, finite, new, held)
            whole = gathered(context, after.parameters, flatten(state.params))
            return after._replace(parameters=whole)

        return gradients.found(update)

    def _updated(self, gradients: Flat, held: Held) -> tuple[Flat, Any]:
        """Return parameters and the optimizer's state, on each device its part."""
        params, placed = held.parameters, self.layout.placed
        gradients = {path: jnp.zeros_like(x) for path, x in params.items()} | gradients
        given = nest(constrain(gradients, placed)), held.optimizer, nest(params)
        updates, optimizer = self.layout.optimizer.update(*given)
        updated = flatten(cast(dict, optax.apply_updates(nest(params), updates)))
        return constrain(from_master(updated, optimizer), placed), optimizer
