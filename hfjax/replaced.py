"""Parameters that were put into a state by hand: master weights and averages follow them."""

import weakref
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.optimizers import Averaged, Mastered
from hfjax.parallel.memory import is_host_sharding, to_device
from hfjax.paths import flatten, nest
from hfjax.plan import State

COPIES = {Mastered: "master", Averaged: "average"}  # what keeps a copy of the parameters, and where


class Follow:
    """Lets the copies that an optimizer keeps follow parameters that no step has made.

    A step makes a parameter of its master weight, and would undo what was put in its place; an
    average would go on from what was there before.
    """

    def __init__(self, optimizer_state: Any):
        self.idle = not _copies(optimizer_state)
        self._made: list[weakref.ref] = []

    def made(self, state: State) -> State:
        """Take note of parameters that a step has made, and return their state."""
        if not self.idle:
            self._made = [weakref.ref(x) for x in jax.tree.leaves(state.params)]
        return state

    def __call__(self, state: State) -> State:
        """Return the state; if others have made its parameters, with copies that fit them."""
        if self.idle:
            return state
        leaves = jax.tree.leaves(state.params)
        if len(leaves) == len(self._made) and all(
            ref() is x for ref, x in zip(self._made, leaves, strict=True)
        ):
            return state
        params, first = flatten(state.params), int(state.step) == 0
        follow = lambda kept: _following(kept, params, first) if type(kept) in COPIES else kept
        is_copy = lambda x: type(x) in COPIES
        return replace(state, optimizer=_mapped(follow, state.optimizer, is_copy))


def _mapped(function: Any, tree: Any, stop: Any) -> Any:
    """Return a tree whose nodes are replaced, those inside of them before."""
    if stop(tree):
        tree = tree._replace(optimizer=_mapped(function, tree.optimizer, stop))
        return function(tree)
    return jax.tree.map(lambda x: _mapped(function, x, stop) if stop(x) else x, tree, is_leaf=stop)


def _copies(optimizer_state: Any) -> bool:
    is_copy = lambda x: type(x) in COPIES
    return any(map(is_copy, jax.tree.leaves(optimizer_state, is_leaf=is_copy)))


def _following(kept: Any, params: dict[str, Any], first: bool) -> Any:
    if isinstance(kept, Averaged) and not first:
        return kept
    name = COPIES[type(kept)]
    copies = flatten(getattr(kept, name))
    follows = lambda path, x: path in params and hasattr(x, "sharding")
    new = {p: _follows(x, params[p]) if follows(p, x) else x for p, x in copies.items()}
    return kept._replace(**{name: nest(new)})


def _follows(copy: jax.Array, parameter: jax.Array) -> jax.Array:
    """Return the copy; where it is not the parameter to rounding, the parameter."""
    own = copy.sharding
    place = own.with_memory_kind("device") if is_host_sharding(own) else own
    nearer = jax.jit(_nearer, out_shardings=(place, None))
    made, apart = nearer(to_device(copy), to_device(parameter))
    return jax.device_put(made, own) if apart else copy


def _nearer(copy: jax.Array, parameter: jax.Array) -> tuple[jax.Array, jax.Array]:
    rounding = jnp.finfo(parameter.dtype)
    wide = parameter.astype(copy.dtype)
    apart = ~(jnp.abs(copy - wide) <= rounding.eps * jnp.abs(wide) + rounding.tiny)
    return jnp.where(apart, wide, copy), apart.any()
