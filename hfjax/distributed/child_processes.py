"""Child processes of a job: start them, print their output, end them with all they started.

Output of many processes goes to one place: whole lines, each tagged with its process.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, BinaryIO

from hfjax.distributed import supervisor
from hfjax.utils.command_errors import to_nowhere

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

    def __init__(
        self,
        source: IO[bytes],
        target: BinaryIO,
        tag: bytes,
        lost: Callable[[Exception], Any] = lambda _: None,
    ) -> None:
        super().__init__(name="hfjax output", daemon=True)
        self.source, self.target, self.tag, self.lost = source, target, tag, lost
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
        """Write a line at once; tell if ours cannot be written any more, and go on reading."""
        if line.startswith(GREETING):
            return
        with ONE_LINE:
            try:
                self.target.write(self.tag + line + b"\n")
                self.target.flush()
            except (OSError, ValueError) as error:
                to_nowhere(self.target)
                self.target = open(os.devnull, "wb")
                self.lost(error)


DRAIN = 2.0  # seconds to read what a process that ended has written


class Guardian:
    """A process that ends the children's groups if this one dies, even by SIGKILL."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(supervisor.__file__))],
            stdin=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,  # each note is one write, from whichever thread
        )

    def note(self, sign: str, pid: int) -> None:
        """Tell that a group has begun (+) or ended (-)."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{sign} {pid}\n".encode())

    def __enter__(self) -> "Guardian":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


@dataclass(frozen=True)
class Lost:
    """Standard output cannot be written any more: its reader has left, or its disk is full."""

    error: Exception

    def __str__(self) -> str:
        return f"standard output: {getattr(self.error, 'strerror', self.error)}"


@dataclass(frozen=True)
class Ended:
    """What became of a child: its exit status, negative for a signal."""

    child: "Child"
    status: int


class Child:
    """One process of the job, the first of its own process group."""

    def __init__(
        self,
        process: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        tagged: bool,
        events: SimpleQueue,
        guardian: Guardian,
    ) -> None:
        self.process, self.guardian, self.events = process, guardian, events
        pipe = subprocess.PIPE if tagged else None
        self._popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL if tagged else None,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        guardian.note("+", self._popen.pid)
        self._lines = self._listen() if tagged else []
        threading.Thread(target=self._wait, name="hfjax child", daemon=True).start()

    def _listen(self) -> list[Lines]:
        """Start to copy both streams, tagged."""
        to_lines = lambda source, target, *lost: Lines(
            source,
            target.buffer,
            tag(self.process, target.isatty() and "NO_COLOR" not in os.environ),
            *lost,
        )
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        lost = lambda error: self.events.put(Lost(error))
        lines = [
            to_lines(self._popen.stdout, sys.stdout, lost),
            to_lines(self._popen.stderr, sys.stderr),
        ]
        for one in lines:
            one.start()
        return lines

    def _wait(self) -> None:
        status = self._popen.wait()
        self.kill()  # what it started and left behind
        self.guardian.note("-", self._popen.pid)
        self.events.put(Ended(self, status))

    def send(self, number: int) -> None:
        """Send a signal to the process itself, which knows how to end what it started."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def kill(self) -> None:
        """Kill the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def suspended(self) -> list[int]:
        """Return which of its processes are suspended; none where the system does not tell."""
        return suspended(self._popen.pid)

    def drain(self) -> None:
        """Wait until what it wrote has been copied."""
        for lines in self._lines:
            lines.join(DRAIN)


def suspended(group: int) -> list[int]:
    """Return the processes of a group that a signal or a debugger has suspended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, own = path.read_text().rpartition(")")[2].split()[:3]
            if state in "Tt" and int(own) == group:
                found.append(int(path.parent.name))
    return sorted(found)
