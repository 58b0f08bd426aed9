"""Runs an optimizer on one part after another: layers by themselves, then all that is outside them.

Each part sees the full tree of parameters, so that masks and labels by path fit, but arrays of
other parts are empty. Optimizer state is matched to a parameter by path and shape; a number
that belongs to no parameter (a count of updates) goes to every part.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from hfjax.parallel.adapters.model_template import LAYERS as OF_LAYERS
from hfjax.parallel.engine.gradient_engine import TrainState
from hfjax.sharding.layout import Layout, State
from hfjax.utils.paths import Flat, flatten, nest

LAYERS, ENDS = "layers", "ends"
COUNT, NUMBER = "count beside moments", "number"


@dataclass(frozen=True)
class OptimizerParts:
    """The optimizer state, divided by what it belongs to."""

    layout: Layout

    @cached_property
    def leaves(self) -> dict[str, tuple[tuple, Any]]:
        """Name -> path and shape of every array of the optimizer state."""
        pairs, _ = jax.tree_util.tree_flatten_with_path(self.layout.abstract_state().optimizer)
        return {jax.tree_util.keystr(keys): (keys, leaf) for keys, leaf in pairs}

    @cached_property
    def roles(self) -> dict[str, str]:
        """Name -> what it belongs to: layers, ends, a count beside moments, or another number."""
        roles, moment_prefixes = {}, set()
        for name, (keys, leaf) in self.leaves.items():
            if (p := self.layout.parameter_of(keys, leaf)) is not None:
                roles[name] = LAYERS if p.path.startswith(OF_LAYERS) else ENDS
                moment_prefixes.add(keys[: -len(p.path.split("/")) - 1])
        for name, (keys, _) in self.leaves.items():
            if name not in roles:
                roles[name] = COUNT if keys[:-1] in moment_prefixes else NUMBER
        return roles

    def select(self, state: Any, *roles: str) -> Flat:
        """Return the optimizer state of these roles, by name."""
        leaves = zip(self.leaves, jax.tree.leaves(state), strict=True)
        return {name: leaf for name, leaf in leaves if self.roles[name] in roles}

    def train_state(self, state: State) -> TrainState:
        """Return what an engine updates: parameters, variables, state of layers, and numbers."""
        params, variables = flatten(state.params), flatten(state.variables)
        layers = self.select(state.optimizer, LAYERS)
        return TrainState(params, variables, layers, self.select(state.optimizer, COUNT, NUMBER))

    def join(self, state: Any, *new: Flat) -> Any:
        """Return the state with these leaves replaced."""
        changed: Flat = {name: leaf for flat in new for name, leaf in flat.items()}
        old = zip(self.leaves, jax.tree.leaves(state), strict=True)
        treedef = jax.tree.structure(state)
        return treedef.unflatten([changed.get(name, leaf) for name, leaf in old])

    def apply(self, gradients: Flat, optimizer_leaves: Flat, parameters: Flat) -> tuple[Flat, Flat]:
        """Return parameters and state after an update of these parameters alone."""
        updates, optimizer_leaves = self.update(gradients, optimizer_leaves, parameters)
        return cast(Flat, optax.apply_updates(parameters, updates)), optimizer_leaves

    def update(
        self, gradients: Flat, optimizer_leaves: Flat, parameters: Flat
    ) -> tuple[Flat, Flat]:
        """Return the updates of these parameters alone, and the state afterwards."""
        empty = {path: _empty_array(p) for path, p in self.layout.param_specs.items()}
        state = self.join(
            jax.tree.map(_empty_array, self.layout.abstract_state().optimizer), optimizer_leaves
        )
        inputs = (nest(empty | gradients), state, nest(empty | parameters))
        updates, state = self.layout.optimizer.update(*inputs)
        updates, state = flatten(cast(dict, updates)), self.select(state, *set(self.roles.values()))
        new_leaves = {name: state[name].astype(old.dtype) for name, old in optimizer_leaves.items()}
        return {path: updates[path] for path in parameters}, new_leaves


def _empty_array(like: Any) -> jax.Array:
    return jnp.zeros((0, *like.shape[1:]) if like.shape else (), like.dtype)
