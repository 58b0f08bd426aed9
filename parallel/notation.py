"""The text form of a schedule, read: a line per stage, as torch.distributed.pipelining writes it.

    0F0 0F1 .       0B0     0B1
    .   1F0 1F1+1B0 1B1     .

A cell is tasks joined by `+`: virtual stage, kind, microbatch. F is a forward, B a full backward,
I a backward with respect to the input only, W the weights' part of it. Cells are separated by
blanks, or by commas (CSV); `.` or nothing is idle. Empty lines and lines that begin with # are
skipped.

If the cells, taken as ticks, can run as they stand, they are the ticks. Otherwise only the order
of each line counts, idle marks are ignored, and every cell runs in the earliest tick that it can.
"""

import re
from collections import defaultdict
from dataclasses import replace

import numpy as np

from hfjax.parallel.cost import cost
from hfjax.parallel.lanes import Cell, lay_out
from hfjax.parallel.schedule import (
    KINDS,
    Homes,
    Table,
    Task,
    check_complete,
    check_homes,
    check_order,
)

_TASK = re.compile(r"(\d{1,5})([FBIW])(\d{1,5})")


def parse_table(text: str, name: str = "own", branches: bool | None = None) -> Table:
    """Return the table that a text describes.

    `branches` None: only if they make the table faster, with a backward of two forwards. They do
    not where cells pair a forward and a backward, as combined ticks do.

    >>> print(parse_table("0F0 0B0\\n1F0+1B0"))
    0F0 .       0B0
    .   1F0+1B0 .
    """
    lines = _read(text, name)
    homes = _homes(lines, name)
    table = _as_ticks(name, lines, homes)
    check_complete(table)
    try:
        check_order(table)
    except ValueError:
        table = lay_out(name, homes, [[[cell for cell in line if cell]] for line in lines])
    branched = replace(table, branches=True)
    if branches is None:
        branches = cost(branched) < cost(table) * (1 - 1e-6)
    return branched if branches else table


def _read(text: str, name: str) -> list[list[Cell]]:
    kept = (line.strip() for line in text.splitlines())
    rows = [line for line in kept if line and not line.startswith("#")]
    comma = any("," in row for row in rows)
    words = [re.split(r"\s*,\s*", row) if comma else row.split() for row in rows]
    _check_pairs(" ".join(rows), name)
    split = any("W" in row for row in rows)
    lines = [
        [_cell(word, split, f"{name}: line {s + 1}, cell {i + 1}") for i, word in enumerate(line)]
        for s, line in enumerate(words)
    ]
    if not any(cell for line in lines for cell in line):
        raise ValueError(f"{name}: no task found. Write a line per stage, e.g. 0F0 0F1 0B0 0B1.")
    return lines


def _check_pairs(text: str, name: str) -> None:
    """Refuse a backward with respect to the input without its weights part, and the reverse."""
    found = {kind: set(re.findall(rf"\b(\d+){kind}(\d+)\b", text)) for kind in "IW"}
    for one, other in (("I", "W"), ("W", "I")):
        for g, m in sorted(found[one] - found[other]):
            raise ValueError(
                f"{name}: >{g}{one}{m}< is without {g}{other}{m}. Add that, or write {g}B{m} for "
                "the whole backward."
            )


def _cell(word: str, split: bool, where: str) -> Cell:
    tasks: list[Task] = []
    for part in word.replace(".", "").split("+") if word.strip(". ") else ():
        match = _TASK.fullmatch(part.strip())
        if match is None:
            raise ValueError(
                f"{where}: >{word}< is no cell. Write tasks joined by +, each a virtual stage, one "
                "of F, B (backward), I (backward, input only), W (weights) and a microbatch: 2B0; "
                "or . for idle."
            )
        kind = {"B": "BW" if split else "B", "I": "B"}.get(match[2], match[2])
        tasks += [Task(k, int(match[1]), int(match[3])) for k in kind]
    for kind in KINDS:
        if sum(task.kind == kind for task in tasks) > 1:
            raise ValueError(
                f"{where}: >{word}< has two tasks for the {kind} slot, a stage has one slot of "
                "each kind in a tick. Write them as two cells."
            )
    return tuple(tasks)


def _homes(lines: list[list[Cell]], name: str) -> Homes:
    """Return where each virtual stage lies: chunks count up in the order of the model."""
    found: dict[int, set[int]] = defaultdict(set)
    for stage, line in enumerate(lines):
        for task in (task for cell in line for task in cell):
            found[task.virtual].add(stage)
    for g in range(max(found) + 1):
        if len(found[g]) != 1:
            on = " and ".join(map(str, sorted(found[g]))) or "none"
            raise ValueError(
                f"{name}: virtual stage {g} is on stage {on}. Virtual stages are numbered "
                f"0 to {max(found)} in model order; write all tasks of one on the same line."
            )
    homes, held = [], defaultdict(int)
    for g in range(len(found)):
        (stage,) = found[g]
        homes.append((stage, held[stage]))
        held[stage] += 1
    check_homes(homes, len(lines), name)
    return tuple(homes)


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
