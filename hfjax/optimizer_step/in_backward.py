"""A step that updates each layer during its backward pass, so that few gradients are ever alive."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from hfjax.optimizer_step.optimizer_parts import COUNT, ENDS, LAYERS, NUMBER, OptimizerParts
from hfjax.optimizer_step.update import Found, Held, Update, constrain
from hfjax.optimizers.transforms import Mastered
from hfjax.parallel.engine.gradient_engine import StepInputs
from hfjax.parallel.execution import guard
from hfjax.parallel.layerwise.engines import LayerUpdatePlane
from hfjax.parallel.offload.host_memory import is_on_host, to_device, to_host
from hfjax.sharding.host_memory import MASTER
from hfjax.sharding.layout import State
from hfjax.utils.paths import Flat, flatten


@dataclass(frozen=True, eq=False)
class InBackwardUpdate(Update):
    """One call of the step: layers are updated from last to first, then embedding and head.

    The result is that of the ordinary step. Only a step that is not finite differs: layers above
    the first gradient that is not finite have taken the step already, that layer and all below it
    (embedding and head too, and counts of the optimizer) stay as they are. A loss that is not
    finite is seen before any layer is updated.
    """

    layers: LayerUpdatePlane  # of `plane`

    def __call__(self, state: State, batch: Any) -> Found:
        """Return what a call of the step finds, its layers being updated already."""
        params = flatten(state.params)
        kept = (self.parts.of(state.optimizer, *roles) for roles in ((LAYERS,), (COUNT, NUMBER)))
        held = StepInputs(params, flatten(state.variables), *kept)
        new, squares, finite, ends, mean = self.layers.train(
            held, batch, state.step, self._apply, {n: self._path_of[n] for n in held.moments}
        )
        squares |= {path: (g * g).sum() for path, g in ends.items()}
        norm = jnp.sqrt(sum(x.sum() for x in squares.values()))

        def update(held: Held, _: jax.Array) -> Held:
            params, optimizer = held.parameters, held.optimizer
            after, kept = self._ends(ends, params, optimizer, finite & jnp.isfinite(norm))
            params = params | after | new.parameters
            return Held(params, self.parts.join(optimizer, kept, new.moments), {})

        return Found(mean, norm, {}, squares, update)

    @cached_property
    def parts(self) -> OptimizerParts:
        """Which part of the optimizer's state belongs to what."""
        return OptimizerParts(self.layout)

    @cached_property
    def _path_of(self) -> Mapping[str, str]:
        """Name of what the optimizer keeps of a parameter -> its path."""
        leaves = self.parts.leaves.items()
        found = {name: self.layout.parameter_of(*leaf) for name, leaf in leaves}
        return {name: p.path for name, p in found.items() if p is not None}

    def _apply(self, gradients: Flat, moments: Flat, counts: Flat, parameters: Flat) -> Any:
        """Update a layer, inside the data plane."""
        parameters, new = self._updated(gradients, moments | counts, parameters)
        return parameters, {name: new[name] for name in moments}

    def _updated(self, gradients: Flat, kept: Flat, parameters: Flat) -> tuple[Flat, Flat]:
        """Return parameters and what the optimizer keeps; of master weights they are copies."""
        wanted = self.layout.working_dtype
        given = {path: g.astype(wanted(path)) for path, g in gradients.items()}
        parameters, kept = self.parts.apply(given, kept, parameters)
        masters = {self._path_of[n]: x for n, x in kept.items() if n in self._masters}
        own = {path: x for path, x in masters.items() if path in parameters}
        return parameters | {p: x.astype(parameters[p].dtype) for p, x in own.items()}, kept

    @cached_property
    def _masters(self) -> set[str]:
        """The names of master weights among what the optimizer keeps: of `Mastered`, no other's."""
        kept, has_them = self.layout.abstract_state().optimizer, lambda x: isinstance(x, Mastered)
        parts = jax.tree_util.tree_leaves_with_path(kept, is_leaf=has_them)
        where = [(*keys, GetAttrKey(MASTER)) for keys, part in parts if has_them(part)]
        is_one = lambda keys: any(keys[: len(start)] == start for start in where)
        return {name for name, (keys, _) in self.parts.leaves.items() if is_one(keys)}

    def _ends(self, gradients: Flat, params: Flat, optimizer: Any, finite: Any) -> tuple:
        """Return the ends and what the optimizer keeps of them, and counts, after their update."""
        stored = self.parts.of(optimizer, ENDS, COUNT, NUMBER)
        held, placed = {path: params[path] for path in gradients}, self.layout.placed
        before = constrain(to_device(held), placed), to_device(stored)
        after = self._updated(constrain(gradients, placed), before[1], before[0])
        after = guard(self.plane.context.execution.nonfinite, finite, after, before)
        column = "parameter" if self.layout.hosted.parameters else "moment"
        new = constrain(after[0], placed, column)
        back = lambda old, x: to_host(x) if is_on_host(old) else x
        return {n: back(held[n], x) for n, x in new.items()}, {
            n: back(stored[n], x) for n, x in after[1].items()
        }
