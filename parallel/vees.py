"""Schedules on a V: the model goes down the stages and up again, two chunks on each stage.

Stage 0 holds the first and the last chunk, so the loss is known where the model begins.
"""

from collections import Counter

from hfjax.parallel.lanes import Cell, Lane, lane_of, lay_out, with_weights
from hfjax.parallel.schedule import Homes, Table, Task


def vee(stages: int) -> Homes:
    """Return the placement that goes down the stages and up again: two chunks on each.

    >>> vee(2)
    ((0, 0), (1, 0), (1, 1), (0, 1))
    """
    return (*((s, 0) for s in range(stages)), *((s, 1) for s in reversed(range(stages))))


def v_combined(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """1f1b on a V: about half its memory, no branches."""
    last = 2 * stages - 1
    lanes = []
    for mine in ((stage, last - stage) for stage in range(stages)):
        order = [(g, m) for g in mine for m in range(microbatches)]
        forward = sorted(order, key=lambda task: 2 * task[1] + task[0])
        backward = sorted(order, key=lambda task: 2 * task[1] - task[0])
        lanes.append([lane_of("F", forward), lane_of("B", backward)])
    return lay_out("v", vee(stages), lanes)


def v_zero_bubble(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """v with a weights slot in every tick."""
    return with_weights(v_combined(stages, microbatches), "v-zb")


class _Line:
    """The cells of one stage as they are written down, step by step."""

    def __init__(self, stage: int, stages: int):
        self.homes = (stage, 2 * stages - 1 - stage)  # the virtual stages of chunk 0 and chunk 1
        self.count: Counter[tuple[str, int]] = Counter()
        self.late: list[int] = []  # chunks whose weights wait, the oldest first
        self.cells: list[Cell] = []

    def run(self, *works: str) -> None:
        """Add one cell, e.g. `run("F0", "B1")`; I is a B whose weights wait, W the oldest."""
        self.cells.append(tuple(task for work in works for task in self._tasks(work)))

    def _tasks(self, work: str) -> list[Task]:
        if work == "W":
            return [self._next("W", self.late.pop(0))]
        kind, chunk = work[0], int(work[1])
        if kind == "B":
            return [self._next("B", chunk), self._next("W", chunk)]
        if kind == "I":
            self.late.append(chunk)
        return [self._next({"I": "B"}.get(kind, kind), chunk)]

    def _next(self, kind: str, chunk: int) -> Task:
        self.count[kind, chunk] += 1
        return Task(kind, self.homes[chunk], self.count[kind, chunk] - 1)

    def first(self, microbatches: int) -> Lane:
        """Return the weights that wait at the end, and no task of later microbatches."""
        while self.late:
            self.run("W")
        kept = (tuple(t for t in cell if t.microbatch < microbatches) for cell in self.cells)
        return [cell for cell in kept if cell]


def zb_v(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """Zero bubble on a V; what W needs of B is kept besides (Qi et al. 2024)."""
    lanes = [[_zb_v(stage, stages, microbatches)] for stage in range(stages)]
    return lay_out("zb-v", vee(stages), lanes, branches=True)


def _zb_v(stage: int, stages: int, microbatches: int) -> Lane:
    written = max(microbatches, 2 * stages - 1)  # fewer do not fill the V: write them, drop them
    line, below = _Line(stage, stages), stages - 1 - stage
    for _ in range(2 * below + 1):
        line.run("F0")
    for _ in range(stage):
        line.run("F1")
        line.run("F0")
    for _ in range(below + 1):
        for work in ("F1", "I1", "W"):
            line.run(work)
    for step in range(written - stages):
        forward = ("F0",) if step < written - 2 * below - 1 - stage else ()
        for work in (*forward, "I0", "W", "F1", "I1", "W"):
            line.run(work)
    for _ in range(stage):
        line.run("I0")
        line.run("I1")
    for _ in range(below + 1):
        line.run("I0")
        line.run("W")
    return line.first(microbatches)


def dualpipe_v(stages: int, microbatches: int, chunks: int = 2) -> Table:
    """Forward and backward of two microbatches in one tick (DeepSeek's DualPipeV)."""
    lanes = [[_dualpipe_v(stage, stages, microbatches)] for stage in range(stages)]
    return lay_out("dualpipe-v", vee(stages), lanes, branches=True)


def _dualpipe_v(stage: int, stages: int, microbatches: int) -> Lane:
    """Return the eight steps of dualpipev.py; under two microbatches a stage the first of those."""
    written = max(microbatches, 2 * stages)
    line, below = _Line(stage, stages), stages - 1 - stage
    _fill(line, stage, below)
    for step in range(written - 2 * stages + stage + 1):  # 4, the main one: overlapped pairs
        apart = step == 0 and below == 0
        for cell in (("F0",), ("B1",)) if apart else (("F0", "B1"),):
            line.run(*cell)
        line.run("F1", "B0")
    for _ in range(below):  # 5
        line.run("B1")
        line.run("F1", "B0")
    _drain(line, stage, below)
    return line.first(microbatches)


def _fill(line: _Line, stage: int, below: int) -> None:
    for _ in range(2 * below):  # 1
        line.run("F0")
    for _ in range(stage + 1):  # 2
        line.run("F0")
        line.run("F1")
    for _ in range(below):  # 3
        for work in ("I1", "W", "F1"):
            line.run(work)


def _drain(line: _Line, stage: int, below: int) -> None:
    for step in range(stage + 1):  # 6: from the middle on, weights wait
        half = (stage + 1) // 2
        line.run("I1" if step > half or (step == half and stage % 2) else "B1")
        line.run("I0" if step >= half else "B0")
    for _ in range(below):  # 7; step 8, the weights left, is what `first` adds
        line.run("W")
        line.run("I0")
