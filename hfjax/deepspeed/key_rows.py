"""Rows of the table of DeepSpeed's keys: what a key is, its default, and what becomes of it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hfjax.base.keywords import is_real

TAKEN, IGNORED, REFUSED = "taken as", "ignored because", "refused because"


@dataclass(frozen=True)
class KeyRow:
    """A key: `default` is DeepSpeed's, or the type of a value that has none; `words` go on."""

    verdict: str
    default: Any
    words: str


Rows = dict[str, KeyRow]
TYPES = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "any": object}


def taken(section: str, keys: str) -> Rows:
    """Return rows of what is taken: `key=default key:type | as what`; `{}` stands for the value.

    >>> taken("fp16", "hysteresis=2 | LossScale(hysteresis={})")
    {'fp16.hysteresis': KeyRow(verdict='taken as', default=2, words='LossScale(hysteresis={})')}
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
    for key in keys.split():
        name, given, default = key.partition("=")
        name, _, kind = (name, "", "") if given else key.partition(":")
        path = f"{section}.{name}" if section else name
        found[path] = KeyRow(verdict, json.loads(default) if given else TYPES[kind], words)
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

    >>> [kind_of(KeyRow(TAKEN, default, "")) for default in (1.0, int, object)]
    ['a number', 'a whole number', 'anything']
    """
    if row.default == "auto":
        return "anything"
    kind = row.default if isinstance(row.default, type) else type(row.default)
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    return words.get(kind, "a list" if kind is list else "anything")


def fits(row: KeyRow, value: Any) -> bool:
    """Return whether a value is of the kind of its key; null is where nothing is the default."""
    if value is None:
        return row.default is None or isinstance(row.default, type) or row.verdict == IGNORED
    number = is_real(value, -1e300, 1e300)
    fine = row.verdict != TAKEN or row.default == -1 or (number and value >= 0)
    holds = {
        "true or false": isinstance(value, bool),
        "a whole number": number and float(value).is_integer() and fine,
        "a number": number and fine,
        "a text": isinstance(value, str),
        "a list": isinstance(value, list | tuple),
    }
    return holds.get(kind_of(row), True)


def is_default(row: KeyRow, value: object) -> bool:
    """Return whether a value changes nothing: it is DeepSpeed's default, or nothing."""
    return value in (None, [], row.default)


def to_write(row: KeyRow) -> str:
    """Return what to write in place of "auto"."""
    if isinstance(row.default, type):
        return f"{kind_of(row)}, or leave it out"
    return f"{json.dumps(row.default)} (DeepSpeed's default)"
