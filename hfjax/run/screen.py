"""What a run says: a progress bar and log lines on a terminal, plain lines elsewhere."""

import math
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from hfjax.processes.speech import speaks
from hfjax.run.build import short
from hfjax.sizes import human


class Screen:
    """Speaks in the first process only."""

    def __init__(self, steps: int, done: int = 0):
        self._console = Console(highlight=False, soft_wrap=True, quiet=not speaks())
        self._bar = None
        if self._console.is_terminal and speaks():
            columns = (BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(
                TextColumn("{task.description}"),
                *columns,
                TimeRemainingColumn(),
                console=self._console,
            )
            self._task = self._bar.add_task("step", total=steps, completed=done)

    def __enter__(self) -> "Screen":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, words: str = "") -> None:
        """Print a line, above the progress bar."""
        self._console.print(words, markup=False)

    def advance(self) -> None:
        """Show that another step is done."""
        if self._bar is not None:
            self._bar.advance(self._task)


def line(values: Mapping[str, Any], steps: int) -> str:
    """Return the log line of a step.

    >>> line({"step": 9, "loss": 2.5, "lr": 1e-3, "grad_norm": 0.25, "memory": 2**30}, 300)
    'step  10/300  loss 2.5000  lr 1.00e-03  grad norm 0.250  memory 1.0 GiB'
    """
    number = str(values["step"] + 1).rjust(len(str(steps)))
    told = [f"step {number}/{steps}", f"loss {values['loss']:.4f}", f"lr {values['lr']:.2e}"]
    told.append(f"grad norm {values['grad_norm']:.3f}")
    if "tokens_per_second" in values:
        told.append(f"{short(values['tokens_per_second'])} tokens/s/device")
        told.append(f"{values['tflops']:.3g} TFLOP/s/device")
    if "mfu" in values:
        told.append(f"MFU {values['mfu']:.1%}")
    return "  ".join([*told, f"memory {human(values['memory'])}"])


def validation(step: int, loss: float, tokens: int) -> str:
    """Return the line of a validation."""
    perplexity = math.exp(min(loss, 700.0))
    told = f"loss {loss:.4f}, perplexity {perplexity:.2f}, {tokens} tokens"
    return f"validated after step {step}: {told}"
