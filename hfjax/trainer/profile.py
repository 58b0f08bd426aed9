"""A trace of some steps, for Perfetto, XProf or TensorBoard."""

import logging
from pathlib import Path
from typing import Any

import jax

from hfjax.distributed.consensus import speaks

logger = logging.getLogger(__name__)

PROFILE = "profile"
WRITTEN = (PROFILE, f"{PROFILE}/plugins", f"{PROFILE}/plugins/profile")  # folders


class Profile:
    """Traces the steps FIRST:END, in the first process."""

    def __init__(self, steps: str | None, directory: Path) -> None:
        self._first, self._end = (-1, -1) if steps is None else parse_steps(steps)
        self._directory, self._running, self._has_begun = directory / PROFILE, False, steps is None

    def before_step(self, step: int) -> None:
        """Start the trace, if this is the first step to trace that this run does."""
        if self._has_begun or step < self._first or not speaks():
            return
        self._has_begun = True
        if step >= self._end:
            steps = f"{self._first}:{self._end}"
            logger.info("no trace: this run goes on after the steps %s to trace", steps)
            return
        self._first = step
        jax.profiler.start_trace(str(self._directory), create_perfetto_trace=True)
        self._running = True

    def after_step(self, step: int) -> None:
        """Stop the trace, if the last step to trace is done."""
        if step >= self._end - 1:
            self.close()

    def close(self) -> None:
        """Stop a trace that is running."""
        if self._running:
            self._running = False
            jax.profiler.stop_trace()
            first, last = self._first, self._end - 1
            logger.info("trace of steps %d to %d: %s", first, last, self._directory)

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def parse_steps(steps: str) -> tuple[int, int]:
    """Return the first step to trace, and the one after the last.

    >>> parse_steps("5:8")
    (5, 8)
    """
    first, _, end = steps.partition(":")
    digits = all(text.isdecimal() and len(text) < 10 for text in (first, end))
    if not digits or int(first) >= int(end):
        raise ValueError(f"--profile {steps}: FIRST:END is expected, for instance 5:8.")
    return int(first), int(end)
