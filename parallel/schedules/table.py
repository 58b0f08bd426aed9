"""A schedule is a table: which stage works on which microbatch, tick by tick.

Within a tick a stage receives what its neighbours sent in the last tick, then runs its forward slot
F (after the last virtual stage also the head and the loss, which give the gradient that B starts
from), its backward slot B and its weights slot W. A stage has one slot of each kind, so it sends at
most one message of each kind per tick.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
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


@dataclass(frozen=True, eq=False)
class Versions:
    """Slots of a ring buffer of weights: `columns[name][tick, stage]`.

    F_version is the version that a forward uses, B_version the one of the same microbatch's
    backward; both -1 where idle. L_version is the latest at the start of the tick, never -1: what
    an update changes. U_version is where the updated weights go, after the B slot; -1: no update.
    """

    columns: dict[str, np.ndarray]  # int32 [ticks, stages]
    slots: int  # versions that a stage keeps at most
    final: tuple[int, ...]  # the slot of the latest version of each stage, at the end
    staleness: tuple[int, ...]  # updates of each stage between a forward and its update, at most


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
