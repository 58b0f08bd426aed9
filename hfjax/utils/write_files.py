"""Write and delete files and folders, never through a link, which may lead anywhere.

A folder may come from somebody else, and its links lead to files of whoever opens it.
"""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from hfjax.utils.read_files import check_ordinary
from hfjax.utils.tables import quote


def user_cache() -> Path:
    """Return hfjax's folder in the user's cache (XDG_CACHE_HOME), for what it can make again."""
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
    """Refuse links under these names of a folder; the folder itself may be a link."""
    for name in names:
        check_no_link(folder / name)


def check_ordinary_files(folder: Path, names: tuple[str, ...]) -> None:
    """Refuse what exists under these names of a folder and is not an ordinary file."""
    for name in names:
        if os.path.lexists(folder / name):
            check_ordinary(folder / name)


def open_ordinary(path: Path, flags: int) -> int:
    """Return the descriptor of an ordinary file, created if missing; refuse a link."""
    check_no_link(path)
    if os.path.lexists(path):
        check_ordinary(path)
    return os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)


def delete(path: Path) -> None:
    """Delete a path as far as possible: a folder with all in it; of a link, only the link."""
    with suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)
