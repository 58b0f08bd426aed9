"""A trace of some steps, for Perfetto, XProf or TensorBoard."""

from pathlib import Path
from typing import Any

import jax

from hfjax.distributed.consensus import say, speaks

PROFILE = "profile"
WRITTEN = (PROFILE, f"{PROFILE}/plugins", f"{PROFILE}/plugins/profile")  # folders


class Profile:
    """Traces the steps FIRST:END, in the first process."""

    def __init__(self, steps: str | None, directory: Path) -> None:
        self._first, self._end = (-1, -1) if steps is None else steps_of(steps)
        self._place, self._running, self._begun = directory / PROFILE, False, steps is None

    def before(self, step: int) -> None:
        """Begin, if this is the first step to trace that this run does."""
        if self._begun or step < self._first or not speaks():
            return
        self._begun = True
        if step >= self._end:
            say(f"no trace: this run goes on after the steps {self._first}:{self._end} to trace")
            return
        self._first = step
        jax.profiler.start_trace(str(self._place), create_perfetto_trace=True)
        self._running = True

    def after(self, step: int) -> None:
        """End, if the last step to trace is done."""
        if step >= self._end - 1:
            self.close()

    def close(self) -> None:
        """End a trace that is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            say(f"trace of steps {self._first} to {self._end - 1}: {self._place}")

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def steps_of(steps: str) -> tuple[int, int]:
    """Return the first step to trace, and the one after the last.

    >>> steps_of("5:8")
    (5, 8)
    """
    first, _, end = steps.partition(":")
    digits = all(word.isdecimal() and len(word) < 10 for word in (first, end))
    if not digits or int(first) >= int(end):
        raise ValueError(f"--profile {steps}: FIRST:END is expected, for instance 5:8.")
    return int(first), int(end)
