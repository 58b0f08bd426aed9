"""From orders to ticks: every stage runs its lists of cells in order, each as early as it can."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from hfjax.parallel.schedule import KINDS, Homes, Table, Task, needs

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

    def __init__(self, says: str, waits: Sequence[tuple[Cell, list[Task]]]):
        super().__init__(says)
        self.waits = waits


def _deadlock(name: str, queues, tick: int, done: dict[Task, int], virtual: int) -> DeadlockError:
    nexts = [lane[-1] for lanes in queues for lane in lanes if lane]
    waits = [(cell, _awaited(cell, tick, done, virtual)) for cell in nexts]
    word = lambda tasks, join: join.join(map(str, tasks))
    lines = (f"{word(cell, '+')} waits for {word(tasks, ' and ')}" for cell, tasks in waits)
    return DeadlockError(f"{name}: deadlock in tick {tick}: {'; '.join(lines)}.", waits)


def with_weights(table: Table, name: str) -> Table:
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
    return replace(table, name=name, cells=cells if apart else table.cells)
