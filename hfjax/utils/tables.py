"""Text for people: equal entries merged, columns aligned, numbers of bytes."""

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
    """Entries that were read from a program; `source` names the form of the program."""

    rows: tuple[EntryT, ...]
    source: str

    def __iter__(self) -> Iterator[EntryT]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> EntryT:
        return self.rows[index]


def sum_counts(entries: Iterable[Any]) -> tuple[Any, ...]:
    """Return entries (with fields `bytes` and `count`), equal ones merged, most bytes first."""
    return tuple(sorted(count_equal(entries), key=lambda entry: -entry.bytes * entry.count))


def count_equal(entries: Iterable[Any], field: str = "count") -> list[Any]:
    """Return entries, equal ones merged and their counts, in `field`, summed."""
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
    """Return lines with their cells aligned; columns in `numbers` are right-aligned.

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
    """Return the number of bytes that a text states; a bare number is bytes.

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


ODD = ("Cc", "Cf", "Cs", "Zl", "Zp")  # terminals obey them, they reverse writing, or are no text
MAX_NAME, END_LENGTH = 300, 100  # characters: of a name that is not cut, of each end of one that is


def quote(name: object) -> str:
    r"""Return the name of a file or key for a message: odd characters as codes.

    It is one line. A name that is too long is cut, but a path is not.

    >>> print(quote("red\x1b[31m\nname"), len(quote("a" * 5000)))
    red\x1b[31m\nname 201
    """
    text = str(name)
    if len(text) > MAX_NAME and not isinstance(name, Path):
        text = f"{text[:END_LENGTH]}…{text[-END_LENGTH:]}"
    if text.isprintable():
        return text
    return "".join(ascii(c)[1:-1] if unicodedata.category(c) in ODD else c for c in text)
