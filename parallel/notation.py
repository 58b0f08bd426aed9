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
from dataclasses import replace

import numpy as np

from hfjax.parallel.cost import cost
from hfjax.parallel.lanes import Cell, DeadlockError, lay_out
from hfjax.parallel.schedule import KINDS, Homes, Table, check_order
from hfjax.parallel.written import Written


def parse_table(text: str, name: str = "own", branches: bool | None = None) -> Table:
    """Return the table that a text describes.

    `branches` None: only if they make the table faster, with a backward of two forwards. They do
    not where cells pair a forward and a backward, as combined ticks do.

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
