"""A directory of checkpoints: list its steps, delete steps, sweep away what is not a step.

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

from hfjax.utils.read_files import FOLDER, MISSING, UNREACHED, path_kind, read_text
from hfjax.utils.tables import quote
from hfjax.utils.write_files import check_no_link, delete, open_ordinary

TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a step that is being written
ENDS = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # of a step: Orbax writes them at its end
SWEEPS, PAUSE = 5, 0.05  # after a save that failed: how often, and seconds between
UNREADABLE = "\\"  # in a path: TensorStore takes it for a slash
UNWRITABLE = "*?["  # Orbax takes them for a pattern of names, and saves nothing
TRASH = ".deleted"  # steps are moved here atomically, then deleted: a kill leaves no half step
TRIES = 10  # of a reader to choose a step, while a run deletes one after the other

T = TypeVar("T")


def directory_path(directory: str | os.PathLike) -> Path:
    """Return the path of a directory; an empty one would be the current folder."""
    if not os.fspath(directory):
        raise ValueError(
            f'{directory!r} is no directory of checkpoints. Give its name; "." is the folder at '
            "hand."
        )
    return Path(directory)


def list_steps(directory: Path) -> list[int]:
    """Return the saved steps, in ascending order; none if there is no directory."""
    check_directory(directory)
    if not directory.exists():
        return []
    names = [entry.name for entry in os.scandir(directory) if entry.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def check_directory(directory: Path) -> None:
    """Refuse a path that exists and is not a directory."""
    _check_path(directory, UNREADABLE)
    if not (kind := path_kind(directory)).startswith((FOLDER, MISSING, UNREACHED)):
        raise ValueError(f"{quote(directory)} is {kind}: checkpoints are saved in a directory.")


def _check_path(directory: Path, characters: str) -> None:
    """Refuse a path with one of these characters, or with bytes that are not UTF-8."""
    path = os.path.abspath(directory)
    bad = {c for c in path if c in characters or "\ud800" <= c <= "\udfff"}
    if bad:
        raise ValueError(
            f"{quote(directory)}: checkpoints saved in a folder with {quote(' '.join(bad))} in "
            "its path could not be read again. Rename the folder, or give another."
        )


def make_directory(directory: Path) -> None:
    """Create the directory if it is missing."""
    check_directory(directory)
    _check_path(directory, UNWRITABLE)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{quote(directory)} cannot be made: {error.strerror}. Save to a directory in which "
            "you may make files."
        ) from error


def resolve_step(directory: Path, step: int | None) -> int:
    """Return the step to read: the requested one, or the latest; refuse a missing one."""
    steps = list_steps(directory)
    if not steps:
        raise ValueError(
            f"no checkpoint in {quote(directory)}: {_contents(directory)}.{_hint(directory)}"
        )
    if step is None:
        return steps[-1]
    saved = f"Saved: {', '.join(map(str, steps))}."
    if isinstance(step, bool) or not hasattr(step, "__index__"):
        raise ValueError(f"step={step!r}: a whole number is expected, or None: the latest. {saved}")
    if step not in steps:
        raise ValueError(f"step {step} is not in {quote(directory)}. {saved}")
    return int(step)


class DeletedError(ValueError):
    """A step was deleted while it was read: the run that writes there keeps only some."""

    def __init__(self, step: Path) -> None:
        saved = ", ".join(map(str, list_steps(step.parent))) or "none"
        super().__init__(
            f"step {step.name} of {quote(step.parent)} was deleted while it was read: whoever "
            f"writes there keeps only some steps. Saved now: {saved}. Read one of these, or have "
            "the run keep more (hfjax.RetentionPolicy; --checkpoint.keep-latest, "
            "--checkpoint.keep-period)."
        )


def folder_identity(step: Path) -> list[int]:
    """Return what distinguishes a step's folder from a later one of its name; [] if missing."""
    try:
        stat = os.stat(step)
    except OSError:
        return []
    return [stat.st_ino, stat.st_mtime_ns]


def read_undeleted(step: Path, read: Callable[[Path], T]) -> T:
    """Return `read(step)`; raise `DeletedError` if the step is deleted meanwhile."""
    before = folder_identity(step)
    try:
        answer = read(step)
    except (ValueError, OSError):
        if before and folder_identity(step) == before:
            raise
        raise DeletedError(step) from None
    if folder_identity(step) != before:
        raise DeletedError(step)
    return answer


def retry_if_deleted(step: int | None, read: Callable[[], T]) -> T:
    """Return `read()`; for the latest step (`step` is None), retry if it is deleted meanwhile.

    If the latest is deleted while it is read, there is a later one, which is read in its place.
    """
    for _ in range(TRIES - 1) if step is None else ():
        with suppress(DeletedError):
            return read()
    return read()


def _contents(directory: Path) -> str:
    if not directory.exists():
        return "there is no such directory"
    names = sorted(quote(entry.name) for entry in os.scandir(directory))
    first_names = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"found {first_names}" if names else "it is empty"


def _hint(directory: Path) -> str:
    """Return where steps are, if they are one level below or above."""
    below = [p for p in directory.glob("*") if p.is_dir() and list_steps(p)]
    candidates = [p for p in (*below, directory.parent) if p.is_dir() and list_steps(p)]
    return f" {quote(candidates[0])} holds steps {list_steps(candidates[0])}." if candidates else ""


def sweep(directory: Path) -> None:
    """Delete unfinished steps and the trash."""
    empty_trash(directory)
    for path in directory.glob(f"*{TEMPORARY}*"):
        if path.name.partition(TEMPORARY)[0].isdecimal():
            delete(path)


