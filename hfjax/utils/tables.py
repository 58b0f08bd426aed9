"""Text for people: equal rows counted together, columns aligned, numbers of bytes."""

import dataclasses
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

EntryT = TypeVar("EntryT")


@dataclasses.dataclass(frozen=True)
class Entries(Generic[EntryT]):
    """Rows that were read in a program; `source` says in what form of it."""

    rows: tuple[EntryT, ...]
    source: str

    def __iter__(self) -> Iterator[EntryT]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> EntryT:
        return self.rows[index]


def merge_equal(entries: Iterable[Any]) -> tuple[Any, ...]:
    """Return rows (with fields `bytes` and `count`) with equal ones merged, most bytes first."""
    return tuple(sorted(count_equal(entries), key=lambda entry: -entry.bytes * entry.count))


def count_equal(entries: Iterable[Any], field: str = "count") -> list[Any]:
    """Return rows, equal ones as one of their sum; `field` says how many of it a row is."""
    counts: Counter[Any] = Counter()
    for entry in entries:
        counts[dataclasses.replace(entry, **{field: 0})] += getattr(entry, field)
    return [dataclasses.replace(entry, **{field: n}) for entry, n in counts.items()]


def align(
    lines: Sequence[Sequence[str]],
    numbers: Collection[int] = (),
    justify: Callable[[str, int], str] = str.ljust,
    gap: str = "  ",
) -> list[str]:
    """Return lines of cells under each other; the columns that are `numbers` stand to the right.

    >>> align([("of", "n"), ("layers", "12")], numbers=(1,))
    ['of       n', 'layers  12']
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    justifiers = [str.rjust if i in numbers else justify for i in range(len(widths))]
    pad_cells = lambda cells: (f(c, w) for f, c, w in zip(justifiers, cells, widths, strict=True))
    return [gap.join(pad_cells(cells)).rstrip() for cells in lines]


def first_lines(lines: list[str], most: int = 8) -> list[str]:
    """Return the first lines of many, and how many more there are.

    >>> first_lines(["a", "b", "c"], most=2)
    ['a', 'b', '… and 1 more']
    """
    more = len(lines) - most
    return lines if more <= 0 else [*lines[:most], f"… and {more} more"]


UNITS = {
    **{"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12},
    **{"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40},
}


def parse_bytes(text: str, name: str = "size") -> int:
    """Return how many bytes a text says; a bare number is bytes.

    >>> parse_bytes("24GiB") == 24 * 2**30, parse_bytes("1.5 MB"), parse_bytes("512")
    (True, 1500000, 512)
    """
    parsed_size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not parsed_size or (parsed_size[2] and parsed_size[2].lower() not in UNITS):
        raise ValueError(
            f"{name} {text}: a size is expected, for instance 24GiB (of 1024) or 24GB (of 1000)."
        )
    return round(float(parsed_size[1]) * UNITS[parsed_size[2].lower() or "b"])


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


def escape_controls(text: str) -> str:
    r"""Return a text for a terminal: control characters are shown by their codes, not obeyed.

    >>> print(escape_controls("red: \x1b[31m"))
    red: \x1b[31m
    """
    is_control = lambda c: unicodedata.category(c) == "Cc" and c not in "\n\t"
    return "".join(ascii(c)[1:-1] if is_control(c) else c for c in text)


ODD = ("Cc", "Cf", "Cs", "Zl", "Zp")  # obeyed by terminals, turn the writing round, or are no text
MAX_NAME, END_LENGTH = 300, 100  # letters: of a name that is cut, of each of its ends


def quote(name: object) -> str:
    r"""Return how the name of a file or of a key stands in a message: odd characters as codes.

    It is one line. What is longer than names are is cut, but no path.

    >>> print(quote("red\x1b[31m\nname"), len(quote("a" * 5000)))
    red\x1b[31m\nname 201
    """
    text = str(name)
    if len(text) > MAX_NAME and not isinstance(name, Path):
        text = f"{text[:END_LENGTH]}…{text[-END_LENGTH:]}"
    if text.isprintable():
        return text
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) in ODD else c for c in text)
