"""One writer at a time: a lock file that the operating system frees when its holder dies."""

import fcntl
import json
import os
import socket
import time
from pathlib import Path

from hfjax.found import check_ordinary

NAME = "writer.lock"
_HELD: dict[str, int] = {}  # file -> descriptor


class WriterLock:
    """The right to write into a directory; `release` gives it back."""

    def __init__(self, directory: Path):
        self._file = os.path.realpath(directory / NAME)
        if self._file in _HELD:
            raise ValueError(_refusal(directory, "this process itself"))
        descriptor = _open(self._file)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _holder(descriptor)
            os.close(descriptor)
            raise ValueError(_refusal(directory, holder)) from None
        _HELD[self._file] = descriptor
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps(_me()).encode())

    def holds(self) -> bool:
        """Return whether the file is still where it was: its directory may have been moved."""
        descriptor = _HELD.get(self._file)
        try:
            there = os.stat(self._file)
        except OSError:
            return False
        return descriptor is not None and os.path.samestat(there, os.fstat(descriptor))

    def release(self) -> None:
        """Give it back; a second time does nothing."""
        if (descriptor := _HELD.pop(self._file, None)) is not None:
            os.ftruncate(descriptor, 0)
            os.close(descriptor)


def _open(file: str) -> int:
    if os.path.lexists(file):
        check_ordinary(Path(file))
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise ValueError(
            f"{os.path.dirname(file)} cannot be written: {error.strerror}. Save to a directory "
            "in which you may make files."
        ) from error


def _me() -> dict:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since}


def _holder(descriptor: int) -> str:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {found['pid']} on {found['host']} since {found['since']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def _refusal(directory: Path, holder: str) -> str:
    return (
        f"{directory} is being written by {holder}: a directory has one writer. Close that one "
        "first, or save elsewhere; to restore, hfjax.restore and hfjax.latest need no lock."
    )
