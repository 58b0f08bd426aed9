"""A step that could not be written: what is told, and the bytes it needs beside those free."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from hfjax.checkpoint.directory import steps_in

NO_ROOM = ("No space left on device", "Disk quota exceeded", "File too large")
LATE = ("DEADLINE_EXCEEDED", "Timed out while waiting")  # for others: what is behind comes first


def failed(directory: Path, step: int, needed: int, error: BaseException) -> OSError:
    """Return the error that tells why a step is not saved, and that the others are."""
    steps = ", ".join(map(str, steps_in(directory))) or "none"
    there = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(there).free
    no_room, reason = _reason(list(_chain(error)))
    advice = " Make room (Keep(latest=…) with fewer steps) and save again." if no_room else ""
    return OSError(
        f"step {step} was not saved in {directory}: {reason}. It needs {needed} bytes, {free} are "
        f"free. Steps saved before are intact: {steps}.{advice}"
    )


def _reason(errors: list[BaseException]) -> tuple[bool, str]:
    """Return whether there was no room, and the reason in a few words."""
    texts = [str(error) for error in errors]
    if found := [words for words in NO_ROOM for text in texts if words in text]:
        return True, found[0]
    own = [error for error in errors if not any(words in str(error) for words in LATE)]
    if not own:
        return False, "another process did not write its part in time; its own error tells why"
    first = next(iter(str(own[0]).splitlines()), "").strip().rstrip(".")
    return False, f"{type(own[0]).__name__}: {first}"


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Return an error and those behind it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
