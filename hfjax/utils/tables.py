"""Text for people: equal rows counted together, columns aligned, numbers of bytes."""

import dataclasses
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
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
    return tuple(sorted(counted(found), key=lambda row: -row.bytes * row.count))


def counted(found: Iterable[Any], field: str = "count") -> list[Any]:
    """Return rows, equal ones as one of their sum; `field` says how many of it a row is."""
    counts: Counter[Any] = Counter()
    for row in found:
        counts[dataclasses.replace(row, **{field: 0})] += getattr(row, field)
    return [dataclasses.replace(row, **{field: n}) for row, n in counts.items()]


def aligned(
    lines: Sequence[Sequence[str]],
    numbers: Collection[int] = (),
    others: Callable[[str, int], str] = str.ljust,
    gap: str = "  ",
) -> list[str]:
    """Return lines of cells under each other; the columns that are `numbers` stand to the right.

    >>> aligned([("of", "n"), ("layers", "12")], numbers=(1,))
    ['of       n', 'layers  12']
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    place = [str.rjust if i in numbers else others for i in range(len(widths))]
    fill = lambda cells: (f(c, w) for f, c, w in zip(place, cells, widths, strict=True))
    return [gap.join(fill(cells)).rstrip() for cells in lines]


def few(lines: list[str], most: int = 8) -> list[str]:
    """Return the first lines of many, and how many more there are.

    >>> few(["a", "b", "c"], most=2)
    ['a', 'b', '… and 1 more']
    """
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], f"… and {more} more"]


UNITS = {
    **{"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
}


def bytes_of(text: str, name: str = "size") -> int:
    """Return how many bytes a text says; a bare number is bytes.

    >>> bytes_of("24GiB") == 24 * 2**30, bytes_of("1.5 MB"), bytes_of("512")
    (True, 1500000, 512)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not found or (found[2] and found[2].lower() not in UNITS):
        raise ValueError(
            f"{name} {text}: a size is expected, for instance 24GiB (of 1024) or 24GB (of 1000)."
        )
    return round(float(found[1]) * UNITS[found[2].lower() or "b"])


def human(n: float) -> str:
    """Return a number of bytes as people write it.

    >>> human(3 * 2**20)
    '3.0 MiB'
    """
    unit, size = unit_of(n)
    return f"{n / size:.{int(size > 1)}f} {unit}"


def unit_of(n: float) -> tuple[str, int]:
    """Return the unit in which a number of bytes is written, and its bytes."""
    names = ("TiB", "GiB", "MiB", "KiB", "B")
    units = ((name, 2 ** (40 - 10 * k)) for k, name in enumerate(names))
    return next((unit for unit in units if n >= unit[1]), ("B", 1))


def harmless(text: str) -> str:
    r"""Return a text for a terminal: control characters are shown by their codes, not obeyed.

    >>> print(harmless("red: \x1b[31m"))
    red: \x1b[31m
    """
    obeyed = lambda c: unicodedata.category(c) == "Cc" and c not in "\n\t"
    return "".join(ascii(c)[1:-1] if obeyed(c) else c for c in text)


ODD = ("Cc", "Cf", "Cs", "Zl", "Zp")  # obeyed by terminals, turn the writing round, or are no text
LONG, SHOWN = 300, 100  # letters: of a name that is cut, of each of its ends


def named(name: object) -> str:
    r"""Return how the name of a file or of a key stands in a message: odd characters as codes.

    It is one line. What is longer than names are is cut, but no path.

    >>> print(named("red\x1b[31m\nname"), len(named("a" * 5000)))
    red\x1b[31m\nname 201
    """
    text = str(name)
    if len(text) > LONG and not isinstance(name, Path):
        text = f"{text[:SHOWN]}…{text[-SHOWN:]}"
    if text.isprintable():
        return text
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) in ODD else c for c in text)
