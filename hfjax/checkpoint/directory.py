"""A directory of checkpoints: which steps it holds, what is no step, what is swept away.

`WriterLock` admits one writer at a time: the operating system frees it when its holder dies.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from hfjax.utils.read_files import FOLDER, MISSING, UNREACHED, contents, what_is
from hfjax.utils.tables import named
from hfjax.utils.write_files import check_no_link, delete, opened

TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a step that is being written
ENDS = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # of a step: Orbax writes them at its end
SWEEPS, PAUSE = 5, 0.05  # after a save that failed: how often, and seconds between
UNREADABLE = "\\"  # in a path: TensorStore takes it for a slash
UNWRITABLE = "*?["  # Orbax takes them for a pattern of names, and saves nothing
TRASH = ".deleted"  # steps are moved here at once, then deleted: a kill leaves no half step
TRIES = 10  # steps that a reader chooses while a run deletes one after the other

T = TypeVar("T")


def folder_of(directory: str | os.PathLike) -> Path:
    """Return the path of a directory; an empty one would be the folder at hand."""
    if not os.fspath(directory):
        raise ValueError(
            f'{directory!r} is no directory of checkpoints. Give its name; "." is the folder at '
            "hand."
        )
    return Path(directory)


def steps_in(directory: Path) -> list[int]:
    """Return the steps that are saved there, in ascending order; none if there is no directory."""
    check_directory(directory)
    if not directory.exists():
        return []
    names = [entry.name for entry in os.scandir(directory) if entry.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def check_directory(directory: Path) -> None:
    """Refuse what is there, and no directory."""
    _check_path(directory, UNREADABLE)
    if not (kind := what_is(directory)).startswith((FOLDER, MISSING, UNREACHED)):
        raise ValueError(f"{named(directory)} is {kind}: checkpoints are saved in a directory.")


def _check_path(directory: Path, characters: str) -> None:
    """Refuse a path with characters, or bytes that are no UTF-8, that mean something else."""
    path = os.path.abspath(directory)
    found = {c for c in path if c in characters or "\ud800" <= c <= "\udfff"}
    if found:
        raise ValueError(
            f"{named(directory)}: checkpoints saved in a folder with {named(' '.join(found))} in "
            "its path could not be read again. Rename the folder, or give another."
        )


def make_directory(directory: Path) -> None:
    """Make the directory if it is missing."""
    check_directory(directory)
    _check_path(directory, UNWRITABLE)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{named(directory)} cannot be made: {error.strerror}. Save to a directory in which "
            "you may make files."
        ) from error


def check_step(directory: Path, step: int | None) -> int:
    """Return the step to read: the one asked for, or the latest; refuse what is not there."""
    steps = steps_in(directory)
    if not steps:
        raise ValueError(
            f"no checkpoint in {named(directory)}: {_found(directory)}.{_hint(directory)}"
        )
    if step is None:
        return steps[-1]
    saved = f"Saved: {', '.join(map(str, steps))}."
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise ValueError(f"step={step!r}: a whole number is expected, or None: the latest. {saved}")
    if step not in steps:
        raise ValueError(f"step {step} is not in {named(directory)}. {saved}")
    return int(step)


class DeletedError(ValueError):
    """A step is deleted while it is read: the run that writes there keeps only some."""

    def __init__(self, step: Path) -> None:
        saved = ", ".join(map(str, steps_in(step.parent))) or "none"
        super().__init__(
            f"step {step.name} of {named(step.parent)} was deleted while it was read: whoever "
            f"writes there keeps only some steps. Saved now: {saved}. Read one of these, or have "
            "the run keep more (hfjax.Keep; --checkpoints.keep, --checkpoints.keep-every)."
        )


def identity(step: Path) -> list[int]:
    """Return what tells the folder of a step from a later one of the same name; [] if none is."""
    try:
        found = os.stat(step)
    except OSError:
        return []
    return [found.st_ino, found.st_mtime_ns]


def ask_whole(step: Path, ask: Callable[[Path], T]) -> T:
    """Return `ask(step)`; if the step is deleted meanwhile, raise that, not what comes of it."""
    before = identity(step)
    try:
        answer = ask(step)
    except (ValueError, OSError):
        if before and identity(step) == before:
            raise
        raise DeletedError(step) from None
    if identity(step) != before:
        raise DeletedError(step)
    return answer


def read_step(step: int | None, read: Callable[[], T]) -> T:
    """Return what `read()` says of a step, None: of the latest.

    If the latest is deleted while it is read, a later one is there: it is read in its place.
    """
    for _ in range(TRIES - 1) if step is None else ():
        with suppress(DeletedError):
            return read()
    return read()


def _found(directory: Path) -> str:
    if not directory.exists():
        return "there is no such directory"
    names = sorted(named(entry.name) for entry in os.scandir(directory))
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"found {shown}" if names else "it is empty"


def _hint(directory: Path) -> str:
    """Return where steps are, if they are one floor below or above."""
    below = [p for p in directory.glob("*") if p.is_dir() and steps_in(p)]
    near = [p for p in (*below, directory.parent) if p.is_dir() and steps_in(p)]
    return f" {named(near[0])} holds steps {steps_in(near[0])}." if near else ""


def sweep(directory: Path) -> None:
    """Delete what is no step: unfinished ones, and the trash."""
    empty_trash(directory)
    for path in directory.glob(f"*{TEMPORARY}*"):
        if path.name.partition(TEMPORARY)[0].isdecimal():
            delete(path)


def sweep_behind(directory: Path) -> None:
    """Sweep after a save that failed: its other writes may still run and make folders again."""
    for _ in range(SWEEPS):
        sweep(directory)
        time.sleep(PAUSE)


def delete_unowned(directory: Path, step: int) -> None:
    """Delete what a write has made where a directory was before it was moved away.

    A directory that another writer has taken stays as it is.
    """
    if os.path.lexists(directory / NAME):
        return
    for _ in range(SWEEPS):  # as in `sweep_behind`
        delete(directory / f"{step}{TEMPORARY}")
        time.sleep(PAUSE)
    with suppress(OSError):  # not empty, or not there
        directory.rmdir()
        directory.parent.rmdir()


def empty_trash(directory: Path) -> None:
    """Delete the steps that were moved out of the way."""
    for path in _trash(directory).glob("*"):
        delete(path)


def _trash(directory: Path) -> Path:
    """Return where steps are deleted; a link would lead to what somebody else has."""
    check_no_link(directory / TRASH)
    return directory / TRASH


def is_ours(step: Path) -> bool:
    """Return whether hfjax has written a step; what else has a number for its name is not.

    A power failure may have left an empty folder of it.
    """
    names = {path.name for path in step.iterdir()}
    return names <= ENDS or not names.isdisjoint(("manifest.json", "meta"))


def discard(directory: Path, steps: list[int]) -> None:
    """Delete steps; each is gone as a step at once."""
    for step in steps:
        if not is_ours(directory / str(step)):
            raise ValueError(
                f"step {step} of {named(directory)} was not written by hfjax: it stays. Move it "
                "away, or save to another directory."
            )
    (trash := _trash(directory)).mkdir(exist_ok=True)
    for step in steps:
        os.replace(directory / str(step), trash / str(step))
    empty_trash(directory)


def set_aside(directory: Path, step: int) -> str:
    """Rename a damaged step so that it is none; return its new name."""
    taken = {entry.name for entry in os.scandir(directory)}
    names = [f"{step}.damaged", *(f"{step}.damaged.{n}" for n in range(2, len(taken) + 3))]
    name = next(name for name in names if name not in taken)
    os.replace(directory / str(step), directory / name)
    return name


NAME = "writer.lock"
LONGEST = 4096  # bytes of it
SEEN = 30.0  # seconds until all machines see what one has written to a shared disk
_HELD: dict[str, int] = {}  # file -> descriptor


class WriterLock:
    """The right to write into a directory; `release` gives it back."""

    def __init__(self, directory: Path) -> None:
        self._file = os.path.join(os.path.realpath(directory), NAME)
        if self._file in _HELD:
            raise ValueError(_refusal(directory, "this process itself"))
        descriptor = _open(self._file)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _holder(os.pread(descriptor, LONGEST, 0))
            os.close(descriptor)
            raise ValueError(_refusal(directory, holder)) from None
        _HELD[self._file] = descriptor
        with suppress(OSError):  # of a full disk: it only tells others who writes
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(_me()).encode())
            os.fsync(descriptor)  # other machines read it
        self.text = os.pread(descriptor, LONGEST, 0).decode()

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


def check_locked(directory: Path, place: str, lock: str) -> None:
    """Refuse a directory that is not the one that process 0 has locked at a place."""
    end = time.monotonic() + SEEN
    while (found := _lock_in(directory)) != lock:
        if time.monotonic() > end:
            raise ValueError(
                f"{named(directory)} is not the directory that process 0 writes to, "
                f"{named(place)}: {_difference(directory, found)}. Give all processes one "
                "directory that all of them see: its whole path, on a shared disk."
            )
        time.sleep(PAUSE)
        with suppress(OSError):
            os.listdir(directory.parent)  # NFS then looks again for what was not there


def _lock_in(directory: Path) -> str | None:
    """Return what its writer wrote into a directory; None if there is no such file."""
    try:
        return contents(directory / NAME)
    except (ValueError, OSError):
        return None


def _difference(directory: Path, lock: str | None) -> str:
    """Return why a directory is another one than that which is locked."""
    if not directory.exists():
        return "there is no such directory"
    return f"it has no {NAME}" if lock is None else f"{_holder(lock)} has locked it"


def _open(file: str) -> int:
    try:
        return opened(Path(file), os.O_RDWR)
    except OSError as error:
        raise ValueError(
            f"{named(os.path.dirname(file))} cannot be written: {error.strerror}. Save to a "
            "directory in which you may make files."
        ) from error


def _me() -> dict:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since}


def _holder(lock: str | bytes) -> str:
    try:
        found = json.loads(lock)
        return named(f"process {found['pid']} on {found['host']} since {found['since']}")
    except (ValueError, KeyError, TypeError):
        return "another process"


def _refusal(directory: Path, holder: str) -> str:
    return (
        f"{named(directory)} is being written by {holder}: a directory has one writer. Close that "
        "one first, or save elsewhere; to restore, hfjax.restore and hfjax.latest need no lock."
    )