def sweep_repeatedly(directory: Path) -> None:
    """Sweep after a failed save: its other writes may still run and create folders again."""
    for _ in range(SWEEPS):
        sweep(directory)
        time.sleep(PAUSE)


def delete_unowned(directory: Path, step: int) -> None:
    """Delete what a write has created at the old path of a directory that was moved away.

    A directory that another writer has locked stays as it is.
    """
    if os.path.lexists(directory / NAME):
        return
    for _ in range(SWEEPS):  # as in `sweep_repeatedly`
        delete(directory / f"{step}{TEMPORARY}")
        time.sleep(PAUSE)
    with suppress(OSError):  # not empty, or not there
        directory.rmdir()
        directory.parent.rmdir()


def empty_trash(directory: Path) -> None:
    """Delete the steps in the trash."""
    for path in _trash(directory).glob("*"):
        delete(path)


def _trash(directory: Path) -> Path:
    """Return the trash folder; refuse a link, which may lead to files of somebody else."""
    check_no_link(directory / TRASH)
    return directory / TRASH


def is_hfjax_step(step: Path) -> bool:
    """Return whether hfjax has written a step, rather than another folder named by a number.

    A power failure may have left it empty.
    """
    names = {path.name for path in step.iterdir()}
    return names <= ENDS or not names.isdisjoint(("manifest.json", "meta"))


def discard(directory: Path, steps: list[int]) -> None:
    """Delete steps; each stops being a step atomically."""
    for step in steps:
        if not is_hfjax_step(directory / str(step)):
            raise ValueError(
                f"step {step} of {quote(directory)} was not written by hfjax: it stays. Move it "
                "away, or save to another directory."
            )
    (trash := _trash(directory)).mkdir(exist_ok=True)
    for step in steps:
        os.replace(directory / str(step), trash / str(step))
    empty_trash(directory)


def rename_damaged(directory: Path, step: int) -> str:
    """Rename a damaged step so that it no longer counts as one; return its new name."""
    existing = {entry.name for entry in os.scandir(directory)}
    names = [f"{step}.damaged", *(f"{step}.damaged.{n}" for n in range(2, len(existing) + 3))]
    name = next(name for name in names if name not in existing)
    os.replace(directory / str(step), directory / name)
    return name


NAME = "writer.lock"
LONGEST = 4096  # bytes of the lock file
SEEN = 30.0  # seconds until all machines see what one has written to a shared disk
_LOCKS: dict[str, int] = {}  # file -> descriptor


class WriterLock:
    """The exclusive right to write into a directory, until `release`."""

    def __init__(self, directory: Path) -> None:
        self._file = os.path.join(os.path.realpath(directory), NAME)
        if self._file in _LOCKS:
            raise ValueError(_refusal(directory, "this process itself"))
        descriptor = _open(self._file)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _describe_holder(os.pread(descriptor, LONGEST, 0))
            os.close(descriptor)
            raise ValueError(_refusal(directory, holder)) from None
        _LOCKS[self._file] = descriptor
        with suppress(OSError):  # full disk: the text only tells others who writes
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(_holder_record()).encode())
            os.fsync(descriptor)  # other machines read it
        self.text = os.pread(descriptor, LONGEST, 0).decode()

    def holds(self) -> bool:
        """Return whether the lock file is still in place: its directory may have been moved."""
        descriptor = _LOCKS.get(self._file)
        try:
            stat = os.stat(self._file)
        except OSError:
            return False
        return descriptor is not None and os.path.samestat(stat, os.fstat(descriptor))

    def release(self) -> None:
        """Unlock the directory; a second call does nothing."""
        if (descriptor := _LOCKS.pop(self._file, None)) is not None:
            os.ftruncate(descriptor, 0)
            os.close(descriptor)


def check_locked(directory: Path, location: str, lock: str) -> None:
    """Refuse a directory that is not the one that process 0 has locked, at `location`."""
    end = time.monotonic() + SEEN
    while (actual := _read_lock(directory)) != lock:
        if time.monotonic() > end:
            raise ValueError(
                f"{quote(directory)} is not the directory that process 0 writes to, "
                f"{quote(location)}: {_difference(directory, actual)}. Give all processes one "
                "directory that all of them see: its whole path, on a shared disk."
            )
        time.sleep(PAUSE)
        with suppress(OSError):
            os.listdir(directory.parent)  # NFS then looks up missing files again


def _read_lock(directory: Path) -> str | None:
    """Return the text of a directory's lock file; None if there is no such file."""
    try:
        return read_text(directory / NAME)
    except (ValueError, OSError):
        return None


def _difference(directory: Path, lock: str | None) -> str:
    """Return how a directory is seen to differ from the locked one."""
    if not directory.exists():
        return "there is no such directory"
    return f"it has no {NAME}" if lock is None else f"{_describe_holder(lock)} has locked it"


def _open(file: str) -> int:
    try:
        return open_ordinary(Path(file), os.O_RDWR)
    except OSError as error:
        raise ValueError(
            f"{quote(os.path.dirname(file))} cannot be written: {error.strerror}. Save to a "
            "directory in which you may make files."
        ) from error


def _holder_record() -> dict:
    since = time.strftime("%Y-%m-%d %H:%M:%S")
    return {"host": socket.gethostname(), "pid": os.getpid(), "since": since}


def _describe_holder(lock: str | bytes) -> str:
    try:
        record = json.loads(lock)
        return quote(f"process {record['pid']} on {record['host']} since {record['since']}")
    except (ValueError, KeyError, TypeError):
        return "another process"


def _refusal(directory: Path, holder: str) -> str:
    return (
        f"{quote(directory)} is being written by {holder}: a directory has one writer. Close that "
        "one first, or save elsewhere; to restore, hfjax.restore and hfjax.latest_step need no "
        "lock."
    )
