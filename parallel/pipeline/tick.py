"""One row of a pipeline's table, as a stage reads it.

`SegmentFacts` are known before anything runs: which tasks all stages have in a segment of the
table, or none. `StageTick` are the numbers of one stage in one tick, traced.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hfjax.parallel.offload.host_memory import to_device
from hfjax.parallel.schedules.compile import Ticks

State = dict[str, Any]  # what a stage holds from tick to tick
OUTSIDE = ("first", "last", "first_backward")  # tasks that use parameters outside the layers


@dataclass(frozen=True)
class SegmentFacts:
    """Static facts of a segment: what runs in all its ticks on all stages, or in none.

    No `lax.cond` is needed then.
    """

    ticks: Ticks
    start: int
    end: int

    def always(self, what: str) -> bool:
        return bool(self.when[what].all())

    def never(self, what: str) -> bool:
        return not self.when[what].any()

    def arriving(self, kind: str, link: int, later: int = 0) -> bool:
        """Whether anything arrives by a link in this segment, or so many ticks later."""
        return self.ticks.arriving(kind, link, self.start + later, self.end + later)

    @cached_property
    def when(self) -> dict[str, np.ndarray]:
        """Whether each kind of task runs: bool [ticks, stages] each."""
        table = self.ticks.table
        tasks = table.cells[self.start : self.end]
        when = {kind: tasks[..., i] >= 0 for i, kind in enumerate("FBW")}
        g = tasks % table.virtual
        when["first"] = when["F"] & (g[..., 0] == 0)
        when["last"] = when["F"] & (g[..., 0] == table.virtual - 1)
        when["first_backward"] = when["B"] & (g[..., 1] == 0)
        return when


@dataclass(frozen=True)
class StageTick:
    """One row of the table for this stage."""

    row: dict[str, Any]
    facts: SegmentFacts

    def __getitem__(self, name: str) -> jax.Array:
        return self.row[name]

    def after(self, state: State) -> "StageTick":
        """Return the same row, which nothing can read before a state is there.

        XLA repeats a sum in every fusion that reads the row, hundreds of times, and compiles three
        times as long. A sort is done once.
        """
        floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        firsts = to_device([x.reshape(-1)[:1] for x in floats if x.size])
        if not firsts:
            return self
        both = jnp.concatenate([jnp.isnan(x) & jnp.isinf(x) for x in firsts])
        never = lax.sort(both.astype(jnp.int32))[-1]
        late = lambda x: x if x.dtype == bool else x + never
        return replace(self, row={name: late(x) for name, x in self.row.items()})

    def positive(self, name: str) -> jax.Array:
        """Return a number to index with, 0 where the slot is idle."""
        return jnp.maximum(self.row[name], 0)

    def active(self, kind: str) -> jax.Array:
        return self.row[f"{kind}_microbatch"] >= 0

    def branch(self, what: str, yes: Callable, no: Callable, *operands: Any) -> Any:
        """Return `yes(*operands)` where it is so, `no(*operands)` elsewhere."""
        if self.facts.always(what):
            return yes(*operands)
        if self.facts.never(what):
            return no(*operands)
        return lax.cond(self.row[what], yes, no, *operands)
