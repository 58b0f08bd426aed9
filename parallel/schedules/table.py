"""A schedule is a table: which stage works on which microbatch, tick by tick.

Within a tick a stage receives what its neighbours sent in the last tick, then runs its forward slot
F (after the last virtual stage also the head and the loss, which give the gradient that B starts
from), its backward slot B and its weights slot W. A stage has one slot of each kind, so it sends at
most one message of each kind per tick.

`lay_out` turns orders into ticks: every stage runs its lists of cells in order, each cell as early
as it can.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hfjax.utils.tables import aligned

KINDS = "FBW"  # forward; backward with respect to the input, or all of it; weights
Homes = tuple[tuple[int, int], ...]


class Task(NamedTuple):
    """One piece of work: a kind, for one virtual stage and one microbatch."""

    kind: str
    virtual: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.virtual}{self.kind}{self.microbatch}"


@dataclass(frozen=True, eq=False)
class Table:
    """Which stage runs which tasks in which tick; `str(table)` is its text form."""

    name: str
    stages: int  # devices along the pipe axis
    microbatches: int
    chunks: int  # pieces of the model on each stage
    homes: Homes  # virtual stage, in model order -> (stage, chunk)
    cells: np.ndarray  # int32 [ticks, stages, slots]: microbatch * virtual + virtual stage, or -1
    branches: bool = False  # stages run different tasks in one tick: idle slots must be skipped

    @property
    def virtual(self) -> int:
        """The number of virtual stages: stages times chunks."""
        return self.stages * self.chunks

    @property
    def ticks(self) -> int:
        """The number of ticks."""
        return len(self.cells)

    @cached_property
    def split(self) -> bool:
        """Whether the gradient of the weights is a task of its own."""
        return bool((self.cells[:, :, 2] >= 0).any())

    @cached_property
    def trains(self) -> bool:
        """Whether there is any backward task."""
        return bool((self.cells[:, :, 1] >= 0).any())

    def tasks(self) -> Iterator[tuple[Task, int, int]]:
        """Yield every task with its tick and stage, in the order of the ticks."""
        for tick, stage, slot in np.argwhere(self.cells >= 0).tolist():
            microbatch, virtual = divmod(int(self.cells[tick, stage, slot]), self.virtual)
            yield Task(KINDS[slot], virtual, microbatch), tick, stage

    def times(self) -> dict[Task, int]:
        """Return the tick of each task."""
        return {task: tick for task, tick, _ in self.tasks()}

    def called(self, task: Task) -> str:
        """Return a task as the grid names it: a B whose W is in another cell is an I."""
        for other, tick, stage in self.tasks() if self.split and task.kind == "B" else ():
            _, backward, weights = self.cells[tick, stage].tolist()
            if other == task and backward != weights:
                return str(task._replace(kind="I"))
        return str(task)

    def text(self, tick: int, stage: int) -> str:
        """Return one cell in the notation of torch.distributed.pipelining: `1F3+1B0`, or `.`."""
        forward, backward, weights = self.cells[tick, stage].tolist()
        whole = backward >= 0 and (backward == weights or not self.split)
        kinds = (("F", forward), ("B" if whole else "I", backward))
        kinds = (*kinds, ("W", -1 if whole and backward == weights else weights))
        shown = (f"{x % self.virtual}{kind}{x // self.virtual}" for kind, x in kinds if x >= 0)
        return "+".join(shown) or "."

    def __str__(self) -> str:
        rows = [[self.text(t, s) for t in range(self.ticks)] for s in range(self.stages)]
        return "\n".join(aligned(rows, gap=" "))


def needs(task: Task, virtual: int) -> list[tuple[Task, int]]:
    """Return the tasks that one waits for, each with the ticks that must lie between: 1 or 0.

    >>> [(str(task), wait) for task, wait in needs(Task("B", 1, 0), virtual=4)]
    [('1F0', 0), ('2B0', 1)]
    """
    kind, g, m = task
    if kind == "F":
        return [(Task("F", g - 1, m), 1)] if g else []
    if kind == "W":
        return [(Task("B", g, m), 0)]
    last = g == virtual - 1
    return [(Task("F", g, m), 0)] + ([] if last else [(Task("B", g + 1, m), 1)])


def check(table: Table) -> Table:
    """Return the table; raise ValueError, with the faulty cell marked, if it cannot run.

    Every task once and on its home, neighbours only, every input there in time. That no message
    and no stored value is overwritten is the work of `hfjax.parallel.schedules.compile`.
    """
    if wrong := homes_fault(table.homes, table.stages):
        says, virtual = wrong
        at = [(tick, stage) for task, tick, stage in table.tasks() if task.virtual == virtual]
        raise fault(table, *at[0], says) if at else ValueError(f"{table.name}: {says}")
    check_complete(table)
    check_order(table)
    return table


def homes_fault(homes: Homes, stages: int) -> tuple[str, int] | None:
    """Return what is wrong with a placement, and a virtual stage that shows it; None: nothing."""
    lie = [[g for g, (at, _) in enumerate(homes) if at == stage] for stage in range(stages)]
    chunks = list(range(len(homes) // stages))
    for stage, mine in enumerate(lie):
        if sorted(homes[g][1] for g in mine) != chunks:
            says = (
                f"{len(homes)} virtual stages on {stages} stages are {len(chunks)} for "
                f"each stage, found {len(mine)} on stage {stage}. Give every stage as many."
            )
            return says, (mine or [0])[-1]
    for g, ((here, _), (there, _)) in enumerate(pairwise(homes)):
        if (there - here) % stages not in (0, 1, stages - 1):
            says = (
                f"virtual stage {g} is on stage {here}, the next one on stage {there}: "
                "messages go between neighbours only (the last stage and stage 0 are "
                f"neighbours). Put {g + 1} on stage {here}, {(here + 1) % stages} or "
                f"{(here - 1) % stages}."
            )
            return says, g + 1
    return None


def check_complete(table: Table) -> None:
    """Refuse a table in which a task is missing, is there twice, or is not on its home."""
    seen: dict[Task, tuple[int, int]] = {}
    for task, tick, stage in table.tasks():
        if wrong := _misplaced(table, task, stage, seen):
            raise fault(table, tick, stage, f"{table.called(task)} {wrong}")
        seen[task] = (tick, stage)
    for task in _expected(table):
        if task not in seen:
            raise _missing(table, task, seen)


def _misplaced(table: Table, task: Task, stage: int, seen: dict[Task, tuple[int, int]]) -> str:
    """Return why a task cannot be where it is; nothing if it can."""
    if task.microbatch >= table.microbatches:
        return f"is of microbatch {task.microbatch}, of {table.microbatches}. Remove it."
    if (home := table.homes[task.virtual][0]) != stage:
        return f"is on stage {stage}, virtual stage {task.virtual} on {home}. Move it."
    if task in seen:
        return f"is here a second time, first in tick {seen[task][0]}. Remove one."
    return ""


def _expected(table: Table) -> Iterator[Task]:
    kinds = "F" + "B" * table.trains + "W" * table.split
    for m in range(table.microbatches):
        for kind in kinds:
            yield from (Task(kind, g, m) for g in range(table.virtual))


def _missing(table: Table, task: Task, seen: dict[Task, tuple[int, int]]) -> ValueError:
    """Return the refusal over a task that comes before or after the missing one, or over any."""
    waits = lambda other: any(need == task for need, _ in needs(other, table.virtual))
    before = [need for need, _ in needs(task, table.virtual) if need in seen]
    after = [other for other in seen if waits(other)]
    where = f", after {table.called(before[0])} (marked)" if before else ""
    if after and not before:
        where = f", before {table.called(after[0])} (marked)"
    says = (
        f"{table.called(task)} is missing. Add it to stage {table.homes[task.virtual][0]}{where}."
    )
    return fault(table, *seen[[*before, *after, *seen][0]], says)


def check_order(table: Table) -> None:
    """Refuse a task whose input is not there yet, and a tick in which nobody works."""
    times = table.times()
    for task, tick, stage in table.tasks():
        for need, wait in needs(task, table.virtual):
            if times[need] > tick - wait:
                says = (
                    f"{table.called(task)} in tick {tick} needs {table.called(need)}, which runs "
                    f"in tick {times[need]}. Move it to tick {times[need] + wait} or later."
                )
                raise fault(table, tick, stage, says)
    idle = np.flatnonzero((table.cells < 0).all(axis=(1, 2)))
    if len(idle):
        says = f"nobody works in tick {idle[0]}. Remove the tick."
        raise fault(table, int(idle[0]), 0, says)


def fault(table: Table, tick: int, stage: int, says: str) -> ValueError:
    """Return the error that says what is wrong over the part of the grid around, cell marked."""
    ticks = range(max(0, tick - 4), min(table.ticks, tick + 4))
    grid = [[""] + [str(t) for t in ticks]]
    for s in range(table.stages):
        cells = [table.text(t, s) for t in ticks]
        if s == stage:
            cells[ticks.index(tick)] = f">{cells[ticks.index(tick)]}<"
        grid.append([f"stage {s}", *cells])
    return ValueError("\n  ".join([f"{table.name}: {says}", *aligned(grid, others=str.center)]))


Cell = tuple[Task, ...]  # what a stage runs in one tick
Lane = Sequence[Cell]
Order = Sequence[tuple[int, int]]  # (virtual stage, microbatch)


def lane_of(kind: str, order: Order) -> Lane:
    """Return the lane that runs one kind of task, alone in its cells, in the order given."""
    return [(Task(kind, virtual, microbatch),) for virtual, microbatch in order]


def lay_out(
    name: str, homes: Homes, lanes: Sequence[Sequence[Lane]], *, branches: bool = False
) -> Table:
    """Return the table in which each stage runs its lanes side by side.

    `lanes` holds the lanes of each stage, the most urgent first. In each tick the next cell of
    every lane runs if its inputs are there and its slots are still free.

    >>> homes, one = ((0, 0), (1, 0)), lambda task: (task,)
    >>> first = [one(Task("F", 0, 0)), one(Task("B", 0, 0))]
    >>> print(lay_out("mine", homes, [[first], [[(Task("F", 1, 0), Task("B", 1, 0))]]]))
    0F0 .       0B0
    .   1F0+1B0 .
    """
    done: dict[Task, int] = {}
    queues = [[list(reversed(lane)) for lane in stage] for stage in lanes]
    rows: list[list[list[int]]] = []
    while any(lane for stage in queues for lane in stage):
        rows.append([_run(stage, len(rows), done, len(homes)) for stage in queues])
        if max(max(row) for row in rows[-1]) < 0:
            raise _deadlock(name, queues, len(rows) - 1, done, len(homes))
    microbatches = 1 + max(task.microbatch for task in done)
    chunks = len(homes) // len(lanes)
    cells = np.array(rows, np.int32)
    return Table(name, len(lanes), microbatches, chunks, tuple(homes), cells, branches)


def _run(lanes: list[list[Cell]], tick: int, done: dict[Task, int], virtual: int) -> list[int]:
    """Run in one tick what one stage can; return its row of slots."""
    row = [-1] * len(KINDS)
    for lane in lanes:
        if lane and _fits(lane[-1], row) and not _awaited(lane[-1], tick, done, virtual):
            for task in lane.pop():
                row[KINDS.index(task.kind)] = task.microbatch * virtual + task.virtual
                done[task] = tick
    return row


def _fits(cell: Cell, row: list[int]) -> bool:
    return all(row[KINDS.index(task.kind)] < 0 for task in cell)


def _awaited(cell: Cell, tick: int, done: dict[Task, int], virtual: int) -> list[Task]:
    """Return what the cell still waits for."""
    known = lambda task: done.get(task, tick if task in cell else math.inf)
    return [
        need for task in cell for need, wait in needs(task, virtual) if known(need) > tick - wait
    ]


class DeadlockError(ValueError):
    """No stage can run its next cell; `waits`: these cells, each with what it waits for."""

    def __init__(self, says: str, waits: Sequence[tuple[Cell, list[Task]]]) -> None:
        super().__init__(says)
        self.waits = waits


def _deadlock(name: str, queues, tick: int, done: dict[Task, int], virtual: int) -> DeadlockError:
    nexts = [lane[-1] for lanes in queues for lane in lanes if lane]
    waits = [(cell, _awaited(cell, tick, done, virtual)) for cell in nexts]
    word = lambda tasks, join: join.join(map(str, tasks))
    lines = (f"{word(cell, '+')} waits for {word(tasks, ' and ')}" for cell, tasks in waits)
    return DeadlockError(f"{name}: deadlock in tick {tick}: {'; '.join(lines)}.", waits)


def with_weights(table: Table) -> Table:
    """Return the table with a weights slot, in as few ticks as there are backwards on a stage.

    The weights of the k-th backward of all stages share one tick: the first in which all of them
    can run. From the first tick on in which none can, they run as late as the last ones, in one
    piece: a drain of ticks with and without weights in turn would be compiled tick by tick. If
    all weights can run with their backward, nothing is to be split.
    """
    columns = table.cells[:, :, 1].T
    ready = np.max([np.flatnonzero(column >= 0) for column in columns], axis=0)
    number = np.arange(len(ready))
    ticks = np.maximum.accumulate(ready - number) + number
    late = ticks > ticks[0] + number
    ticks[late] = (ticks[-1] - number[-1] + number)[late]
    cells = np.full((max(table.ticks, ticks[-1] + 1), table.stages, len(KINDS)), -1, np.int32)
    cells[: table.ticks] = table.cells
    cells[ticks, :, 2] = np.stack([column[column >= 0] for column in columns], axis=1)
    apart = (cells[:, :, 2] != cells[:, :, 1]).any()
    return replace(table, cells=cells if apart else table.cells)
