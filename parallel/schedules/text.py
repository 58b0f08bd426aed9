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

from hfjax.parallel.schedules.cost import cost
from hfjax.parallel.schedules.table import (
    KINDS,
    Cell,
    DeadlockError,
    Homes,
    Table,
    Task,
    check_order,
    homes_fault,
    lay_out,
    needs,
)
from hfjax.utils.tables import aligned

_TASK = re.compile(r"([0-9]{1,5})([FBIW])([0-9]{1,5})")  # \d would be any script's digits
NEAR = 4  # cells shown on each side of a marked one, and lines where there are many
LONGEST = 24  # letters of a word that are shown
NOTHING: Mapping[int, str] = {}


class WrittenAt(NamedTuple):
    """Where a cell is written."""

    line: int
    cell: int

    def __str__(self) -> str:
        return f"cell {self.cell + 1} of stage {self.line}"


@dataclass(frozen=True)
class Written:
    """The words of a table, a line per stage; tasks have the kind that is written: F, B, I or W."""

    name: str
    words: Sequence[Sequence[str]]

    @cached_property
    def cells(self) -> list[list[tuple[Task, ...]]]:
        """The tasks of each word."""
        return [
            [self._tasks(WrittenAt(s, i), word) for i, word in enumerate(line)]
            for s, line in enumerate(self.words)
        ]

    @cached_property
    def split(self) -> bool:
        """Whether the weights' part of a backward pass is a task of its own."""
        return any(task.kind in "IW" for task, _ in self.tasks())

    def tasks(self) -> Iterator[tuple[Task, WrittenAt]]:
        """Yield every task and where it is, line by line."""
        for s, line in enumerate(self.cells):
            for i, cell in enumerate(line):
                yield from ((task, WrittenAt(s, i)) for task in cell)

    def slots(self, task: Task) -> tuple[Task, ...]:
        """Return a task as the slots that it takes: a whole B of a split table takes two."""
        kinds = {"I": "B", "B": "BW" if self.split else "B"}.get(task.kind, task.kind)
        return tuple(task._replace(kind=kind) for kind in kinds)

    @cached_property
    def found(self) -> dict[Task, tuple[Task, WrittenAt]]:
        """What takes a slot -> the first task that does, as it is written, and where."""
        found: dict[Task, tuple[Task, WrittenAt]] = {}
        for task, place in self.tasks():
            for slot in self.slots(task):
                found.setdefault(slot, (task, place))
        return found

    @cached_property
    def virtual(self) -> int:
        """The number of virtual stages."""
        return 1 + max(task.virtual for task, _ in self.tasks())

    def homes(self) -> Homes:
        """Return where each virtual stage lies: chunks count up in the order of the model."""
        lines = [self._first(g)[1].line for g in range(self.virtual)]
        return tuple((line, lines[:g].count(line)) for g, line in enumerate(lines))

    def _tasks(self, place: WrittenAt, word: str) -> tuple[Task, ...]:
        parts = word.split("+") if word.strip(". ") else []
        matches = [_TASK.fullmatch(part.strip()) for part in parts]
        tasks = tuple(Task(m[2], int(m[1]), int(m[3])) for m in matches if m)
        if len(tasks) < len(parts):
            spelt = "" if word.isascii() else f" ({word[:LONGEST]!a})"
            raise self.refused(
                f">{_short(word)}<{spelt} is no cell. Write tasks joined by +, each a virtual "
                "stage, one of F, B (backward), I (backward, input only), W (weights) and a "
                "microbatch, in digits 0 to 9: 2B0; or . for idle.",
                place,
            )
        return tasks

    def refused(
        self, says: str, *marked: WrittenAt, beside: Mapping[int, str] = NOTHING
    ) -> ValueError:
        """Return the error that says what is wrong, over the words around the marked cells."""
        lines = self._lines(marked)
        shown = aligned([self._shown(s, marked) for s in lines], others=str.center)
        grid = (f"{row}{beside.get(s, '')}" for s, row in zip(lines, shown, strict=True))
        return ValueError("\n  ".join([f"{self.name}: {says}", *grid]))

    def _lines(self, marked: Sequence[WrittenAt]) -> list[int]:
        """Return which lines are shown: all, or those about the marked ones if there are many."""
        few = len(self.words) <= 4 * NEAR
        near = lambda s: any(abs(s - place.line) <= NEAR for place in marked)
        return [s for s in range(len(self.words)) if few or near(s)]

    def _shown(self, s: int, marked: Sequence[WrittenAt]) -> list[str]:
        """Return the words of a line around all marked cells, or, if they are far, around its own.

        All lines have as many cells: also those whose mark is near the beginning.
        """
        cells = [place.cell for place in marked]
        mine = [place.cell for place in marked if place.line == s]
        far = max(cells) - min(cells) > 2 * NEAR
        about = (mine or cells)[:1] if far else cells
        first = max(0, min(about) - NEAR)
        end = first + 2 * NEAR + 1 if far else max(about) + NEAR + 1
        words = [_short(word.strip(" .")) or "." for word in self.words[s]]
        words = [f">{word}<" if i in mine else word for i, word in enumerate(words)]
        rest = [""] * (max(map(len, self.words)) - len(words))
        words = [*words, *rest][first:end]
        label = f"stage {s}" + ("  …" if first else "   " * far)
        more = "…" if len(self.words[s]) > end else ""
        return [label, *words, *[""] * (end - first - len(words)), more]

    # -- what is wrong ------------------------------------------------------------------------

    def check(self) -> None:
        """Refuse a table that is not every task once, each virtual stage on one line."""
        self._check_cells()
        self._check_twice()
        self._check_halves()
        self._check_lines()
        self._check_homes()
        self._check_microbatches()
        self._check_missing()

    def _check_cells(self) -> None:
        if not any(True for _ in self.tasks()):
            says = "no task found. Write a line per stage, e.g. 0F0 0F1 0B0 0B1."
            raise ValueError(f"{self.name}: {says}")
        for s, line in enumerate(self.cells):
            if not any(line):
                says = f"stage {s} has no task. Write its tasks, or leave its line out."
                raise self.refused(says, WrittenAt(s, 0))
            for i, cell in enumerate(line):
                taken = Counter(slot.kind for task in cell for slot in self.slots(task))
                if twice := [kind for kind in KINDS if taken[kind] > 1]:
                    raise self.refused(
                        f">{'+'.join(map(str, cell))}< has two tasks for the {twice[0]} slot, a "
                        "stage has one slot of each kind in a tick. Write them as two cells.",
                        WrittenAt(s, i),
                    )

    def _check_twice(self) -> None:
        for task, place in self.tasks():
            for first, there in map(self.found.__getitem__, self.slots(task)):
                if (first, there) != (task, place):
                    says = f"{task} is here a second time, first as {first} in {there}. Remove one."
                    raise self.refused(says, place)

    def _check_halves(self) -> None:
        """Refuse a backward with respect to the input without its weights part, and the reverse."""
        for task, place in self.tasks():
            other = task._replace(kind={"I": "W", "W": "I"}.get(task.kind, task.kind))
            if task.kind in "IW" and self.slots(other)[0] not in self.found:
                raise self.refused(
                    f">{task}< is without {other}. Add that, or write {task._replace(kind='B')} "
                    "for the whole backward.",
                    place,
                )

    def _check_lines(self) -> None:
        """Refuse a task on another line than most tasks of its virtual stage."""
        count = Counter((task.virtual, place.line) for task, place in self.tasks())
        all_of = Counter(place.line for _, place in self.tasks())
        homes: dict[int, int] = {}  # of two lines with as many the one with fewer others
        for g, line in sorted(count, key=lambda key: (count[key], -all_of[key[1]], -key[1])):
            homes[g] = line
        for task, place in self.tasks():
            if place.line != homes[task.virtual]:
                raise self.refused(
                    f"{task} is on the line of stage {place.line}, other tasks of virtual stage "
                    f"{task.virtual} are on that of stage {homes[task.virtual]}. Write all tasks "
                    "of one on the same line.",
                    place,
                )

    def _check_homes(self) -> None:
        there = {task.virtual for task, _ in self.tasks()}
        for g in range(self.virtual):
            if g not in there:
                task, place = self._first(min(h for h in there if h > g))
                raise self.refused(
                    f"virtual stage {g} has no task, and there is {task} (marked). Virtual stages "
                    f"are numbered from 0 in model order: add the tasks of {g}, or number this one "
                    "anew.",
                    place,
                )
        if wrong := homes_fault(self.homes(), len(self.words)):
            says, g = wrong
            raise self.refused(says, self._first(g)[1])

    def _first(self, virtual: int) -> tuple[Task, WrittenAt]:
        return next(found for found in self.tasks() if found[0].virtual == virtual)

    @cached_property
    def _of_microbatch(self) -> dict[int, list[Task]]:
        """The F and B of each microbatch that there are."""
        found: dict[int, list[Task]] = {}
        for slot in self.found:
            if slot.kind != "W":
                found.setdefault(slot.microbatch, []).append(slot)
        return found

    @cached_property
    def _kinds(self) -> str:
        return "FB" if any(slot.kind == "B" for slot in self.found) else "F"

    def _lacking(self, m: int) -> list[Task]:
        """Return what a microbatch lacks, in order."""
        every = (Task(kind, g, m) for kind in self._kinds for g in range(self.virtual))
        return [task for task in every if task not in self.found]

    def _check_microbatches(self) -> None:
        """Refuse a gap between microbatches, and a last one of which most is missing."""
        last = max(self._of_microbatch)
        for m in range(last):
            if m not in self._of_microbatch:
                n = min(n for n in self._of_microbatch if n > m)
                task, place = self.found[self._of_microbatch[n][0]]
                raise self.refused(
                    f"microbatch {m} has no task, and there is {task} (marked). Microbatches are "
                    f"numbered from 0: add the tasks of {m}, number this one anew, or remove it.",
                    place,
                )
        lacking, there = self._lacking(last), self._of_microbatch[last]
        if last and len(there) <= len(lacking):
            task, place = self.found[there[0]]
            some = ", ".join(map(str, lacking[:3])) + (" …" if len(lacking) > 3 else "")
            raise self.refused(
                f"{task} is of microbatch {last}, which lacks {some}. Remove it, or add those.",
                place,
            )

    def _check_missing(self) -> None:
        for m in sorted(self._of_microbatch):
            for task in self._lacking(m):
                line = self.homes()[task.virtual][0]
                where, (near, place) = self._near(task, line)
                says = f"{task} is missing. Add it to stage {line}, {where} {near} (marked)."
                raise self.refused(says, place)

    def _near(self, task: Task, line: int) -> tuple[str, tuple[Task, WrittenAt]]:
        """Return a task that a missing one comes after, or before, preferably on its line."""
        for need, _ in needs(task, self.virtual):
            if need in self.found:
                return "after", self.found[need]
        waits = lambda other: any(need == task for need, _ in needs(other, self.virtual))
        found = [
            self.found[other] for other in self._of_microbatch[task.microbatch] if waits(other)
        ]
        found = found or [self.found[self._of_microbatch[task.microbatch][0]]]
        return "before", min(found, key=lambda found: found[1].line != line)

    def stuck(self, waits: Sequence[tuple[Sequence[Task], Sequence[Task]]]) -> ValueError:
        """Return the refusal of a deadlock: the cells that come next, what each one waits for."""
        marked = [self.found[cell[0]][1] for cell, _ in waits]
        name = lambda slots: " and ".join(dict.fromkeys(str(self.found[s][0]) for s in slots))
        beside = {
            place.line: f"   waits for {name(awaited)}"
            for place, (_, awaited) in zip(marked, waits, strict=True)
        }
        return self.refused(
            "deadlock, no stage can run its next cell (marked). Reorder a line so that what is "
            "waited for comes first:",
            *marked,
            beside=beside,
        )


