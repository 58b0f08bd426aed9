"""Arrays by unit and slot: ring buffers of what waits, parameters and gradients by chunk."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclass(frozen=True)
class Store:
    """How arrays of every unit (layer of a chunk) and slot (of a ring, or chunk) are kept.

    `apart`: each unit has arrays of its own, and one slot is no dimension at all, so that what is
    put and taken within one tick is not copied. Else [slots, units, ...], indexed in a loop.
    """

    slots: int
    units: int
    apart: bool

    def full(self, like: Any, value: float = 0) -> Any:
        """Return a store whose entries have these shapes and dtypes, all of one value."""
        ahead = () if not self.apart else ((self.slots,) if self.slots > 1 else ())
        shape = ahead if self.apart else (self.slots, self.units)
        fill = lambda a: jnp.full((*shape, *a.shape), value, a.dtype)
        make = lambda: jax.tree.map(fill, like)
        return [make() for _ in range(self.units)] if self.apart else make()

    def filled(self, value: Any) -> Any:
        """Return a store of one unit whose slots all hold this value."""
        assert self.apart
        repeat = lambda a: jnp.broadcast_to(a, (self.slots, *a.shape)) if self.slots > 1 else a
        return [jax.tree.map(repeat, value)]

    def of(self, stacked: Any) -> Any:
        """Return the store of arrays [slots * units, ...]."""
        split = lambda a: a.reshape(self.slots, self.units, *a.shape[1:])
        if not self.apart:
            return jax.tree.map(split, stacked)
        pick = lambda a, i: split(a)[:, i] if self.slots > 1 else a[i]
        return [jax.tree.map(lambda a, i=i: pick(a, i), stacked) for i in range(self.units)]

    def stacked(self, store: Any) -> Any:
        """Return arrays [slots * units, ...]."""
        if not self.apart:
            return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), store)
        join = lambda *arrays: jnp.stack(arrays, axis=min(self.slots - 1, 1))
        rows = jax.tree.map(join, *store)
        return (
            rows if self.slots == 1 else jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), rows)
        )

    def get(self, store: Any, unit: Any, slot: Any) -> Any:
        """Return one entry."""
        if self.apart:
            pick = lambda a: lax.dynamic_index_in_dim(a, slot, 0, keepdims=False)
            return jax.tree.map(pick, store[unit]) if self.slots > 1 else store[unit]
        one = lambda a: lax.dynamic_slice(a, _at(a, slot, unit), (1, 1, *a.shape[2:]))
        return jax.tree.map(lambda a: one(a).reshape(a.shape[2:]), store)

    def put(self, store: Any, unit: Any, slot: Any, value: Any) -> Any:
        """Return the store with one entry changed."""
        if not self.apart:
            change = lambda a, x: lax.dynamic_update_slice(a, x[None, None], _at(a, slot, unit))
            return jax.tree.map(change, store, value)
        change = lambda a, x: lax.dynamic_update_index_in_dim(a, x, slot, 0)
        new = jax.tree.map(change, store[unit], value) if self.slots > 1 else value
        return [new if i == unit else old for i, old in enumerate(store)]

    def loop(self, body: Callable, carry: Any, reverse: bool = False, unroll: int = 1) -> Any:
        """Return the carry after `body(carry, unit)` of every unit."""
        if self.apart:
            for unit in reversed(range(self.units)) if reverse else range(self.units):
                carry = body(carry, unit)
            return carry
        step = lambda carry, unit: (body(carry, unit), None)
        units = lax.iota("int32", self.units)
        return lax.scan(step, carry, units, reverse=reverse, unroll=unroll)[0]


def _at(array: jax.Array, slot: Any, unit: Any) -> tuple:
    return tuple(jnp.asarray(i, jnp.int32) for i in (slot, unit, *(0,) * (array.ndim - 2)))
