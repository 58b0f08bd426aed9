"""Parameters that were put into a state by hand: master weights and averages follow them."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.optimizers.transforms import Averaged, Mastered
from hfjax.parallel.offload.host_memory import is_host_sharding, is_on_host, to_device, to_host
from hfjax.sharding.layout import State
from hfjax.utils.paths import Tree, flatten, nest

COPIES = {Mastered: "master", Averaged: "average"}  # what keeps a copy of the parameters, and where


class Follow:
    """Lets the copies that an optimizer keeps follow parameters that no step has made.

    A step makes a parameter of its master weight, and would undo what was put in its place; an
    average would go on from what was there before.
    """

    def __init__(self, optimizer_state: Any) -> None:
        self.idle = not _copies(optimizer_state)
        self._made: list[weakref.ref] = []

    def within(self, state: State) -> State:
        """Return the state with copies that fit its parameters, in a program that is traced."""
        if self.idle:
            return state
        params, first = flatten(state.params), state.step == 0
        follow = lambda kept: _following(kept, params, first, _traced)
        return replace(state, optimizer=_mapped(follow, state.optimizer, _is_copy))

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
        follow = lambda kept: _following(kept, params, first, _follows)
        return replace(state, optimizer=_mapped(follow, state.optimizer, _is_copy))


def _mapped(function: Any, tree: Tree, stop: Any) -> Any:
    """Return a tree whose nodes are replaced, those inside of them before."""
    if stop(tree):
        tree = tree._replace(optimizer=_mapped(function, tree.optimizer, stop))
        return function(tree)
    return jax.tree.map(lambda x: _mapped(function, x, stop) if stop(x) else x, tree, is_leaf=stop)


def _is_copy(x: object) -> bool:
    return type(x) in COPIES


def _copies(optimizer_state: Any) -> bool:
    return any(map(_is_copy, jax.tree.leaves(optimizer_state, is_leaf=_is_copy)))


def _following(kept: Any, params: dict[str, Any], first: Any, follows: Callable) -> Any:
    """Return what an optimizer keeps; an average begins with parameters, and is then its own."""
    name = COPIES[type(kept)]
    when = first if isinstance(kept, Averaged) else True
    if when is False:
        return kept
    copies = flatten(getattr(kept, name))
    new = {
        path: follows(x, params[path], when) if path in params and hasattr(x, "dtype") else x
        for path, x in copies.items()
    }
    return kept._replace(**{name: nest(new)})


def _follows(copy: jax.Array, parameter: jax.Array, _: bool) -> jax.Array:
    """Return the copy; where it is not the parameter to rounding, the parameter."""
    own = copy.sharding
    place = own.with_memory_kind("device") if is_host_sharding(own) else own
    nearer = jax.jit(_nearer, out_shardings=(place, None))
    made, apart = nearer(to_device(copy), to_device(parameter))
    return jax.device_put(made, own) if apart else copy


def _traced(copy: jax.Array, parameter: jax.Array, when: Any) -> jax.Array:
    here = to_device(copy)
    made = jnp.where(when, _nearer(here, to_device(parameter))[0], here)
    return to_host(made) if is_on_host(copy) else made


def _nearer(copy: jax.Array, parameter: jax.Array) -> tuple[jax.Array, jax.Array]:
    rounding = jnp.finfo(parameter.dtype)
    wide = parameter.astype(copy.dtype)
    apart = ~(jnp.abs(copy - wide) <= rounding.eps * jnp.abs(wide) + rounding.tiny)
    return jnp.where(apart, wide, copy), apart.any()
