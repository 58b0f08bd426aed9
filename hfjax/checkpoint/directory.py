"""A directory of checkpoints: which steps it holds, what is no step, what is swept away.

`WriterLock` admits one writer at a time: the operating system frees it when its holder dies.
"""

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from pathlib import Path

from hfjax.base.read_files import FOLDER, MISSING, UNREACHED, what_is
from hfjax.base.tables import named
from hfjax.base.write_files import check_no_link, delete, opened

TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a step that is being written
ENDS = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # of a step: Orbax writes them at its end
SWEEPS, PAUSE = 5, 0.05  # after a save that failed: how often, and seconds between
UNREADABLE = "\\"  # in a path: TensorStore takes it for a slash
UNWRITABLE = "*?["  # Orbax takes them for a pattern of names, and saves nothing
TRASH = ".deleted"  # steps are moved here at once, then deleted: a kill leaves no half step


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
            holder = _holder(descriptor)
            os.close(descriptor)
            raise ValueError(_refusal(directory, holder)) from None
        _HELD[self._file] = descriptor
        with suppress(OSError):  # of a full disk: it only tells others who writes
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


def _holder(descriptor: int) -> str:
    try:
        found = json.loads(os.pread(descriptor, 4096, 0))
        return named(f"process {found['pid']} on {found['host']} since {found['since']}")
    except (ValueError, KeyError, TypeError):
        return "another process"


def _refusal(directory: Path, holder: str) -> str:
    return (
        f"{named(directory)} is being written by {holder}: a directory has one writer. Close that "
        "one first, or save elsewhere; to restore, hfjax.restore and hfjax.latest need no lock."
    )
