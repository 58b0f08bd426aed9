"""One tick of a pipeline's table, as a stage reads it.

`SegmentFacts` are static: which tasks all stages have in a segment of the table, or none.
`StageTick` has the traced entries of one stage in one tick.
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

State = dict[str, Any]  # what a stage keeps from tick to tick
OUTER_TASKS = ("first", "last", "first_backward")  # tasks that use parameters outside the layers


@dataclass(frozen=True)
class SegmentFacts:
    """Static facts of a segment: which tasks run in all its ticks on all stages, or in none.

    Such tasks need no `lax.cond`.
    """

    ticks: Ticks
    start: int
    end: int

    def always_runs(self, task: str) -> bool:
        return bool(self.runs[task].all())

    def never_runs(self, task: str) -> bool:
        return not self.runs[task].any()

    def has_arrivals(self, kind: str, link: int, later: int = 0) -> bool:
        """Whether anything arrives by a link in this segment, or `later` ticks after it."""
        return self.ticks.has_arrivals(kind, link, self.start + later, self.end + later)

    @cached_property
    def runs(self) -> dict[str, np.ndarray]:
        """Whether each kind of task runs: bool [ticks, stages] each."""
        table = self.ticks.table
        tasks = table.cells[self.start : self.end]
        runs = {kind: tasks[..., i] >= 0 for i, kind in enumerate("FBW")}
        g = tasks % table.virtual
        runs["first"] = runs["F"] & (g[..., 0] == 0)
        runs["last"] = runs["F"] & (g[..., 0] == table.virtual - 1)
        runs["first_backward"] = runs["B"] & (g[..., 1] == 0)
        return runs


@dataclass(frozen=True)
class StageTick:
    """The table's entries for this stage in one tick."""

    entries: dict[str, Any]
    facts: SegmentFacts

    def __getitem__(self, name: str) -> jax.Array:
        return self.entries[name]

    def wait_for(self, state: State) -> "StageTick":
        """Return the same entries, made to depend on a state.

        XLA would repeat a sum in every fusion that reads the entries, hundreds of times, and take
        three times as long to compile. A sort runs once.
        """
        floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        firsts = to_device([x.reshape(-1)[:1] for x in floats if x.size])
        if not firsts:
            return self
        impossible = jnp.concatenate([jnp.isnan(x) & jnp.isinf(x) for x in firsts])
        zero = lax.sort(impossible.astype(jnp.int32))[-1]
        delay = lambda x: x if x.dtype == bool else x + zero
        return replace(self, entries={name: delay(x) for name, x in self.entries.items()})

    def index(self, name: str) -> jax.Array:
        """Return an entry as an index, 0 where the slot is idle."""
        return jnp.maximum(self.entries[name], 0)

    def is_active(self, kind: str) -> jax.Array:
        return self.entries[f"{kind}_microbatch"] >= 0

    def branch(self, task: str, true_fun: Callable, false_fun: Callable, *operands: Any) -> Any:
        """Return `true_fun(*operands)` where the task runs, `false_fun(*operands)` elsewhere."""
        if self.facts.always_runs(task):
            return true_fun(*operands)
        if self.facts.never_runs(task):
            return false_fun(*operands)
        return lax.cond(self.entries[task], true_fun, false_fun, *operands)
