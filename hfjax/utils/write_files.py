"""Files and folders that hfjax writes and deletes: never through a link, which may lead anywhere.

A folder may come from somebody else, and its links lead to files of the one who opens it.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from hfjax.utils.read_files import check_ordinary
from hfjax.utils.tables import quote


def user_cache() -> Path:
    """Return where hfjax keeps what it can make again: in the user's cache (XDG_CACHE_HOME)."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfjax"


def check_no_link(path: Path) -> None:
    """Refuse a link where something is to be written or deleted."""
    if path.is_symlink():
        raise ValueError(
            f"{quote(path)} is a link to {quote(os.readlink(path))}: hfjax writes and deletes "
            "nothing through links inside its folders. Take it out "
            f"(rm {quote(path)}), or give another folder."
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


def open_ordinary(path: Path, flags: int) -> int:
    """Return the descriptor of an ordinary file that is there or is made; of no link."""
    check_no_link(path)
    if os.path.lexists(path):
        check_ordinary(path)
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def delete(path: Path) -> None:
    """Delete what is there as well as can be: a folder with all in it; of a link, only the link."""
    with suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)
