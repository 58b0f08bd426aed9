"""What is found on disk, where anything may have happened to it: read, or refused in words."""

import codecs
import json
import os
import reprlib
import stat
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from hfjax.utils.tables import named

Kind = tuple[str, Callable[[Any], bool]]  # what a field is, in words, and whether a value is that

KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
ORDINARY, FOLDER = KINDS[stat.S_IFREG], KINDS[stat.S_IFDIR]
MISSING, UNREACHED = "missing", "not to be reached"
CHUNK = 1 << 22  # bytes that are read at once


def what_is(path: Path) -> str:
    """Return what a path names, in words; nothing is opened.

    >>> what_is(Path("/")), what_is(Path("/dev/null")), what_is(Path("/nowhere"))
    ('a folder', 'a device', 'missing')
    """
    try:
        return KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "no file")
    except FileNotFoundError:
        return (
            f"a link to {named(os.readlink(path))}, which is not there"
            if path.is_symlink()
            else MISSING
        )
    except ValueError:  # it has a character that no name has
        return MISSING
    except OSError as wrong:
        return f"{UNREACHED} ({wrong.strerror})"


def check_ordinary(path: Path) -> None:
    """Refuse what is no ordinary file: a pipe would stall who reads it, a folder not be read."""
    if (kind := what_is(path)) != ORDINARY:
        raise ValueError(f"{named(path)} is {kind}: an ordinary file is expected.")


def contents(path: Path) -> str:
    """Return the text of an ordinary file; ValueError says what is there instead."""
    check_ordinary(path)
    return path.read_text(encoding="utf-8")


def crc32(path: Path) -> int:
    """Return the CRC32 of an ordinary file."""
    check_ordinary(path)
    value = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            value = zlib.crc32(chunk, value)
    return value


def not_utf8(name: str, wrong: UnicodeDecodeError) -> str:
    """Return what to say of a text in another encoding."""
    data, at = wrong.object, wrong.start
    of = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "latin1"
    return (
        f"{name} is not UTF-8: byte {at} is 0x{data[at]:02x}. Convert it (iconv -f {of} -t utf-8)"
    )


def parsed(text: str) -> Any:
    """Return what JSON says; whatever is wrong with it is a ValueError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        raise ValueError("a number in it has too many digits") from None


def shown(value: Any) -> str:
    """Return how a value is shown in a message: not longer than a line.

    >>> shown({"tokens": [0] * 1000})
    "{'tokens': [0, 0, 0, 0, 0, 0, ...]}"
    """
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number of thousands of digits"


def check_fields(found: Any, kinds: Mapping[str, Kind]) -> dict[str, Any]:
    """Return an object of JSON whose fields are of these kinds; one that is not is named.

    >>> check_fields({"rows": -5}, {"rows": whole(0)})
    Traceback (most recent call last):
    ValueError: rows is -5, a whole number from 0 on is expected
    """
    if not isinstance(found, dict):
        raise ValueError(f"an object is expected, found {shown(found)}")
    for name, (words, holds) in kinds.items():
        if name not in found:
            raise ValueError(f"it has no field {named(name)}")
        if not holds(found[name]):
            raise ValueError(f"{named(name)} is {shown(found[name])}, {words} is expected")
    return found


def whole(least: int, most: int | None = None) -> Kind:
    """Return the kind of whole numbers from a bound on, or to another one."""
    to = "on" if most is None else f"to {most}"
    fits = lambda x: type(x) is int and x >= least and (most is None or x <= most)
    return f"a whole number from {least} {to}", fits


def object_of(words: str, holds: Callable[[Any], bool]) -> Kind:
    """Return the kind of objects whose values are all of a kind."""
    every = lambda x: isinstance(x, dict) and all(map(holds, x.values()))
    return f"an object of {words}", every


def is_number(x: object) -> TypeGuard[int | float]:
    """Return whether something is a number that a float holds; nan and infinity are."""
    return type(x) is float or (type(x) is int and abs(x) <= sys.float_info.max)


ANYTHING: Kind = ("anything", lambda _: True)
TEXT: Kind = ("a text", lambda x: isinstance(x, str))
