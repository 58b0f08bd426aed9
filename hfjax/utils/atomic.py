"""A file or a folder appears whole or not at all: made in a hidden folder beside it, then moved.

The hidden folder is `.NAME.unfinished-1a2b3c4d`. Whoever makes something there holds its lock,
which the system frees when that process dies: so `sweep` deletes what a kill left, and nothing of
makers at work.
"""

import ctypes
import errno
import fcntl
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import BinaryIO, NoReturn

from hfjax.utils.tables import named
from hfjax.utils.write_files import check_no_link, delete

NEW, OLD = "new", "old"  # in the hidden folder: what is being made, and what it replaces
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Give a new file, which takes the place of another in one piece: when it is whole.

    Of two that are written at the same time each is whole.
    """
    check_no_link(path)
    try:
        with _folder_beside(path) as folder, (folder / NEW).open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
    except OSError as wrong:
        raise OSError(wrong.errno, wrong.strerror, str(path)) from None


def replace_text(path: Path, text: str) -> None:
    """Write a file in one piece: the one that is there stays until the new one is whole."""
    with replacing(path) as file:
        file.write(text.encode())


@contextmanager
def atomic_directory(place: Path, replace: bool = False) -> Iterator[Path]:
    """Give an empty folder, which is moved to its place at the end; after an error nothing is left.

    Args:
        place: Where it is to be.
        replace: Whether it may take the place of a folder, which then is deleted.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    with _folder_beside(place) as folder:
        (new := folder / NEW).mkdir()
        yield new
        for path in (*new.rglob("*"), new):
            _to_disk(path)
        _move(new, place, replace)
        _to_disk(place.parent)


def _move(new: Path, place: Path, replace: bool) -> None:
    """Move a folder to its place: at once where the system can exchange two, else in two steps."""
    if replace and place.exists():
        if exchanged(new, place):
            return
        place.rename(new.with_name(OLD))
    try:
        new.rename(place)
    except OSError as wrong:
        if wrong.errno in (errno.ENOTEMPTY, errno.EEXIST):
            what = "somebody else wrote here meanwhile"
            raise FileExistsError(wrong.errno, what, str(place)) from None
        raise


def exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, so that a kill leaves both; return whether that is done.

    Only Linux can, and not on every file system.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return call(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _folder_beside(place: Path) -> Iterator[Path]:
    """Give a locked folder that nobody else writes to, deleted at the end with what is in it."""
    sweep(place)
    with ExitStack() as at_end:
        while True:
            folder = place.with_name(f"{_prefix(place)}{secrets.token_hex(4)}")
            at_end.callback(_tidy, folder, place)
            folder.mkdir()
            free = at_end.enter_context(_locked(folder))
            if free is not False and folder.exists():  # else swept before it was locked
                break
        yield folder


def sweep(place: Path) -> None:
    """Delete what makers of this file or folder left that were killed."""
    for path in _unfinished(place):
        with _locked(path) as free:
            if free:
                _tidy(path, place)


def check_alone(place: Path) -> None:
    """Refuse a place that a living process is making a folder for."""
    for path in _unfinished(place):
        with _locked(path) as free:
            if free is False:
                raise ValueError(
                    f"{named(place)} is being written by another process, in {named(path.name)} "
                    "beside it. Wait for that one, or give another name."
                )


def _prefix(place: Path) -> str:
    return f".{place.name}.unfinished-"


def _unfinished(place: Path) -> list[Path]:
    return list(place.parent.glob(escape(_prefix(place)) + "*"))


@contextmanager
def _locked(folder: Path) -> Iterator[bool | None]:
    """Hold the lock of a folder, and give whether nobody else does.

    True also of what is gone or no folder; None where the file system has no locks: nothing is
    swept there.
    """
    free: bool | None = True
    with ExitStack() as at_end:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            at_end.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as wrong:
                free = False if isinstance(wrong, BlockingIOError) else None
        yield free


def _tidy(folder: Path, place: Path) -> None:
    """Put back what was to be replaced, if it was not, and delete what is left."""
    old = folder / OLD
    with _holding_signals():
        ours = not folder.is_symlink() and (folder / NEW).exists()
        if ours and old.exists() and not place.exists():
            old.rename(place)
        delete(folder)


@contextmanager
def _holding_signals() -> Iterator[None]:
    """Let SIGTERM and Ctrl-C wait for what must not be left half done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    usual = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    ours = [number for number, answer in usual.items() if callable(answer)]
    for number in ours:
        signal.signal(number, lambda number, _: held.append(number))
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, usual[number])
        for number in held[:1]:
            signal.raise_signal(number)


@contextmanager
def sweeping_at_sigterm() -> Iterator[None]:
    """Let SIGTERM end the program in order, so that what is unfinished is swept.

    Where a program answers SIGTERM in another way, or in a thread, nothing changes.
    """
    usual = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not usual or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)
