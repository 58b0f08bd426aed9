"""Schedules as text: a line per stage, in the notation of torch.distributed.pipelining.

    0F0 0F1 .       0B0     0B1
    .   1F0 1F1+1B0 1B1     .

A cell is tasks joined by `+`: virtual stage, kind, microbatch. F is a forward, B a full backward,
I a backward with respect to the input only, W the weights' part of it. Cells are separated by
blanks, or by commas (CSV); `.` or nothing is idle. Empty lines and lines that begin with # are
skipped.

If the cells can run as ticks just as they stand, they are the ticks. Otherwise only the order of
each line counts: idle marks are ignored, and every cell runs in the earliest tick that it can.
Errors show the lines around the mistake, with the cell marked.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hfjax.parallel.schedules.check_table import check_order, stage_map_fault
from hfjax.parallel.schedules.cost import cost
from hfjax.parallel.schedules.lay_out import Cell, DeadlockError, lay_out
from hfjax.parallel.schedules.table import KINDS, StageMap, Table, Task, dependencies
from hfjax.utils.tables import align

_TASK = re.compile(r"([0-9]{1,5})([FBIW])([0-9]{1,5})")  # \d would be any script's digits
MARGIN = 4  # cells shown on each side of a marked one, and lines where there are many
MAX_TEXT = 24  # characters of a cell that are shown
NO_NOTES: Mapping[int, str] = {}


class CellPosition(NamedTuple):
    """Where a cell is written."""

    line: int
    cell: int

    def __str__(self) -> str:
        return f"cell {self.cell + 1} of stage {self.line}"


@dataclass(frozen=True)
class TextTable:
    """A table as text, a line per stage; tasks have the kind that is written: F, B, I or W."""

    name: str
    cell_texts: Sequence[Sequence[str]]

    @cached_property
    def cells(self) -> list[list[tuple[Task, ...]]]:
        """The tasks of each cell."""
        return [
            [self._parse_cell(CellPosition(s, i), text) for i, text in enumerate(line)]
            for s, line in enumerate(self.cell_texts)
        ]

    @cached_property
    def splits_backward(self) -> bool:
        """Whether the weights' part of a backward pass is a task of its own."""
        return any(task.kind in "IW" for task, _ in self.tasks())

    def tasks(self) -> Iterator[tuple[Task, CellPosition]]:
        """Yield every task and where it is, line by line."""
        for s, line in enumerate(self.cells):
            for i, cell in enumerate(line):
                yield from ((task, CellPosition(s, i)) for task in cell)

    def slots(self, task: Task) -> tuple[Task, ...]:
        """Return a task as the slots that it takes: a full B of a split table takes two."""
        kinds = {"I": "B", "B": "BW" if self.splits_backward else "B"}.get(task.kind, task.kind)
        return tuple(task._replace(kind=kind) for kind in kinds)

    @cached_property
    def written_task_by_slot(self) -> dict[Task, tuple[Task, CellPosition]]:
        """Slot -> the first task that takes it, as it is written, and where."""
        written_task_by_slot: dict[Task, tuple[Task, CellPosition]] = {}
        for task, position in self.tasks():
            for slot in self.slots(task):
                written_task_by_slot.setdefault(slot, (task, position))
        return written_task_by_slot

    @cached_property
    def virtual(self) -> int:
        """The number of virtual stages."""
        return 1 + max(task.virtual for task, _ in self.tasks())

    def stage_map(self) -> StageMap:
        """Return the stage and chunk of each virtual stage: chunks count up in model order."""
        lines = [self._first_task(g)[1].line for g in range(self.virtual)]
        return tuple((line, lines[:g].count(line)) for g, line in enumerate(lines))

    def _parse_cell(self, position: CellPosition, text: str) -> tuple[Task, ...]:
        task_texts = text.split("+") if text.strip(". ") else []
        matches = [_TASK.fullmatch(task_text.strip()) for task_text in task_texts]
        tasks = tuple(Task(m[2], int(m[1]), int(m[3])) for m in matches if m)
        if len(tasks) < len(task_texts):
            escaped = "" if text.isascii() else f" ({text[:MAX_TEXT]!a})"
            raise self.error_at(
                f">{_shorten(text)}<{escaped} is no cell. Write tasks joined by +, each a virtual "
                "stage, one of F, B (backward), I (backward, input only), W (weights) and a "
                "microbatch, in digits 0 to 9: 2B0; or . for idle.",
                position,
            )
        return tasks

    def error_at(
        self, message: str, *marks: CellPosition, notes: Mapping[int, str] = NO_NOTES
    ) -> ValueError:
        """Return the error with its message above the cells around the marked ones."""
        lines = self._visible_lines(marks)
        texts = align([self._row_excerpt(s, marks) for s in lines], justify=str.center)
        grid = (f"{text}{notes.get(s, '')}" for s, text in zip(lines, texts, strict=True))
        return ValueError("\n  ".join([f"{self.name}: {message}", *grid]))

    def _visible_lines(self, marks: Sequence[CellPosition]) -> list[int]:
        """Return which lines are shown: all, or those near the marked ones if there are many."""
        has_few = len(self.cell_texts) <= 4 * MARGIN
        near = lambda s: any(abs(s - position.line) <= MARGIN for position in marks)
        return [s for s in range(len(self.cell_texts)) if has_few or near(s)]

    def _row_excerpt(self, s: int, marks: Sequence[CellPosition]) -> list[str]:
        """Return the cells of a line around all marks, or around its own if marks are far apart.

        All lines show equally many cells, also those whose mark is near the beginning.
        """
        cells = [position.cell for position in marks]
        own_cells = [position.cell for position in marks if position.line == s]
        is_far = max(cells) - min(cells) > 2 * MARGIN
        shown_cells = (own_cells or cells)[:1] if is_far else cells
        first = max(0, min(shown_cells) - MARGIN)
        end = first + 2 * MARGIN + 1 if is_far else max(shown_cells) + MARGIN + 1
        texts = [_shorten(text.strip(" .")) or "." for text in self.cell_texts[s]]
        texts = [f">{text}<" if i in own_cells else text for i, text in enumerate(texts)]
        padding = [""] * (max(map(len, self.cell_texts)) - len(texts))
        texts = [*texts, *padding][first:end]
        label = f"stage {s}" + ("  …" if first else "   " * is_far)
        ellipsis = "…" if len(self.cell_texts[s]) > end else ""
        return [label, *texts, *[""] * (end - first - len(texts)), ellipsis]

    # -- what is wrong ------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a table that does not have every task once, each virtual stage on one line."""
        self._check_cells()
        self._check_duplicates()
        self._check_backward_halves()
        self._check_lines()
        self._check_homes()
        self._check_microbatches()
        self._check_missing()

    def _check_cells(self) -> None:
        if not any(True for _ in self.tasks()):
            message = "no task found. Write a line per stage, e.g. 0F0 0F1 0B0 0B1."
            raise ValueError(f"{self.name}: {message}")
        for s, line in enumerate(self.cells):
            if not any(line):
                message = f"stage {s} has no task. Write its tasks, or leave its line out."
                raise self.error_at(message, CellPosition(s, 0))
            for i, cell in enumerate(line):
                slot_counts = Counter(slot.kind for task in cell for slot in self.slots(task))
                if duplicates := [kind for kind in KINDS if slot_counts[kind] > 1]:
                    raise self.error_at(
                        f">{'+'.join(map(str, cell))}< has two tasks for the {duplicates[0]} slot, "
                        "a stage has one slot of each kind in a tick. Write them as two cells.",
                        CellPosition(s, i),
                    )

    def _check_duplicates(self) -> None:
        for task, position in self.tasks():
            for first, first_position in map(
                self.written_task_by_slot.__getitem__, self.slots(task)
            ):
                if (first, first_position) != (task, position):
                    message = (
                        f"{task} is here a second time, first as {first} in {first_position}. "
                        "Remove one."
                    )
                    raise self.error_at(message, position)

    def _check_backward_halves(self) -> None:
        """Refuse a backward with respect to the input without its weights part, and the reverse."""
        for task, position in self.tasks():
            other = task._replace(kind={"I": "W", "W": "I"}.get(task.kind, task.kind))
            if task.kind in "IW" and self.slots(other)[0] not in self.written_task_by_slot:
                raise self.error_at(
                    f">{task}< is without {other}. Add that, or write {task._replace(kind='B')} "
                    "for the whole backward.",
                    position,
                )

    def _check_lines(self) -> None:
        """Refuse a task on another line than most tasks of its virtual stage."""
        count = Counter((task.virtual, position.line) for task, position in self.tasks())
        line_counts = Counter(position.line for _, position in self.tasks())
        stage_map: dict[int, int] = {}  # of two lines with equally many, the one with fewer others
        for g, line in sorted(count, key=lambda key: (count[key], -line_counts[key[1]], -key[1])):
            stage_map[g] = line
        for task, position in self.tasks():
            if position.line != stage_map[task.virtual]:
                raise self.error_at(
                    f"{task} is on the line of stage {position.line}, other tasks of virtual stage "
                    f"{task.virtual} are on that of stage {stage_map[task.virtual]}. Write all "
                    "tasks of one on the same line.",
                    position,
                )

    def _check_homes(self) -> None:
        virtual_stages = {task.virtual for task, _ in self.tasks()}
        for g in range(self.virtual):
            if g not in virtual_stages:
                task, position = self._first_task(min(h for h in virtual_stages if h > g))
                raise self.error_at(
                    f"virtual stage {g} has no task, and there is {task} (marked). Virtual stages "
                    f"are numbered from 0 in model order: add the tasks of {g}, or number this one "
                    "anew.",
                    position,
                )
        if problem := stage_map_fault(self.stage_map(), len(self.cell_texts)):
            message, g = problem
            raise self.error_at(message, self._first_task(g)[1])

    def _first_task(self, virtual: int) -> tuple[Task, CellPosition]:
        return next(entry for entry in self.tasks() if entry[0].virtual == virtual)

    @cached_property
    def _tasks_by_microbatch(self) -> dict[int, list[Task]]:
        """The F and B tasks of each microbatch."""
        tasks: dict[int, list[Task]] = {}
        for slot in self.written_task_by_slot:
            if slot.kind != "W":
                tasks.setdefault(slot.microbatch, []).append(slot)
        return tasks

    @cached_property
    def _kinds(self) -> str:
        return "FB" if any(slot.kind == "B" for slot in self.written_task_by_slot) else "F"

    def _missing_tasks(self, m: int) -> list[Task]:
        """Return the tasks that a microbatch lacks, in order."""
        every = (Task(kind, g, m) for kind in self._kinds for g in range(self.virtual))
        return [task for task in every if task not in self.written_task_by_slot]

    def _check_microbatches(self) -> None:
        """Refuse a gap between microbatches, and a last one of which most is missing."""
        last = max(self._tasks_by_microbatch)
        for m in range(last):
            if m not in self._tasks_by_microbatch:
                n = min(n for n in self._tasks_by_microbatch if n > m)
                task, position = self.written_task_by_slot[self._tasks_by_microbatch[n][0]]
                raise self.error_at(
                    f"microbatch {m} has no task, and there is {task} (marked). Microbatches are "
                    f"numbered from 0: add the tasks of {m}, number this one anew, or remove it.",
                    position,
                )
        missing_tasks, present_tasks = self._missing_tasks(last), self._tasks_by_microbatch[last]
        if last and len(present_tasks) <= len(missing_tasks):
            task, position = self.written_task_by_slot[present_tasks[0]]
            examples = ", ".join(map(str, missing_tasks[:3])) + (
                " …" if len(missing_tasks) > 3 else ""
            )
            raise self.error_at(
                f"{task} is of microbatch {last}, which lacks {examples}. Remove it, or add those.",
                position,
            )

    def _check_missing(self) -> None:
        for m in sorted(self._tasks_by_microbatch):
            for task in self._missing_tasks(m):
                line = self.stage_map()[task.virtual][0]
                direction, (neighbour, position) = self._find_neighbour(task, line)
                message = (
                    f"{task} is missing. Add it to stage {line}, {direction} {neighbour} (marked)."
                )
                raise self.error_at(message, position)

    def _find_neighbour(self, task: Task, line: int) -> tuple[str, tuple[Task, CellPosition]]:
        """Return a task that a missing one comes after, or before, preferably on its line."""
        for need, _ in dependencies(task, self.virtual):
            if need in self.written_task_by_slot:
                return "after", self.written_task_by_slot[need]
        waits_for_task = lambda other: any(
            need == task for need, _ in dependencies(other, self.virtual)
        )
        candidates = [
            self.written_task_by_slot[other]
            for other in self._tasks_by_microbatch[task.microbatch]
            if waits_for_task(other)
        ]
        candidates = candidates or [
            self.written_task_by_slot[self._tasks_by_microbatch[task.microbatch][0]]
        ]
        return "before", min(candidates, key=lambda candidates: candidates[1].line != line)

    def deadlock_error(self, waits: Sequence[tuple[Sequence[Task], Sequence[Task]]]) -> ValueError:
        """Return the error of a deadlock: the cells that come next, and what each waits for."""
        marks = [self.written_task_by_slot[cell[0]][1] for cell, _ in waits]
        task_names = lambda slots: " and ".join(
            dict.fromkeys(str(self.written_task_by_slot[s][0]) for s in slots)
        )
        notes = {
            position.line: f"   waits for {task_names(awaited_tasks)}"
            for position, (_, awaited_tasks) in zip(marks, waits, strict=True)
        }
        return self.error_at(
            "deadlock, no stage can run its next cell (marked). Reorder a line so that what is "
            "waited for comes first:",
            *marks,
            notes=notes,
        )


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def parse_table(text: str, name: str = "own", branches: bool | None = None) -> Table:
    """Return the table that a text describes.

    `branches=None`: with branches only if they make it faster, for a backward that takes as long as
    two forwards. They do not if cells pair a forward and a backward, as combined ticks do.

    >>> print(parse_table("0F0 0B0\\n1F0+1B0"))
    0F0 .       0B0
    .   1F0+1B0 .
    """
    text_table = TextTable(name, _split_cells(text))
    text_table.check()
    table = _to_table(text_table)
    table_with_branches = replace(table, branches=True)
    if branches is None:
        branches = cost(table_with_branches) < cost(table) * (1 - 1e-6)
    return table_with_branches if branches else table


