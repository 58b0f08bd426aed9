"""Files and folders that hfjax writes and deletes: never through a link, which may lead anywhere.

A folder may come from somebody else, and its links lead to files of the one who opens it.
"""

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO

from hfjax.base.read_files import check_ordinary
from hfjax.base.tables import named


def user_cache() -> Path:
    """Return where hfjax keeps what it can make again: in the user's cache (XDG_CACHE_HOME)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfjax"


def check_no_link(path: Path) -> None:
    """Refuse a link where something is to be written or deleted."""
    if path.is_symlink():
        raise ValueError(
            f"{named(path)} is a link to {named(os.readlink(path))}: hfjax writes and deletes "
            "nothing through links inside its folders. Take it out "
            f"(rm {named(path)}), or give another folder."
        )


def check_no_links(folder: Path, names: tuple[str, ...]) -> None:
    """Refuse links in a folder where these files and folders are written; itself it may be one."""
    for name in names:
        check_no_link(folder / name)


def check_ordinary_files(folder: Path, names: tuple[str, ...]) -> None:
    """Refuse what is there under these names of a folder and no ordinary file."""
    for name in names:
        if os.path.lexists(folder / name):
            check_ordinary(folder / name)


def opened(path: Path, flags: int) -> int:
    """Return the descriptor of an ordinary file that is there or is made; of no link."""
    check_no_link(path)
    if os.path.lexists(path):
        check_ordinary(path)
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a new file, which takes the place of another in one piece: when it is whole.

    Until then it has a name of its own: of two that are written at the same time each is whole.
    """
    check_no_link(path)
    _sweep(path)
    try:
        with _new(path) as file:
            try:
                yield file
                file.flush()
                os.replace(file.name, path)
            finally:
                with suppress(OSError):
                    os.unlink(file.name)
    except OSError as wrong:
        raise OSError(wrong.errno, wrong.strerror, str(path)) from None


def replace_text(path: Path, text: str) -> None:
    """Write a file in one piece: the one that is there stays until the new one is whole."""
    with replacing(path) as file:
        file.write(text.encode())


def delete(path: Path) -> None:
    """Delete what is there as well as can be: a folder with all in it; of a link, only the link."""
    with suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _new(path: Path) -> BinaryIO:
    """Return a new file beside another, locked, so that `_sweep` leaves it where it is."""
    while True:
        file = path.with_name(f".{path.name}.new-{secrets.token_hex(4)}").open("xb")
        with suppress(OSError):  # a file system without locks, where nothing is swept
            fcntl.flock(file, fcntl.LOCK_EX)
        if os.path.lexists(file.name):
            return file
        file.close()  # swept before it was locked


def _sweep(path: Path) -> None:
    """Remove new files that a kill left; of a living process they are locked."""
    for new in path.parent.glob(escape(f".{path.name}.new-") + "*"):
        with suppress(OSError):
            descriptor = os.open(new, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                new.unlink()
            finally:
                os.close(descriptor)
