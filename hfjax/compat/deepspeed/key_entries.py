"""Rows of the table of DeepSpeed's keys: what a key is, its default, and what becomes of it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hfjax.utils.keywords import is_real

TAKEN, IGNORED, REFUSED = "taken as", "ignored because", "refused because"


@dataclass(frozen=True)
class KeyRow:
    """A key: `default` is DeepSpeed's, or the type of a value that has none; `words` go on.

    A number that is taken is one of `range`, or, if that is None, one from 0 on.
    """

    verdict: str
    default: Any
    words: str
    range: tuple[float, float] | None = None


Rows = dict[str, KeyRow]
LARGEST = {int: 1e18, float: 3.4e38}  # of float32
TYPES = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "any": object}


def taken(section: str, keys: str) -> Rows:
    """Return rows of what is taken: `key=default key:type | as what`; `{}` stands for the value.

    A range may follow a key: `ratio=1.0@0..1`, or `steps:int@1..`, without an end.

    >>> taken("step", "size=2@1..9 | {}")
    {'step.size': KeyRow(verdict='taken as', default=2, words='{}', range=(1.0, 9.0))}
    """
    names, _, words = keys.partition(" | ")
    return _rows(TAKEN, section, names, words or "{}")


def ignored(section: str, why: str, keys: str) -> Rows:
    """Return rows of what changes neither numbers nor memory here."""
    return _rows(IGNORED, section, keys, why)


def refused(section: str, why: str, keys: str) -> Rows:
    """Return rows of what is refused unless it has its default, by which it is off."""
    return _rows(REFUSED, section, keys, why)


def _rows(verdict: str, section: str, keys: str, words: str) -> Rows:
    found: Rows = {}
    for text in keys.split():
        key, ranged, ends = text.partition("@")
        name, given, default = key.partition("=")
        name, _, kind = (name, "", "") if given else key.partition(":")
        path = f"{section}.{name}" if section else name
        default = json.loads(default) if given else TYPES[kind]
        least, _, most = ends.partition("..")
        numbers = (float(least), float(most or LARGEST[int])) if ranged else None
        found[path] = KeyRow(verdict, default, words, numbers)
    return found


def joined(*rows: Rows) -> Rows:
    """Return all rows; a key that is there twice is a mistake of the table."""
    found: Rows = {}
    for some in rows:
        assert not found.keys() & some.keys(), found.keys() & some.keys()
        found |= some
    return found


def row_of(table: Rows, path: str) -> KeyRow | None:
    """Return the row of a path: its own, or that of the first pattern that it matches."""
    if path in table:
        return table[path]
    return next((row for key, row in table.items() if "*" in key and fnmatchcase(path, key)), None)


def is_section(table: Iterable[str], path: str) -> bool:
    """Return whether keys of the table are inside it."""
    return any(key.startswith(f"{path}.") for key in table)


def kind_of(row: KeyRow) -> str:
    """Return in words what the value of a key has to be.

    >>> [kind_of(KeyRow(TAKEN, default, "")) for default in (1.0, bool, object)]
    ['a number from 0 to 3.4e+38', 'true or false', 'anything']
    """
    if row.default == "auto":
        return "anything"
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    word = words.get(_type(row), "a list" if _type(row) is list else "anything")
    if row.verdict != TAKEN or "number" not in word:
        return word
    least, most = _range(row)
    return f"{word} from {least:g} to {most:g}"


def _type(row: KeyRow) -> type:
    return row.default if isinstance(row.default, type) else type(row.default)


def _range(row: KeyRow) -> tuple[float, float]:
    """Return from where to where its numbers go; what is not taken may be any."""
    if row.verdict != TAKEN:
        return -1e300, 1e300
    return row.range or (0, LARGEST[_type(row)])


def fits(row: KeyRow, value: Any) -> bool:
    """Return whether a value is of the kind of its key; null is where nothing is the default."""
    kind = _type(row)
    if row.default == "auto" or kind not in (bool, int, float, str, list):
        return True
    if value is None:
        return isinstance(row.default, type) or row.verdict == IGNORED
    if kind in (int, float):
        return is_real(value, *_range(row)) and (kind is float or float(value).is_integer())
    return isinstance(value, (list, tuple) if kind is list else kind)


def is_default(row: KeyRow, value: object) -> bool:
    """Return whether a value changes nothing: it is DeepSpeed's default, or nothing."""
    return value in (None, [], row.default)


def to_write(row: KeyRow) -> str:
    """Return what to write in place of "auto"."""
    if isinstance(row.default, type):
        return f"{kind_of(row)}, or leave it out"
    return f"{json.dumps(row.default)} (DeepSpeed's default)"
