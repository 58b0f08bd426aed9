"""The folder in which a data set or a model is made, beside its place: swept, however that ends."""

import ctypes
import fcntl
import os
import secrets
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import NoReturn

from hfjax.base.tables import named
from hfjax.base.write_files import delete

OLD = "-old"  # ends the name of a data set that is replaced in two steps
NEW, UNFINISHED = "new-", "unfinished-"  # a folder that is empty, and one that is locked
HERE, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


@contextmanager
def folder_beside(place: Path) -> Iterator[Path]:
    """Give a folder that nobody else writes to; it is gone at the end, unless it was moved.

    So is what it replaced: moved back where nothing has taken its place.
    """
    with ExitStack() as at_end:
        while True:
            token = secrets.token_hex(4)
            new, beside = _named(place, f"{NEW}{token}"), _named(place, f"{UNFINISHED}{token}")
            at_end.callback(_tidy, place, new, beside)
            if (handle := _begun(new, beside)) is not None:
                break
        at_end.callback(os.close, handle)
        yield beside


def _begun(new: Path, beside: Path) -> int | None:
    """Return the lock on a new folder `beside`; None if another maker swept `new` meanwhile."""
    new.mkdir(parents=True)
    try:
        handle = os.open(new, os.O_RDONLY)
    except FileNotFoundError:
        return None
    _locked(handle)  # before it has the name by which `sweep` asks for the lock
    try:
        new.rename(beside)
    except FileNotFoundError:
        os.close(handle)
        return None
    return handle


def _tidy(place: Path, new: Path, beside: Path) -> None:
    """Put back what was to be replaced, if it was not, and delete what is left."""
    old = old_of(beside)
    with holding_signals():
        if old.exists() and not place.exists():
            old.rename(place)
        for path in (new, beside, old):
            delete(path)


def exchanged(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, so that a kill leaves both; return whether that is done.

    Only Linux can, and not on every file system.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return call(HERE, os.fsencode(one), HERE, os.fsencode(other), EXCHANGE) == 0


def old_of(folder: Path) -> Path:
    """Return where the data set waits that such a folder replaces."""
    return folder.with_name(folder.name + OLD)


def sweep(place: Path) -> None:
    """Delete what makers of this data set left that were killed; those at work hold a lock.

    One that was killed while it replaced a data set may have moved that away: it is moved back.
    """
    for path in place.parent.glob(escape(_named(place, NEW).name) + "*"):
        with suppress(OSError):  # its maker may be at work, and makes another one
            path.rmdir()
    for path in place.parent.glob(escape(_named(place, UNFINISHED).name) + "*"):
        maker = path.with_name(path.name.removesuffix(OLD))
        if not _at_work(maker):
            _move_back(old_of(maker), maker, place)
            delete(path)


def check_alone(place: Path) -> None:
    """Refuse a place that a living process is making a folder for."""
    for path in place.parent.glob(escape(_named(place, "unfinished-").name) + "*"):
        if _lock_of(path) is False:
            raise ValueError(
                f"{named(place)} is being written by another process, in {named(path.name)} beside "
                "it. Wait for that one, or give another name."
            )


def _move_back(old: Path, maker: Path, place: Path) -> None:
    if maker.exists() and old.exists() and not place.exists():
        old.rename(place)


def _named(place: Path, what: str) -> Path:
    return place.with_name(f".{place.name}.{what}")


def _at_work(folder: Path) -> bool:
    """Return whether a process may be making something in a folder."""
    return _lock_of(folder) is not True


def _lock_of(folder: Path) -> bool | None:
    """Return whether nobody holds the lock of a folder; None: the file system has no locks."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone, or no folder
        return True
    try:
        return _locked(handle)
    finally:
        os.close(handle)


def _locked(handle: int) -> bool | None:
    """Return whether the lock could be taken: the system frees it when its holder ends."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks, where nothing is swept
        return None
    return True


@contextmanager
def holding_signals() -> Iterator[None]:
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
