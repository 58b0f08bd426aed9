"""Output of many processes in one place: whole lines, each tagged with its process."""

import os
import threading
import time
from typing import IO, BinaryIO

REDRAW = 1.0  # seconds between two states of a progress bar that are shown
ONE_LINE = threading.Lock()  # at a time, of all processes
GREETING = b"[Gloo] Rank "  # of each process, at each meeting of a CPU's collectives
COLOURS = (36, 33, 35, 32, 34, 31)


def tag(process: int, colour: bool) -> bytes:
    """Return what stands before each line of a process.

    >>> tag(3, colour=False)
    b'[3] '
    """
    if not colour:
        return f"[{process}] ".encode()
    return f"\x1b[{COLOURS[process % len(COLOURS)]}m[{process}]\x1b[0m ".encode()


def visible(line: bytes) -> bytes:
    r"""Return what a terminal would show of a line that was drawn several times.

    >>> visible(b" 10%\r 50%\r100%\r")
    b'100%'
    """
    return next((drawn for drawn in reversed(line.split(b"\r")) if drawn), b"")


class Lines(threading.Thread):
    """Copies a process's stream to ours, line by line; of a progress bar one state a second."""

    def __init__(self, source: IO[bytes], target: BinaryIO, tag: bytes):
        super().__init__(name="hfjax output", daemon=True)
        self.source, self.target, self.tag = source, target, tag
        self._rest = b""
        self._drawn = float("-inf")
        self._shown = False  # all of the line that is being drawn

    def run(self) -> None:
        """Copy until the stream ends."""
        while chunk := os.read(self.source.fileno(), 65536):
            self.take(chunk)
        self.end()
        self.source.close()

    def take(self, chunk: bytes) -> None:
        """Write the lines that are whole now, or the state of one that is being drawn."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            if visible(line) or not self._shown:
                self._write(visible(line))
            self._shown = False
        drawn, mark, latest = self._rest.rpartition(b"\r")
        if visible(drawn):
            self._rest = self._redraw(visible(drawn)) + mark + latest

    def end(self) -> None:
        """Write what was left without an end of line."""
        if visible(self._rest):
            self._write(visible(self._rest))

    def _redraw(self, drawn: bytes) -> bytes:
        """Show a state of a line, if it is time, and forget it; else return it."""
        if time.monotonic() - self._drawn < REDRAW:
            return drawn
        self._drawn, self._shown = time.monotonic(), True
        self._write(drawn)
        return b""

    def _write(self, line: bytes) -> None:
        """Write a line at once; go on reading when nobody reads ours any more."""
        if line.startswith(GREETING):
            return
        with ONE_LINE:
            try:
                self.target.write(self.tag + line + b"\n")
                self.target.flush()
            except (OSError, ValueError):
                self.target = open(os.devnull, "wb")
