"""A schedule is a table: which stage works on which microbatch, tick by tick.

Within a tick a stage receives what its neighbours sent in the last tick, then runs its forward slot
F (after the last virtual stage also the head and the loss, which give the gradient that B starts
from), its backward slot B and its weights slot W. A stage has one slot of each kind, so it sends at
most one message of each kind per tick.

`lay_out` turns orders into ticks: every stage runs its lanes of cells in order, each cell as early
as it can.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from hfjax.utils.tables import align

KINDS = "FBW"  # forward; backward with respect to the input, or all of it; weights
StageMap = tuple[tuple[int, int], ...]


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
    chunks: int  # chunks of the model on each stage
    stage_map: StageMap  # virtual stage, in model order -> (stage, chunk)
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
    def splits_backward(self) -> bool:
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

    def task_name(self, task: Task) -> str:
        """Return a task as the grid names it: a B whose W is in another cell is an I."""
        for other, tick, stage in self.tasks() if self.splits_backward and task.kind == "B" else ():
            _, backward, weights = self.cells[tick, stage].tolist()
            if other == task and backward != weights:
                return str(task._replace(kind="I"))
        return str(task)

    def cell_text(self, tick: int, stage: int) -> str:
        """Return one cell in the notation of torch.distributed.pipelining: `1F3+1B0`, or `.`."""
        forward, backward, weights = self.cells[tick, stage].tolist()
        is_full = backward >= 0 and (backward == weights or not self.splits_backward)
        kinds = (("F", forward), ("B" if is_full else "I", backward))
        kinds = (*kinds, ("W", -1 if is_full and backward == weights else weights))
        tasks = (f"{x % self.virtual}{kind}{x // self.virtual}" for kind, x in kinds if x >= 0)
        return "+".join(tasks) or "."

    def __str__(self) -> str:
        grid = [[self.cell_text(t, s) for t in range(self.ticks)] for s in range(self.stages)]
        return "\n".join(align(grid, gap=" "))


def dependencies(task: Task, virtual: int) -> list[tuple[Task, int]]:
    """Return the tasks that one waits for, each with the ticks that must lie between: 1 or 0.

    >>> [(str(task), wait) for task, wait in dependencies(Task("B", 1, 0), virtual=4)]
    [('1F0', 0), ('2B0', 1)]
    """
    kind, g, m = task
    if kind == "F":
        return [(Task("F", g - 1, m), 1)] if g else []
    if kind == "W":
        return [(Task("B", g, m), 0)]
    is_last = g == virtual - 1
    return [(Task("F", g, m), 0)] + ([] if is_last else [(Task("B", g + 1, m), 1)])


def check_table(table: Table) -> Table:
    """Return the table; raise ValueError, with the faulty cell marked, if it cannot run.

    Every task must be there once, on its own stage, with messages between neighbours only and every
    input in time. `hfjax.parallel.schedules.compile` ensures that no message and no stored value is
    overwritten.
    """
    if problem := stage_map_fault(table.stage_map, table.stages):
        message, virtual = problem
        cells = [(tick, stage) for task, tick, stage in table.tasks() if task.virtual == virtual]
        raise (
            table_error(table, *cells[0], message)
            if cells
            else ValueError(f"{table.name}: {message}")
        )
    check_complete(table)
    check_order(table)
    return table


def stage_map_fault(stage_map: StageMap, stages: int) -> tuple[str, int] | None:
    """Return what is wrong with a stage map, and a virtual stage that shows it; None: nothing."""
    virtual_of_stage = [
        [g for g, (home, _) in enumerate(stage_map) if home == stage] for stage in range(stages)
    ]
    chunks = list(range(len(stage_map) // stages))
    for stage, virtuals in enumerate(virtual_of_stage):
        if sorted(stage_map[g][1] for g in virtuals) != chunks:
            message = (
                f"{len(stage_map)} virtual stages on {stages} stages are {len(chunks)} for "
                f"each stage, found {len(virtuals)} on stage {stage}. Give every stage as many."
            )
            return message, (virtuals or [0])[-1]
    for g, ((source, _), (target, _)) in enumerate(pairwise(stage_map)):
        if (target - source) % stages not in (0, 1, stages - 1):
            message = (
                f"virtual stage {g} is on stage {source}, the next one on stage {target}: "
                "messages go between neighbours only (the last stage and stage 0 are "
                f"neighbours). Put {g + 1} on stage {source}, {(source + 1) % stages} or "
                f"{(source - 1) % stages}."
            )
            return message, g + 1
    return None


def check_complete(table: Table) -> None:
    """Refuse a table in which a task is missing, is there twice, or is on the wrong stage."""
    positions: dict[Task, tuple[int, int]] = {}
    for task, tick, stage in table.tasks():
        if problem := _placement_fault(table, task, stage, positions):
            raise table_error(table, tick, stage, f"{table.task_name(task)} {problem}")
        positions[task] = (tick, stage)
    for task in _expected_tasks(table):
        if task not in positions:
            raise _missing_error(table, task, positions)


def _placement_fault(
    table: Table, task: Task, stage: int, seen_positions: dict[Task, tuple[int, int]]
) -> str:
    """Return why a task cannot be where it is; nothing if it can."""
    if task.microbatch >= table.microbatches:
        return f"is of microbatch {task.microbatch}, of {table.microbatches}. Remove it."
    if (home := table.stage_map[task.virtual][0]) != stage:
        return f"is on stage {stage}, virtual stage {task.virtual} on {home}. Move it."
    if task in seen_positions:
        return f"is here a second time, first in tick {seen_positions[task][0]}. Remove one."
    return ""


def _expected_tasks(table: Table) -> Iterator[Task]:
    kinds = "F" + "B" * table.trains + "W" * table.splits_backward
    for m in range(table.microbatches):
        for kind in kinds:
            yield from (Task(kind, g, m) for g in range(table.virtual))


def _missing_error(table: Table, task: Task, positions: dict[Task, tuple[int, int]]) -> ValueError:
    """Return the error, marking a task that comes before or after the missing one, or any."""
    waits_for_task = lambda other: any(
        need == task for need, _ in dependencies(other, table.virtual)
    )
    before = [need for need, _ in dependencies(task, table.virtual) if need in positions]
    after = [other for other in positions if waits_for_task(other)]
    hint = f", after {table.task_name(before[0])} (marked)" if before else ""
    if after and not before:
        hint = f", before {table.task_name(after[0])} (marked)"
    message = (
        f"{table.task_name(task)} is missing. Add it to stage "
        f"{table.stage_map[task.virtual][0]}{hint}."
    )
    return table_error(table, *positions[[*before, *after, *positions][0]], message)


def check_order(table: Table) -> None:
    """Refuse a task whose input is not there yet, and a tick in which no stage works."""
    times = table.times()
    for task, tick, stage in table.tasks():
        for need, wait in dependencies(task, table.virtual):
            if times[need] > tick - wait:
                message = (
                    f"{table.task_name(task)} in tick {tick} needs {table.task_name(need)}, which "
                    f"runs in tick {times[need]}. Move it to tick {times[need] + wait} or later."
                )
                raise table_error(table, tick, stage, message)
    idle_ticks = np.flatnonzero((table.cells < 0).all(axis=(1, 2)))
    if len(idle_ticks):
        message = f"nobody works in tick {idle_ticks[0]}. Remove the tick."
        raise table_error(table, int(idle_ticks[0]), 0, message)


def table_error(table: Table, tick: int, stage: int, message: str) -> ValueError:
    """Return the error with its message above the part of the grid around the marked cell."""
    ticks = range(max(0, tick - 4), min(table.ticks, tick + 4))
    grid = [[""] + [str(t) for t in ticks]]
    for s in range(table.stages):
        cells = [table.cell_text(t, s) for t in ticks]
        if s == stage:
            cells[ticks.index(tick)] = f">{cells[ticks.index(tick)]}<"
        grid.append([f"stage {s}", *cells])
    return ValueError("\n  ".join([f"{table.name}: {message}", *align(grid, justify=str.center)]))


Cell = tuple[Task, ...]  # what a stage runs in one tick
Lane = Sequence[Cell]
Order = Sequence[tuple[int, int]]  # (virtual stage, microbatch)


def make_lane(kind: str, order: Order) -> Lane:
    """Return the lane that runs one kind of task, alone in its cells, in the order given."""
    return [(Task(kind, virtual, microbatch),) for virtual, microbatch in order]


def lay_out(
    name: str, stage_map: StageMap, lanes: Sequence[Sequence[Lane]], *, branches: bool = False
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
    ticks: list[list[list[int]]] = []
    while any(lane for stage in queues for lane in stage):
        ticks.append([_run_tick(stage, len(ticks), done, len(stage_map)) for stage in queues])
        if max(max(slots) for slots in ticks[-1]) < 0:
            raise _deadlock_error(name, queues, len(ticks) - 1, done, len(stage_map))
    microbatches = 1 + max(task.microbatch for task in done)
    chunks = len(stage_map) // len(lanes)
    cells = np.array(ticks, np.int32)
    return Table(name, len(lanes), microbatches, chunks, tuple(stage_map), cells, branches)


def _run_tick(lanes: list[list[Cell]], tick: int, done: dict[Task, int], virtual: int) -> list[int]:
    """Run the tasks that one stage can run in a tick; return its slots."""
    slots = [-1] * len(KINDS)
    for lane in lanes:
        if (
            lane
            and _has_free_slots(lane[-1], slots)
            and not _awaited_tasks(lane[-1], tick, done, virtual)
        ):
            for task in lane.pop():
                slots[KINDS.index(task.kind)] = task.microbatch * virtual + task.virtual
                done[task] = tick
    return slots


def _has_free_slots(cell: Cell, slots: list[int]) -> bool:
    return all(slots[KINDS.index(task.kind)] < 0 for task in cell)


def _awaited_tasks(cell: Cell, tick: int, done: dict[Task, int], virtual: int) -> list[Task]:
    """Return what the cell still waits for."""
    tick_of = lambda task: done.get(task, tick if task in cell else math.inf)
    return [
        need
        for task in cell
        for need, wait in dependencies(task, virtual)
        if tick_of(need) > tick - wait
    ]


class DeadlockError(ValueError):
    """No stage can run its next cell; `waits`: these cells, each with what it waits for."""

    def __init__(self, message: str, waits: Sequence[tuple[Cell, list[Task]]]) -> None:
        super().__init__(message)
        self.waits = waits


def _deadlock_error(
    name: str, queues, tick: int, done: dict[Task, int], virtual: int
) -> DeadlockError:
    nexts = [lane[-1] for lanes in queues for lane in lanes if lane]
    waits = [(cell, _awaited_tasks(cell, tick, done, virtual)) for cell in nexts]
    join_tasks = lambda tasks, join: join.join(map(str, tasks))
    lines = (
        f"{join_tasks(cell, '+')} waits for {join_tasks(tasks, ' and ')}" for cell, tasks in waits
    )
    return DeadlockError(f"{name}: deadlock in tick {tick}: {'; '.join(lines)}.", waits)


def add_weight_slots(table: Table) -> Table:
    """Return the table with a weights slot, in as few ticks as there are backwards on a stage.

    The weights of the k-th backward of all stages share one tick: the first in which all of them
    can run. From the first tick on in which none can, they run as late as the last ones, without
    gaps: a drain that alternates ticks with and without weights would be compiled tick by tick. If
    all weights can run with their backward, nothing is split.
    """
    columns = table.cells[:, :, 1].T
    ready = np.max([np.flatnonzero(column >= 0) for column in columns], axis=0)
    indices = np.arange(len(ready))
    ticks = np.maximum.accumulate(ready - indices) + indices
    is_late = ticks > ticks[0] + indices
    ticks[is_late] = (ticks[-1] - indices[-1] + indices)[is_late]
    cells = np.full((max(table.ticks, ticks[-1] + 1), table.stages, len(KINDS)), -1, np.int32)
    cells[: table.ticks] = table.cells
    cells[ticks, :, 2] = np.stack([column[column >= 0] for column in columns], axis=1)
    differs = (cells[:, :, 2] != cells[:, :, 1]).any()
    return replace(table, cells=cells if differs else table.cells)
