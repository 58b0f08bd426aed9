"""Rows of a table: equal ones counted together, and written under each other."""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")


@dataclasses.dataclass(frozen=True)
class Rows(Generic[Row]):
    """Rows that were read in a program; `source` says in what form of it."""

    rows: tuple[Row, ...]
    source: str

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        return self.rows[index]


def merged(found: Iterable[Any]) -> tuple[Any, ...]:
    """Return rows (with fields `bytes` and `count`) with equal ones merged, most bytes first."""
    counts: dict[Any, int] = {}
    for row in found:
        of_one = dataclasses.replace(row, count=0)
        counts[of_one] = counts.get(of_one, 0) + row.count
    rows = [dataclasses.replace(row, count=n) for row, n in counts.items()]
    return tuple(sorted(rows, key=lambda row: -row.bytes * row.count))


def aligned(lines: Sequence[Sequence[str]], numbers: Collection[int] = ()) -> list[str]:
    """Return lines of cells under each other; the columns that are `numbers` stand to the right.

    >>> aligned([("of", "n"), ("layers", "12")], numbers=(1,))
    ['of       n', 'layers  12']
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        return "  ".join(c.rjust(w) if i in numbers else c.ljust(w) for i, (c, w) in pairs).rstrip()

    return [line(cells) for cells in lines]
