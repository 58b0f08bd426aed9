"""Write files and folders atomically: in a hidden folder beside the target, then moved there.

The hidden folder is `.NAME.unfinished-1a2b3c4d`. Its writer holds its lock, which the system frees
when that process dies: so `sweep` deletes what a killed writer left, and nothing of running ones.
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

from hfjax.utils.tables import quote
from hfjax.utils.write_files import check_no_link, delete

NEW, OLD = "new", "old"  # in the hidden folder: what is being made, and what it replaces
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # of Linux


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file, which replaces the one at `path` atomically once it is complete.

    Of two that are written at the same time each is complete.
    """
    check_no_link(path)
    try:
        with _temporary_folder(path) as folder, (folder / NEW).open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(file.name, path)
    except OSError as wrong:
        raise OSError(wrong.errno, wrong.strerror, str(path)) from None


def replace_text(path: Path, text: str) -> None:
    """Write a file atomically: an existing one stays until the new one is complete."""
    with atomic_file(path) as file:
        file.write(text.encode())


@contextmanager
def atomic_directory(target: Path, replace: bool = False) -> Iterator[Path]:
    """Yield an empty folder, which is moved to its place at the end; an error leaves nothing.

    Args:
        target: The final path of the folder.
        replace: Whether it may replace an existing folder, which is then deleted.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with _temporary_folder(target) as folder:
        (new := folder / NEW).mkdir()
        yield new
        for path in (*new.rglob("*"), new):
            _fsync(path)
        _move(new, target, replace)
        _fsync(target.parent)


def _move(new: Path, target: Path, replace: bool) -> None:
    """Move a folder to its place: atomically if the system can exchange two, else in two steps."""
    if replace and target.exists():
        if exchange_folders(new, target):
            return
        target.rename(new.with_name(OLD))
    try:
        new.rename(target)
    except OSError as wrong:
        if wrong.errno in (errno.ENOTEMPTY, errno.EEXIST):
            message = "somebody else wrote here meanwhile"
            raise FileExistsError(wrong.errno, message, str(target)) from None
        raise


def exchange_folders(first: Path, second: Path) -> bool:
    """Exchange two folders atomically, so that a kill leaves both; return whether it was done.

    Only Linux can, and not on every file system.
    """
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return call(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def _temporary_folder(target: Path) -> Iterator[Path]:
    """Yield a locked folder that nobody else writes to; delete it with its contents at the end."""
    sweep(target)
    with ExitStack() as stack:
        while True:
            folder = target.with_name(f"{_prefix(target)}{secrets.token_hex(4)}")
            stack.callback(_clean_up, folder, target)
            folder.mkdir()
            is_free = stack.enter_context(_lock(folder))
            if is_free is not False and folder.exists():  # else swept before it was locked
                break
        yield folder


def sweep(target: Path) -> None:
    """Delete what killed writers of this file or folder left."""
    for path in _find_unfinished(target):
        with _lock(path) as is_free:
            if is_free:
                _clean_up(path, target)


def check_no_writer(target: Path) -> None:
    """Refuse a target that a running process is writing."""
    for path in _find_unfinished(target):
        with _lock(path) as is_free:
            if is_free is False:
                raise ValueError(
                    f"{quote(target)} is being written by another process, in {quote(path.name)} "
                    "beside it. Wait for that one, or give another name."
                )


def _prefix(target: Path) -> str:
    return f".{target.name}.unfinished-"


def _find_unfinished(target: Path) -> list[Path]:
    return list(target.parent.glob(escape(_prefix(target)) + "*"))


@contextmanager
def _lock(folder: Path) -> Iterator[bool | None]:
    """Hold the lock of a folder, and yield whether nobody else does.

    True also if it is gone or not a folder; None where the file system has no locks: nothing is
    swept there.
    """
    is_free: bool | None = True
    with ExitStack() as stack:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            stack.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as wrong:
                is_free = False if isinstance(wrong, BlockingIOError) else None
        yield is_free


def _clean_up(folder: Path, target: Path) -> None:
    """Put back the folder to replace, if it was not replaced, and delete what is left."""
    old = folder / OLD
    with _defer_signals():
        is_ours = not folder.is_symlink() and (folder / NEW).exists()
        if is_ours and old.exists() and not target.exists():
            old.rename(target)
        delete(folder)


@contextmanager
def _defer_signals() -> Iterator[None]:
    """Defer SIGTERM and Ctrl-C to the end of a block that must not be left half done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    handled = [number for number, handler in handlers.items() if callable(handler)]
    for number in handled:
        signal.signal(number, lambda number, _: deferred.append(number))
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, handlers[number])
        for number in deferred[:1]:
            signal.raise_signal(number)


@contextmanager
def exit_on_sigterm() -> Iterator[None]:
    """Let SIGTERM end the program by an orderly exit, so that unfinished files are swept.

    If the program handles SIGTERM in another way, or in a thread, nothing changes.
    """
    is_default = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not is_default or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)
