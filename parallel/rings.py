"""A ring of what waits for backward passes, parts of it in host memory, on all stages or on some.

What goes to the host on some stages only has a ring in both memories, each as deep as the stages
that use it need: the last stages of 1F1B have few microbatches under way, and may keep on the
device what the first ones send away.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.memory import to_device, to_host
from hfjax.parallel.offload import Offload, Share
from hfjax.parallel.schedule import Table
from hfjax.parallel.store import Store


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

    def _stores(self, on_host: tuple[bool, ...]) -> tuple[Store, Store]:
        """Return the stores of a group in both memories, each as deep as its stages need."""
        deep = lambda there: max(
            (n for n, on in zip(self.slots, on_host, strict=True) if on == there), default=0
        )
        store = lambda n: Store(n, self.units, self.apart)
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
