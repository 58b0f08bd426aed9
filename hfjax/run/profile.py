"""A trace of some steps, for Perfetto, XProf or TensorBoard."""

from pathlib import Path
from typing import Any

import jax

from hfjax.processes.speech import say, speaks


class Profile:
    """Traces the steps FIRST:END, in the first process."""

    def __init__(self, steps: str | None, directory: Path):
        self._first, self._end = (-1, -1) if steps is None else _range(steps)
        self._place, self._running = directory / "profile", False

    def before(self, step: int) -> None:
        """Begin, if this is the first step to trace."""
        if step == self._first and speaks():
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


def _range(steps: str) -> tuple[int, int]:
    first, _, end = steps.partition(":")
    if not (first.isdigit() and end.isdigit() and int(first) < int(end)):
        raise ValueError(f"--profile {steps}: FIRST:END is expected, for instance 5:8.")
    return int(first), int(end)
