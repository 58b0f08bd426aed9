"""Ring buffers of a pipeline: residuals that wait for backward passes, and links between stages.

`StageLinks` are the permutes between stages, `Slots` the arrays by unit and slot, `StashBuffer` the
residuals, some of which may be in host memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hfjax.parallel.mesh import PIPE_AXIS
from hfjax.parallel.offload.activations import Share, join, split
from hfjax.parallel.offload.host_memory import to_device, to_host
from hfjax.parallel.schedules.compile import Ticks
from hfjax.utils.paths import Index


@dataclass(frozen=True)
class StageLinks:
    """The links of a table, seen from one stage."""

    ticks: Ticks
    stage: Any  # the index of this stage
    keeps_old: bool  # idle slots compute, on valid activations

    def send(self, x: Any, kind: str, link: int) -> Any:
        """Return what arrives on this link: nothing is sent where the table never sends."""
        if link == 0:
            return x
        route = self.ticks.route(kind, link)
        return jax.tree.map(lambda a: lax.ppermute(a, PIPE_AXIS, route), x)

    def select_received(self, x: Any, old: Any, link: int) -> Any:
        """Return what arrived, `old` on a stage to which the table never sends (zeros arrive)."""
        if not self.keeps_old or link == 0:
            return x
        targets = [target for _, target in self.ticks.route("F", link)]
        reached = jnp.asarray(np.isin(np.arange(self.ticks.table.stages), targets))
        is_reached = reached[self.stage]
        return jax.tree.map(lambda a, b: jnp.where(is_reached, a, b), x, old)


@dataclass(frozen=True)
class Slots:
    """A store of arrays for every unit (layer of a chunk) and slot (of a ring buffer, or chunk).

    `unstack_units`: each unit has arrays of its own, without a slot dimension if there is one slot,
    so that what is put and taken within one tick is not copied. Else [slots, units, ...], indexed
    in a loop.
    """

    slots: int
    units: int
    unstack_units: bool

    def full(self, like: Any, value: float = 0) -> Any:
        """Return a store whose entries have these shapes and dtypes, filled with one value."""
        slot_dims = () if not self.unstack_units else ((self.slots,) if self.slots > 1 else ())
        shape = slot_dims if self.unstack_units else (self.slots, self.units)
        fill = lambda a: jnp.full((*shape, *a.shape), value, a.dtype)
        make = lambda: jax.tree.map(fill, like)
        return [make() for _ in range(self.units)] if self.unstack_units else make()

    def fill_slots(self, value: Any) -> list:
        """Return a store of one unit whose slots all hold this value."""
        assert self.unstack_units
        repeat = lambda a: jnp.broadcast_to(a, (self.slots, *a.shape)) if self.slots > 1 else a
        return [jax.tree.map(repeat, value)]

    def from_stacked(self, stacked: Any) -> Any:
        """Return the store of arrays [slots * units, ...]."""
        split = lambda a: a.reshape(self.slots, self.units, *a.shape[1:])
        if not self.unstack_units:
            return jax.tree.map(split, stacked)
        pick = lambda a, i: split(a)[:, i] if self.slots > 1 else a[i]
        return [jax.tree.map(lambda a, i=i: pick(a, i), stacked) for i in range(self.units)]

    def to_stacked(self, store: Any) -> Any:
        """Return arrays [slots * units, ...]."""
        if not self.unstack_units:
            return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), store)
        stack = lambda *arrays: jnp.stack(arrays, axis=min(self.slots - 1, 1))
        arrays_by_slot = jax.tree.map(stack, *store)
        return (
            arrays_by_slot
            if self.slots == 1
            else jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), arrays_by_slot)
        )

    def get(self, store: Any, unit: Index, slot: Index) -> Any:
        """Return one entry."""
        if self.unstack_units:
            pick = lambda a: lax.dynamic_index_in_dim(a, slot, 0, keepdims=False)
            return jax.tree.map(pick, store[unit]) if self.slots > 1 else store[unit]
        one = lambda a: lax.dynamic_slice(a, _at(a, slot, unit), (1, 1, *a.shape[2:]))
        return jax.tree.map(lambda a: one(a).reshape(a.shape[2:]), store)

    def put(self, store: Any, unit: Index, slot: Index, value: Any) -> Any:
        """Return the store with one entry replaced."""
        if not self.unstack_units:
            change = lambda a, x: lax.dynamic_update_slice(a, x[None, None], _at(a, slot, unit))
            return jax.tree.map(change, store, value)
        change = lambda a, x: lax.dynamic_update_index_in_dim(a, x, slot, 0)
        new = jax.tree.map(change, store[unit], value) if self.slots > 1 else value
        return [new if i == unit else old for i, old in enumerate(store)]

    def loop(self, body: Callable, carry: Any, reverse: bool = False, unroll: int = 1) -> Any:
        """Return the carry after `body(carry, unit)` of every unit."""
        if self.unstack_units:
            for unit in reversed(range(self.units)) if reverse else range(self.units):
                carry = body(carry, unit)
            return carry
        step = lambda carry, unit: (body(carry, unit), None)
        units = lax.iota("int32", self.units)
        return lax.scan(step, carry, units, reverse=reverse, unroll=unroll)[0]


def _at(array: jax.Array, slot: Index, unit: Index) -> tuple:
    return tuple(jnp.asarray(i, jnp.int32) for i in (slot, unit, *(0,) * (array.ndim - 2)))


@dataclass(frozen=True)
class StashBuffer:
    """A ring buffer of trees of arrays, with an entry for each unit of a stage and slot.

    It is two stores of lists of arrays: one in host memory, one in device memory.
    """

    like: Any  # shapes and dtypes of an entry
    store: Slots
    share: Share  # how much of an entry is offloaded

    def empty(self) -> tuple[Any, Any]:
        """Return the empty buffer."""
        host, device = map(self.store.full, jax.eval_shape(self._split, self.like))
        return jax.tree.map(self._host_zeros, host), device

    def put(
        self, buffer: tuple[Any, Any], unit: Index, slot: Index, values: Any
    ) -> tuple[Any, Any]:
        """Return the buffer with one entry replaced."""
        (host, device), (host_values, device_values) = buffer, self._split(values)
        host = self.store.put(host, unit, slot, to_host(host_values))
        return host, self.store.put(device, unit, slot, device_values)

    def get(self, buffer: tuple[Any, Any], unit: Index, slot: Index) -> Any:
        """Return one entry, on the device."""
        host, device = (self.store.get(store, unit, slot) for store in buffer)
        values = join(self.share, zip(to_device(host), device, strict=True))
        return jax.tree.unflatten(jax.tree.structure(self.like), values)

    def _host_zeros(self, zeros: jax.Array) -> jax.Array:
        """Return zeros in host memory, made entry by entry: the device never holds all of them."""
        make_entry = lambda _, __: (None, to_host(jnp.zeros(zeros.shape[1:], zeros.dtype)))
        return (
            lax.scan(make_entry, None, length=zeros.shape[0])[1] if zeros.ndim else to_host(zeros)
        )

    def _split(self, values: Any) -> tuple[list, list]:
        """Return the parts of the arrays for host memory, and for device memory."""
        halves = list(split(self.share, jax.tree.leaves(values)))
        return [on_host for on_host, _ in halves], [on_device for _, on_device in halves]