def _split_cells(text: str) -> list[list[str]]:
    stripped_lines = (line.strip() for line in text.splitlines())
    lines = [line for line in stripped_lines if line and not line.startswith("#")]
    comma = any("," in line for line in lines)
    return [re.split(r"\s*,\s*", line) if comma else line.split() for line in lines]


def _to_table(text_table: TextTable) -> Table:
    """Return the table with cells as ticks if they can run as written, else in their order."""
    stage_map = text_table.stage_map()
    cell_slots = lambda cell: tuple(slot for task in cell for slot in text_table.slots(task))
    lines = [[cell_slots(cell) for cell in line] for line in text_table.cells]
    table = _table_as_written(text_table.name, lines, stage_map)
    try:
        check_order(table)
    except ValueError:
        try:
            return lay_out(text_table.name, stage_map, [[[c for c in line if c]] for line in lines])
        except DeadlockError as deadlock:
            raise text_table.deadlock_error(deadlock.waits) from None
    return table


def _table_as_written(name: str, lines: list[list[Cell]], stage_map: StageMap) -> Table:
    """Return the table with the i-th cell of every line in tick i, idle ticks left out."""
    cells = np.full((max(map(len, lines)), len(lines), len(KINDS)), -1, np.int32)
    for stage, line in enumerate(lines):
        for tick, cell in enumerate(line):
            for kind, virtual, microbatch in cell:
                cells[tick, stage, KINDS.index(kind)] = microbatch * len(stage_map) + virtual
    cells = cells[(cells >= 0).any(axis=(1, 2))]
    microbatches = 1 + int(cells.max()) // len(stage_map)
    return Table(name, len(lines), microbatches, len(stage_map) // len(lines), stage_map, cells)
