"""Syncs master weights and averages with parameters that were put into a state by hand."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.optimizers.transforms import Averaged, Mastered
from hfjax.parallel.offload.host_memory import is_host_sharding, match_memory, to_device
from hfjax.sharding.layout import State
from hfjax.utils.paths import Tree, flatten, nest

COPIES = {Mastered: "master", Averaged: "average"}  # which states copy the parameters, and where


class MasterSync:
    """Syncs an optimizer's copies of the parameters with parameters that no step has made.

    A step computes a parameter from its master weight, and would undo what was put in its place; an
    average would continue from the old parameters.
    """

    def __init__(self, optimizer_state: Any) -> None:
        self.is_idle = not _has_copies(optimizer_state)
        self._own_params: list[weakref.ref] = []

    def sync_traced(self, state: State) -> State:
        """Return the state with copies synced to its parameters, within a program being traced."""
        if self.is_idle:
            return state
        params, is_first = flatten(state.params), state.step == 0
        sync_optimizer_state = lambda optimizer_state: _sync_optimizer_state(
            optimizer_state, params, is_first, _sync_traced
        )
        return replace(state, optimizer=_map_nodes(sync_optimizer_state, state.optimizer, _is_copy))

    def remember_params(self, state: State) -> State:
        """Remember parameters that a step has made, and return their state."""
        if not self.is_idle:
            self._own_params = [weakref.ref(x) for x in jax.tree.leaves(state.params)]
        return state

    def __call__(self, state: State) -> State:
        """Return the state; if no step has made its parameters, with copies synced to them."""
        if self.is_idle:
            return state
        leaves = jax.tree.leaves(state.params)
        if len(leaves) == len(self._own_params) and all(
            ref() is x for ref, x in zip(self._own_params, leaves, strict=True)
        ):
            return state
        params, is_first = flatten(state.params), int(state.step) == 0
        sync_optimizer_state = lambda optimizer_state: _sync_optimizer_state(
            optimizer_state, params, is_first, _sync_copy
        )
        return replace(state, optimizer=_map_nodes(sync_optimizer_state, state.optimizer, _is_copy))


def _map_nodes(function: Any, tree: Tree, is_node: Any) -> Any:
    """Return a tree with its nodes replaced, inner nodes first."""
    if is_node(tree):
        tree = tree._replace(optimizer=_map_nodes(function, tree.optimizer, is_node))
        return function(tree)
    return jax.tree.map(
        lambda x: _map_nodes(function, x, is_node) if is_node(x) else x, tree, is_leaf=is_node
    )


def _is_copy(x: object) -> bool:
    return type(x) in COPIES


def _has_copies(optimizer_state: Any) -> bool:
    return any(map(_is_copy, jax.tree.leaves(optimizer_state, is_leaf=_is_copy)))


def _sync_optimizer_state(
    optimizer_state: Any, params: dict[str, Any], is_first: Any, sync: Callable
) -> Any:
    """Return optimizer state with its copy synced; an average only before the first step."""
    name = COPIES[type(optimizer_state)]
    is_active = is_first if isinstance(optimizer_state, Averaged) else True
    if is_active is False:
        return optimizer_state
    copies = flatten(getattr(optimizer_state, name))
    new = {
        path: sync(x, params[path], is_active) if path in params and hasattr(x, "dtype") else x
        for path, x in copies.items()
    }
    return optimizer_state._replace(**{name: nest(new)})


def _sync_copy(copy: jax.Array, parameter: jax.Array, _: bool) -> jax.Array:
    """Return the copy, or the parameter where they differ by more than rounding."""
    sharding = copy.sharding
    device_sharding = (
        sharding.with_memory_kind("device") if is_host_sharding(sharding) else sharding
    )
    replace_stale = jax.jit(_replace_stale, out_shardings=(device_sharding, None))
    new_copy, is_stale = replace_stale(to_device(copy), to_device(parameter))
    return jax.device_put(new_copy, sharding) if is_stale else copy


def _sync_traced(copy: jax.Array, parameter: jax.Array, is_active: Any) -> jax.Array:
    device_copy = to_device(copy)
    new_copy = jnp.where(
        is_active, _replace_stale(device_copy, to_device(parameter))[0], device_copy
    )
    return match_memory(copy, new_copy)


def _replace_stale(copy: jax.Array, parameter: jax.Array) -> tuple[jax.Array, jax.Array]:
    finfo = jnp.finfo(parameter.dtype)
    wide_param = parameter.astype(copy.dtype)
    is_stale = ~(jnp.abs(copy - wide_param) <= finfo.eps * jnp.abs(wide_param) + finfo.tiny)
    return jnp.where(is_stale, wide_param, copy), is_stale.any()