def _short(word: str) -> str:
    return word if len(word) <= LONGEST else word[: LONGEST - 1] + "…"


def parse_table(text: str, name: str = "own", branches: bool | None = None) -> Table:
    """Return the table that a text describes.

    `branches` None: it needs them only if they make it faster, with a backward of two forwards.
    They do not where cells pair a forward and a backward, as combined ticks do.

    >>> print(parse_table("0F0 0B0\\n1F0+1B0"))
    0F0 .       0B0
    .   1F0+1B0 .
    """
    written = Written(name, _words(text))
    written.check()
    table = _table(written)
    branched = replace(table, branches=True)
    if branches is None:
        branches = cost(branched) < cost(table) * (1 - 1e-6)
    return branched if branches else table


def _words(text: str) -> list[list[str]]:
    kept = (line.strip() for line in text.splitlines())
    rows = [line for line in kept if line and not line.startswith("#")]
    comma = any("," in row for row in rows)
    return [re.split(r"\s*,\s*", row) if comma else row.split() for row in rows]


def _table(written: Written) -> Table:
    """Return the table of the words as ticks if they can run as they stand, else in their order."""
    homes = written.homes()
    slots = lambda cell: tuple(slot for task in cell for slot in written.slots(task))
    lines = [[slots(cell) for cell in line] for line in written.cells]
    table = _as_ticks(written.name, lines, homes)
    try:
        check_order(table)
    except ValueError:
        try:
            return lay_out(written.name, homes, [[[c for c in line if c]] for line in lines])
        except DeadlockError as deadlock:
            raise written.stuck(deadlock.waits) from None
    return table


def _as_ticks(name: str, lines: list[list[Cell]], homes: Homes) -> Table:
    """Return the table with the i-th cell of every line in tick i, ticks of no work left out."""
    cells = np.full((max(map(len, lines)), len(lines), len(KINDS)), -1, np.int32)
    for stage, line in enumerate(lines):
        for tick, cell in enumerate(line):
            for kind, virtual, microbatch in cell:
                cells[tick, stage, KINDS.index(kind)] = microbatch * len(homes) + virtual
    cells = cells[(cells >= 0).any(axis=(1, 2))]
    microbatches = 1 + int(cells.max()) // len(homes)
    return Table(name, len(lines), microbatches, len(homes) // len(lines), homes, cells)
