"""A directory of checkpoints: which steps it holds, what is no step, what is swept away."""

import os
import shutil
from pathlib import Path

TEMPORARY = ".orbax-checkpoint-tmp"  # in the name of a step that is being written
TRASH = ".deleted"  # steps are moved here at once, then deleted: a kill leaves no half step


def steps_in(directory: Path) -> list[int]:
    """Return the steps that are saved there, in ascending order; none if there is no directory."""
    check_directory(directory)
    if not directory.exists():
        return []
    names = [entry.name for entry in os.scandir(directory) if entry.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal() and str(int(name)) == name)


def check_directory(directory: Path) -> None:
    """Refuse a file where a directory is expected."""
    if directory.exists() and not directory.is_dir():
        raise ValueError(f"{directory} is a file: checkpoints are saved in a directory.")


def make_directory(directory: Path) -> None:
    """Make the directory if it is missing."""
    check_directory(directory)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"{directory} cannot be made: {error.strerror}. Save to a directory in which you may "
            "make files."
        ) from error


def check_step(directory: Path, step: int | None) -> int:
    """Return the step to read: the one asked for, or the latest; refuse what is not there."""
    steps = steps_in(directory)
    if not steps:
        raise ValueError(f"no checkpoint in {directory}: {_found(directory)}.{_hint(directory)}")
    if step is None:
        return steps[-1]
    if step not in steps:
        raise ValueError(f"step {step} is not in {directory}. Saved: {', '.join(map(str, steps))}.")
    return step


def _found(directory: Path) -> str:
    if not directory.exists():
        return "there is no such directory"
    names = sorted(entry.name for entry in os.scandir(directory))
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"found {shown}" if names else "it is empty"


def _hint(directory: Path) -> str:
    """Return where steps are, if they are one floor below or above."""
    below = [p for p in directory.glob("*") if p.is_dir() and steps_in(p)]
    near = [p for p in (*below, directory.parent) if p.is_dir() and steps_in(p)]
    return f" {near[0]} holds steps {steps_in(near[0])}." if near else ""


def sweep(directory: Path) -> None:
    """Delete what is no step: unfinished ones, and the trash."""
    for path in directory.glob(f"*{TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)
    empty_trash(directory)


def empty_trash(directory: Path) -> None:
    """Delete the steps that were moved out of the way."""
    for path in (directory / TRASH).glob("*"):
        shutil.rmtree(path, ignore_errors=True)


def discard(directory: Path, steps: list[int]) -> None:
    """Delete steps; each is gone as a step at once."""
    (directory / TRASH).mkdir(exist_ok=True)
    for step in steps:
        os.replace(directory / str(step), directory / TRASH / str(step))
    empty_trash(directory)


def set_aside(directory: Path, step: int) -> str:
    """Rename a damaged step so that it is none; return its new name."""
    taken = {entry.name for entry in os.scandir(directory)}
    names = [f"{step}.damaged", *(f"{step}.damaged.{n}" for n in range(2, len(taken) + 3))]
    name = next(name for name in names if name not in taken)
    os.replace(directory / str(step), directory / name)
    return name
