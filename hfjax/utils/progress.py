"""Says what takes long, in the log or on a terminal, and nothing for quick tasks."""

import logging
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import TextIO

logger = logging.getLogger(__name__)


@contextmanager
def show_progress(
    task: str, *, first: float = 3.0, every: float = 30.0, terminal: TextIO | None = None
) -> Iterator[None]:
    """Log a task and its duration, once it has taken `first` seconds.

    On a terminal (`use_terminal`) one line spins and counts until the end, which removes it;
    elsewhere a line is logged every `every` seconds.

    Args:
        task: Name of the task, for instance "compiling".
        first: Seconds before the first output.
        every: Seconds between two lines of the log.
        terminal: The terminal to show it on. None: that of `use_terminal`, or else the log.

    Example:
        >>> from hfjax.utils.progress import show_progress
        >>> with show_progress("compiling"):  # quick: says nothing
        ...     pass
    """
    done, terminal = threading.Event(), terminal or _terminal
    if terminal is not None:
        display = lambda: _spin(task, done, first, terminal)
    else:
        display = lambda: _log_lines(task, done, first, every)
    # A daemon: a program that ends inside the block does not wait for this thread.
    thread = threading.Thread(target=display, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


_terminal: TextIO | None = None


@contextmanager
def use_terminal(stream: TextIO) -> Iterator[None]:
    """Show progress on a stream, if it is a terminal, and not in the log."""
    global _terminal
    previous, _terminal = _terminal, stream if stream.isatty() else None
    try:
        yield
    finally:
        _terminal = previous


def _log_lines(task: str, done: threading.Event, first: float, every: float) -> None:
    for seconds in _elapsed(done, first, every):
        logger.info("%s … %.0f s", task, seconds)


def _spin(task: str, done: threading.Event, first: float, out: TextIO) -> None:
    width, longest = shutil.get_terminal_size().columns - 1, 0
    for seconds, frame in zip(_elapsed(done, first, 0.2), cycle("|/-\\"), strict=False):
        line = f"{frame} {task} … {seconds:.0f} s"[:width]
        longest = max(longest, len(line))
        print(f"\r{line}", end="", file=out, flush=True)
    if longest:
        print(f"\r{' ' * longest}\r", end="", file=out, flush=True)


def _elapsed(done: threading.Event, first: float, every: float) -> Iterator[float]:
    """Yield the seconds since the start: after `first`, then every `every`, until it is done."""
    began, wait = time.monotonic(), first
    while not done.wait(wait):
        yield time.monotonic() - began
        wait = every
