"""Ring buffers of a pipeline: residuals that wait for backward passes, and links between stages.

`Links` are the permutes between stages, `Slots` the arrays by unit and slot, `Ring` the residuals,
of which parts may wait in host memory. If only some stages send residuals to the host, there is a
ring in both memories, each as deep as the stages that use it need: the last stages of 1F1B have few
microbatches under way and keep on the device what the first ones send away.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hfjax.parallel.memory import to_device, to_host
from hfjax.parallel.mesh import PIPE_AXIS
from hfjax.parallel.offload import Offload, Share
from hfjax.parallel.schedules.compile import Ticks
from hfjax.parallel.schedules.table import Table


@dataclass(frozen=True)
class Links:
    """The links of a table, seen from one stage."""

    ticks: Ticks
    stage: Any  # the number of this one

    def send(self, x: Any, kind: str, link: int) -> Any:
        """Return what arrives on this link: nothing is sent where the table never sends."""
        if link == 0:
            return x
        route = self.ticks.route(kind, link)
        return jax.tree.map(lambda a: lax.ppermute(a, PIPE_AXIS, route), x)

    def arrived(self, x: Any, old: Any, link: int) -> Any:
        """Return what arrived, `old` on a stage to which the table never sends (zeros arrive)."""
        if self.ticks.table.branches or link == 0:
            return x
        to = [there for _, there in self.ticks.route("F", link)]
        reached = jnp.asarray(np.isin(np.arange(self.ticks.table.stages), to))
        here = reached[self.stage]
        return jax.tree.map(lambda a, b: jnp.where(here, a, b), x, old)


@dataclass(frozen=True)
class Slots:
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


@dataclass(frozen=True)
class Ring:
    """A ring of trees of arrays, an entry for each unit of a stage and slot."""

    like: Any  # shapes and dtypes of an entry
    slots: Sequence[int]  # how many each stage uses
    units: int
    apart: bool
    shares: Sequence[Share]  # what goes to the host, by stage
    stage: Any  # the number of this one

    def empty(self) -> list[tuple]:
        """Return the ring before anything was put: of each group what is on host and device."""
        pieces = jax.eval_shape(self._cut, self.like)
        made = []
        for numbers, on_host in self._groups.items():
            stores, like = self._stores(on_host), [pieces[i] for i in numbers]
            host, device = (s.full(like) if s.slots else [] for s in stores)
            made.append((jax.tree.map(self._on_host, host), device))
        return made

    def put(self, ring: list[tuple], unit: Any, slot: Any, values: Any) -> list[tuple]:
        """Return the ring with one entry changed."""
        pieces = self._cut(values)
        put = []
        for (numbers, on_host), held in zip(self._groups.items(), ring, strict=True):
            host, device = self._stores(on_host)
            mine = [pieces[i] for i in numbers]
            keep = lambda h, d, s=device, x=mine: (h, s.put(d, unit, slot, x))
            send = lambda h, d, s=host, x=mine: (s.put(h, unit, slot, to_host(x)), d)
            put.append(self._on(on_host, send, keep, *held))
        return put

    def get(self, ring: list[tuple], unit: Any, slot: Any) -> Any:
        """Return one entry, on the device."""
        pieces: list[Any] = [None] * self._count
        for (numbers, on_host), held in zip(self._groups.items(), ring, strict=True):
            host, device = self._stores(on_host)
            kept = lambda h, d, s=device: s.get(d, unit, slot)
            back = lambda h, d, s=host: to_device(s.get(h, unit, slot))
            for i, x in zip(numbers, self._on(on_host, back, kept, *held), strict=True):
                pieces[i] = x
        return self._join(pieces)

    def _on_host(self, zeros: jax.Array) -> jax.Array:
        """Return zeros in host memory, filled row by row: the device never holds them all."""
        row = lambda _, __: (None, to_host(jnp.zeros(zeros.shape[1:], zeros.dtype)))
        return lax.scan(row, None, length=zeros.shape[0])[1] if zeros.ndim else to_host(zeros)

    # -- which memory -------------------------------------------------------------------------

    def _on(self, on_host: tuple[bool, ...], send: Callable, keep: Callable, *held: Any) -> Any:
        """Return what this stage does with a group, on the host or on the device."""
        if all(on_host):
            return send(*held)
        if not any(on_host):
            return keep(*held)
        here = jnp.asarray(on_host)[self.stage]
        return lax.cond(here, send, keep, *held)

    def _stores(self, on_host: tuple[bool, ...]) -> tuple[Slots, Slots]:
        """Return the stores of a group in both memories, each as deep as its stages need."""
        deep = lambda there: max(
            (n for n, on in zip(self.slots, on_host, strict=True) if on == there), default=0
        )
        store = lambda n: Slots(n, self.units, self.apart)
        return store(deep(True)), store(deep(False))

    @cached_property
    def _groups(self) -> dict[tuple[int, ...], tuple[bool, ...]]:
        """Numbers of pieces -> on which stages they go to the host."""
        found: dict[tuple[bool, ...], list[int]] = {}
        number = 0
        for i in range(self._leaves.num_leaves):
            on = tuple(i in share for share in self.shares)
            found.setdefault(on, []).append(number)
            number += 1
            if self._is_cut(i):
                found.setdefault((False,) * len(self.shares), []).append(number)
                number += 1
        return {tuple(numbers): on for on, numbers in found.items()}

    @property
    def _count(self) -> int:
        return sum(map(len, self._groups))

    def _is_cut(self, i: int) -> bool:
        return i in self.shares[0] and self.shares[0][i].dim is not None

    @property
    def _leaves(self) -> Any:
        return jax.tree.structure(self.like)

    def _cut(self, values: Any) -> list[Any]:
        """Return the arrays in pieces: of one that is cut, what goes to the host and the rest."""
        pieces = []
        for i, x in enumerate(jax.tree.leaves(values)):
            pieces += self.shares[0][i].split(x) if self._is_cut(i) else [x]
        return pieces

    def _join(self, pieces: Sequence[Any]) -> Any:
        rest, values = iter(pieces), []
        for i in range(self._leaves.num_leaves):
            cut = self._is_cut(i)
            values.append(self.shares[0][i].join([next(rest), next(rest)]) if cut else next(rest))
        return jax.tree.unflatten(self._leaves, values)


def check_rings(table: Table, offload: Offload, platform: str) -> None:
    """Refuse rings on the host that stages would use in different branches of a GPU's program.

    XLA copies them whole, from host to host, wherever a branch hands them on (jax 0.10), or does
    not compile them (jax 0.12).
    """
    if platform == "cpu":
        return
    if len(set(offload.ratios)) > 1:
        raise ValueError(
            f"{offload}: on {platform} devices all stages have the same ratio, since XLA copies "
            f"what lies on the host wherever stages go different ways. Give one, for instance "
            f"ratio={max(offload.ratios)}."
        )
    if table.branches:
        raise ValueError(
            f"{offload} under {table.name}: on {platform} devices XLA copies all that lies on the "
            "host in each tick in which stages go different ways. Use a schedule that does not "
            "branch (1f1b, interleaved, gpipe, zb, v), or remat instead of offload."
        )
