"""A step that could not be written: what is told, and the bytes it needs beside those free."""

import shutil
from pathlib import Path

from hfjax.checkpoint.directory import steps_in

REASONS = ("No space left on device", "Disk quota exceeded", "File too large", "Read-only file")


def failed(directory: Path, step: int, needed: int, error: BaseException) -> OSError:
    """Return the error that tells why a step is not saved, and that the others are."""
    steps = ", ".join(map(str, steps_in(directory))) or "none"
    reason = next((r for r in REASONS if r in str(error)), None)
    free = shutil.disk_usage(directory).free
    advice = "Make room (Keep(latest=…) with fewer steps) and save again." if reason else ""
    return OSError(
        f"step {step} was not saved in {directory}: {reason or _last_line(error)}. It needs "
        f"{needed} bytes, {free} are free. Steps saved before are intact: {steps}. {advice}".strip()
    )


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0].strip()}".rstrip(". ")
