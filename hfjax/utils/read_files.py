"""Read files that may be damaged or of another kind; refuse them with an explanation."""

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

from hfjax.utils.tables import quote

Check = tuple[str, Callable[[Any], bool]]  # a field's description, and whether a value is valid

FILE_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}
ORDINARY, FOLDER = FILE_KINDS[stat.S_IFREG], FILE_KINDS[stat.S_IFDIR]
MISSING, UNREACHED = "missing", "not to be reached"
CHUNK = 1 << 22  # bytes per read


def path_kind(path: Path) -> str:
    """Return what a path names, in words; nothing is opened.

    >>> path_kind(Path("/")), path_kind(Path("/dev/null")), path_kind(Path("/nowhere"))
    ('a folder', 'a device', 'missing')
    """
    try:
        return FILE_KINDS.get(stat.S_IFMT(os.stat(path).st_mode), "no file")
    except FileNotFoundError:
        return (
            f"a link to {quote(os.readlink(path))}, which is not there"
            if path.is_symlink()
            else MISSING
        )
    except ValueError:  # it has a character that no name may have
        return MISSING
    except OSError as wrong:
        return f"{UNREACHED} ({wrong.strerror})"


def check_ordinary(path: Path) -> None:
    """Refuse anything but an ordinary file: a pipe would block its reader, a folder fail."""
    if (kind := path_kind(path)) != ORDINARY:
        raise ValueError(f"{quote(path)} is {kind}: an ordinary file is expected.")


def read_text(path: Path) -> str:
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


def encoding_error(name: str, wrong: UnicodeDecodeError) -> str:
    """Return the message about a text in another encoding."""
    data, pos = wrong.object, wrong.start
    of = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "latin1"
    return (
        f"{name} is not UTF-8: byte {pos} is 0x{data[pos]:02x}. Convert it (iconv -f {of} -t utf-8)"
    )


def parse_json(text: str) -> Any:
    """Return parsed JSON; any fault in it is a ValueError."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        raise ValueError("a number in it has too many digits") from None


def brief(value: Any) -> str:
    """Return a value as text for a message, not longer than a line.

    >>> brief({"tokens": [0] * 1000})
    "{'tokens': [0, 0, 0, 0, 0, 0, ...]}"
    """
    try:
        return reprlib.repr(value)
    except ValueError:
        return "a number of thousands of digits"


def check_fields(record: Any, checks: Mapping[str, Check]) -> dict[str, Any]:
    """Return a JSON object whose fields pass these checks; name one that does not.

    >>> check_fields({"rows": -5}, {"rows": integer(0)})
    Traceback (most recent call last):
    ValueError: rows is -5, a whole number from 0 on is expected
    """
    if not isinstance(record, dict):
        raise ValueError(f"an object is expected, found {brief(record)}")
    for name, (description, is_valid) in checks.items():
        if name not in record:
            raise ValueError(f"it has no field {quote(name)}")
        if not is_valid(record[name]):
            raise ValueError(f"{quote(name)} is {brief(record[name])}, {description} is expected")
    return record


def integer(least: int, most: int | None = None) -> Check:
    """Return the check for whole numbers from `least` on, or up to `most`."""
    to = "on" if most is None else f"to {most}"
    fits = lambda x: type(x) is int and x >= least and (most is None or x <= most)
    return f"a whole number from {least} {to}", fits


def object_of(description: str, is_valid: Callable[[Any], bool]) -> Check:
    """Return the check for objects whose values are all valid."""
    all_valid = lambda x: isinstance(x, dict) and all(map(is_valid, x.values()))
    return f"an object of {description}", all_valid


def is_number(x: object) -> TypeGuard[int | float]:
    """Return whether something is a number that a float can hold, also nan and infinity."""
    return type(x) is float or (type(x) is int and abs(x) <= sys.float_info.max)


ANYTHING: Check = ("anything", lambda _: True)
TEXT: Check = ("a text", lambda x: isinstance(x, str))
