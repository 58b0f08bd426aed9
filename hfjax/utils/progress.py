"""A line on standard error while something takes long, and nothing for quick tasks."""

import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import TextIO


@contextmanager
def show_progress(
    task: str, *, first: float = 3.0, every: float = 30.0, out: TextIO | None = None
) -> Iterator[None]:
    """Show a task and its duration, once it has taken `first` seconds.

    On a terminal one line spins and counts until the end, which removes it; elsewhere (a file, a
    job's log) it prints a line every `every` seconds.

    Args:
        task: Name of the task, for instance "compiling".
        first: Seconds before the first output.
        every: Seconds between two lines that are not on a terminal.
        out: The stream to print to. None: `sys.stderr`.

    Example:
        >>> from hfjax.utils.progress import show_progress
        >>> with show_progress("compiling"):  # quick: says nothing
        ...     pass
    """
    done = threading.Event()
    display = _spin if (out := out or sys.stderr).isatty() else _print_lines
    # A daemon: a program that ends inside the block does not wait for this thread.
    thread = threading.Thread(target=display, args=(task, done, first, every, out), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _print_lines(task: str, done: threading.Event, first: float, every: float, out: TextIO) -> None:
    for seconds in _elapsed(done, first, every):
        print(f"{task} … {seconds:.0f} s", file=out, flush=True)


def _spin(task: str, done: threading.Event, first: float, _: float, out: TextIO) -> None:
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
