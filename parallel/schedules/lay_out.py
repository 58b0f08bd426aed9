"""Turns orders into ticks: `lay_out`.

Every stage runs its lanes of cells in order, each cell as early as it can.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hfjax.parallel.schedules.table import KINDS, StageMap, Table, Task, dependencies

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
