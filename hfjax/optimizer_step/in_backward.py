"""A step that updates each layer during its backward pass, so that few gradients are ever alive."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import GetAttrKey

from hfjax.optimizer_step.optimizer_parts import COUNT, ENDS, NUMBER
from hfjax.optimizer_step.update import GradResult, UpdatableState, Update, constrain
from hfjax.optimizers.transforms import Mastered
from hfjax.parallel.execution import guard
from hfjax.parallel.layerwise.engines import LayerUpdateEngine
from hfjax.parallel.offload.host_memory import match_memory, to_device
from hfjax.sharding.host_memory import MASTER
from hfjax.sharding.layout import State
from hfjax.utils.paths import Flat


@dataclass(frozen=True, eq=False)
class InBackwardUpdate(Update):
    """One call of the step: layers are updated from last to first, then embedding and head.

    The result is that of the ordinary step. Only a step that is not finite differs: layers above
    the first gradient that is not finite have already taken the step; that layer and all below it
    (embedding and head too, and counts of the optimizer) stay unchanged. A loss that is not
    finite is detected before any layer is updated.
    """

    layer_engine: LayerUpdateEngine  # of `engine`

    def __call__(self, state: State, batch: Any) -> GradResult:
        """Return the result of a call of the step, whose layers are already updated."""
        train_state = self.parts.train_state(state)
        new, squares, finite, ends, mean = self.layer_engine.train(
            train_state,
            batch,
            state.step,
            self._apply,
            {n: self._path_of[n] for n in train_state.optimizer_state},
        )
        squares |= {path: (g * g).sum() for path, g in ends.items()}
        norm = jnp.sqrt(sum(x.sum() for x in squares.values()))

        def update(old_state: UpdatableState, _: jax.Array) -> UpdatableState:
            params, optimizer = old_state.parameters, old_state.optimizer
            new_ends, end_leaves = self._update_ends(
                ends, params, optimizer, finite & jnp.isfinite(norm)
            )
            params = params | new_ends | new.parameters
            return UpdatableState(
                params, self.parts.join(optimizer, end_leaves, new.optimizer_state), {}
            )

        return GradResult(mean, norm, {}, squares, update)

    @cached_property
    def _path_of(self) -> Mapping[str, str]:
        """Name of an array in the optimizer state of a parameter -> its path."""
        leaves = self.parts.leaves.items()
        owners = {name: self.layout.parameter_of(*leaf) for name, leaf in leaves}
        return {name: p.path for name, p in owners.items() if p is not None}

    def _apply(self, gradients: Flat, optimizer_state: Flat, counts: Flat, parameters: Flat) -> Any:
        """Update a layer, inside the engine."""
        parameters, new = self._update_params(gradients, optimizer_state | counts, parameters)
        return parameters, {name: new[name] for name in optimizer_state}

    def _update_params(
        self, gradients: Flat, optimizer_leaves: Flat, parameters: Flat
    ) -> tuple[Flat, Flat]:
        """Return parameters and optimizer state; parameters are cast from their master weights."""
        working_dtype = self.layout.working_dtype
        grads = {path: g.astype(working_dtype(path)) for path, g in gradients.items()}
        parameters, optimizer_leaves = self.parts.apply(grads, optimizer_leaves, parameters)
        masters = {
            self._path_of[n]: x for n, x in optimizer_leaves.items() if n in self._master_names
        }
        own_masters = {path: x for path, x in masters.items() if path in parameters}
        return parameters | {
            p: x.astype(parameters[p].dtype) for p, x in own_masters.items()
        }, optimizer_leaves

    @cached_property
    def _master_names(self) -> set[str]:
        """The names of master weights in the optimizer state: those of `Mastered`, no others."""
        optimizer_state, is_mastered = (
            self.layout.abstract_state().optimizer,
            lambda x: isinstance(x, Mastered),
        )
        nodes = jax.tree_util.tree_leaves_with_path(optimizer_state, is_leaf=is_mastered)
        prefixes = [(*keys, GetAttrKey(MASTER)) for keys, node in nodes if is_mastered(node)]
        is_master = lambda keys: any(keys[: len(start)] == start for start in prefixes)
        return {name for name, (keys, _) in self.parts.leaves.items() if is_master(keys)}

    def _update_ends(self, gradients: Flat, params: Flat, optimizer: Any, finite: Any) -> tuple:
        """Return embedding and head, their optimizer state and counts, after their update."""
        leaves = self.parts.select(optimizer, ENDS, COUNT, NUMBER)
        end_params, param_specs = (
            {path: params[path] for path in gradients},
            self.layout.param_specs,
        )
        before = constrain(to_device(end_params), param_specs), to_device(leaves)
        after = self._update_params(constrain(gradients, param_specs), before[1], before[0])
        after = guard(self.engine.context.execution.on_nonfinite, finite, after, before)
        column = "parameter" if self.layout.host_memory.parameters else "optimizer_state"
        new = constrain(after[0], param_specs, column)
        return {n: match_memory(end_params[n], x) for n, x in new.items()}, {
            n: match_memory(leaves[n], x) for n, x in after[1].items()
        }
