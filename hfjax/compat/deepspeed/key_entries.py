"""Entries of the table of DeepSpeed's keys: type, default, and how the key is handled."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hfjax.utils.keywords import is_real

TAKEN, IGNORED, REFUSED = "taken as", "ignored because", "refused because"


@dataclass(frozen=True)
class KeyEntry:
    """A key. `default` is DeepSpeed's, or a type if it has none; `meaning` completes `verdict`.

    A number that is taken must lie in `range`, or, if that is None, be at least 0.
    """

    verdict: str
    default: Any
    meaning: str
    range: tuple[float, float] | None = None


KeyEntries = dict[str, KeyEntry]
LARGEST = {int: 1e18, float: 3.4e38}  # of float32
TYPES = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "any": object}


def accept_keys(section: str, keys: str) -> KeyEntries:
    """Return entries of keys that are taken: `key=default key:type | meaning`; `{}` is the value.

    A range may follow a key: `ratio=1.0@0..1`, or `steps:int@1..`, without an upper bound.

    >>> accept_keys("step", "size=2@1..9 | {}")
    {'step.size': KeyEntry(verdict='taken as', default=2, meaning='{}', range=(1.0, 9.0))}
    """
    names, _, meaning = keys.partition(" | ")
    return _parse_entries(TAKEN, section, names, meaning or "{}")


def ignore_keys(section: str, why: str, keys: str) -> KeyEntries:
    """Return entries of keys that change neither numerics nor memory here."""
    return _parse_entries(IGNORED, section, keys, why)


def refuse_keys(section: str, why: str, keys: str) -> KeyEntries:
    """Return entries of keys that are refused unless they have their default, which is off."""
    return _parse_entries(REFUSED, section, keys, why)


def _parse_entries(verdict: str, section: str, keys: str, meaning: str) -> KeyEntries:
    entries: KeyEntries = {}
    for text in keys.split():
        key, has_range, ends = text.partition("@")
        name, has_default, default = key.partition("=")
        name, _, kind = (name, "", "") if has_default else key.partition(":")
        path = f"{section}.{name}" if section else name
        default = json.loads(default) if has_default else TYPES[kind]
        least, _, most = ends.partition("..")
        bounds = (float(least), float(most or LARGEST[int])) if has_range else None
        entries[path] = KeyEntry(verdict, default, meaning, bounds)
    return entries


def merge(*tables: KeyEntries) -> KeyEntries:
    """Return all entries; a duplicate key is a bug in the table."""
    merged: KeyEntries = {}
    for table in tables:
        assert not merged.keys() & table.keys(), merged.keys() & table.keys()
        merged |= table
    return merged


def find_entry(table: KeyEntries, path: str) -> KeyEntry | None:
    """Return the entry of a path: its own, or that of the first pattern that it matches."""
    if path in table:
        return table[path]
    return next(
        (entry for key, entry in table.items() if "*" in key and fnmatchcase(path, key)), None
    )


def is_section(table: Iterable[str], path: str) -> bool:
    """Return whether the table has keys below a path."""
    return any(key.startswith(f"{path}.") for key in table)


def describe_value(entry: KeyEntry) -> str:
    """Return a description of the values that a key accepts.

    >>> [describe_value(KeyEntry(TAKEN, default, "")) for default in (1.0, bool, object)]
    ['a number from 0 to 3.4e+38', 'true or false', 'anything']
    """
    if entry.default == "auto":
        return "anything"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    name = names.get(_value_type(entry), "a list" if _value_type(entry) is list else "anything")
    if entry.verdict != TAKEN or "number" not in name:
        return name
    least, most = _value_range(entry)
    return f"{name} from {least:g} to {most:g}"


def _value_type(entry: KeyEntry) -> type:
    return entry.default if isinstance(entry.default, type) else type(entry.default)


def _value_range(entry: KeyEntry) -> tuple[float, float]:
    """Return the (min, max) of a key's numbers; unlimited unless it is taken."""
    if entry.verdict != TAKEN:
        return -1e300, 1e300
    return entry.range or (0, LARGEST[_value_type(entry)])


def is_allowed(entry: KeyEntry, value: Any) -> bool:
    """Return whether a value has its key's type and range; null is allowed without a default."""
    kind = _value_type(entry)
    if entry.default == "auto" or kind not in (bool, int, float, str, list):
        return True
    if value is None:
        return isinstance(entry.default, type) or entry.verdict == IGNORED
    if kind in (int, float):
        return is_real(value, *_value_range(entry)) and (kind is float or float(value).is_integer())
    return isinstance(value, (list, tuple) if kind is list else kind)


def is_default(entry: KeyEntry, value: object) -> bool:
    """Return whether a value has no effect: it is DeepSpeed's default, or empty."""
    return value in (None, [], entry.default)


def suggest_value(entry: KeyEntry) -> str:
    """Return a suggestion to replace "auto"."""
    if isinstance(entry.default, type):
        return f"{describe_value(entry)}, or leave it out"
    return f"{json.dumps(entry.default)} (DeepSpeed's default)"
