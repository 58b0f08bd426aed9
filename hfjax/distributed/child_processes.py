"""Child processes of a job: start them, print their output, kill them with all they started.

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
from hfjax.utils.command_errors import redirect_to_null

REDRAW = 1.0  # seconds between two states of a progress bar that are shown
WRITE_LOCK = threading.Lock()  # one line at a time, of all processes
GREETING = b"[Gloo] Rank "  # printed by each process whenever CPU collectives connect
COLOURS = (36, 33, 35, 32, 34, 31)


def tag(process: int, colour: bool) -> bytes:
    """Return the prefix of each line of a process.

    >>> tag(3, colour=False)
    b'[3] '
    """
    if not colour:
        return f"[{process}] ".encode()
    return f"\x1b[{COLOURS[process % len(COLOURS)]}m[{process}]\x1b[0m ".encode()


def visible_text(line: bytes) -> bytes:
    r"""Return what a terminal would show of a line that was drawn several times.

    >>> visible_text(b" 10%\r 50%\r100%\r")
    b'100%'
    """
    return next((state for state in reversed(line.split(b"\r")) if state), b"")


class LineCopier(threading.Thread):
    """Copies a process's stream to ours, line by line; a progress bar once a second."""

    def __init__(
        self,
        source: IO[bytes],
        target: BinaryIO,
        tag: bytes,
        on_loss: Callable[[Exception], Any] = lambda _: None,
    ) -> None:
        super().__init__(name="hfjax output", daemon=True)
        self.source, self.target, self.tag, self.on_loss = source, target, tag, on_loss
        self._pending = b""
        self._redraw_time = float("-inf")
        self._is_shown = False  # whether all of the line being drawn is shown

    def run(self) -> None:
        """Copy until the stream ends."""
        while chunk := os.read(self.source.fileno(), 65536):
            self.feed(chunk)
        self.end()
        self.source.close()

    def feed(self, chunk: bytes) -> None:
        """Write the lines that are complete, or the state of one that is being drawn."""
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            if visible_text(line) or not self._is_shown:
                self._write(visible_text(line))
            self._is_shown = False
        bar_state, mark, latest = self._pending.rpartition(b"\r")
        if visible_text(bar_state):
            self._pending = self._show_if_due(visible_text(bar_state)) + mark + latest

    def end(self) -> None:
        """Write what was left without an end of line."""
        if visible_text(self._pending):
            self._write(visible_text(self._pending))

    def _show_if_due(self, bar_state: bytes) -> bytes:
        """Write a state of a line and return nothing of it, if it is time; else return it."""
        if time.monotonic() - self._redraw_time < REDRAW:
            return bar_state
        self._redraw_time, self._is_shown = time.monotonic(), True
        self._write(bar_state)
        return b""

    def _write(self, line: bytes) -> None:
        """Write and flush a line; report if ours cannot be written any more, and go on reading."""
        if line.startswith(GREETING):
            return
        with WRITE_LOCK:
            try:
                self.target.write(self.tag + line + b"\n")
                self.target.flush()
            except (OSError, ValueError) as error:
                redirect_to_null(self.target)
                self.target = open(os.devnull, "wb")
                self.on_loss(error)


DRAIN = 2.0  # seconds to read what a process that ended has written


class Guardian:
    """A process that kills the children's process groups if this one dies, even by SIGKILL."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(supervisor.__file__))],
            stdin=subprocess.PIPE,
            start_new_session=True,
            bufsize=0,  # each note is one write, from whichever thread
        )

    def report(self, sign: str, pid: int) -> None:
        """Report that a group has started (+) or ended (-)."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{sign} {pid}\n".encode())

    def __enter__(self) -> "Guardian":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


@dataclass(frozen=True)
class OutputLost:
    """Standard output cannot be written any more: its reader has left, or its disk is full."""

    error: Exception

    def __str__(self) -> str:
        return f"standard output: {getattr(self.error, 'strerror', self.error)}"


@dataclass(frozen=True)
class ChildExit:
    """The exit of a child with its status, negative for a signal."""

    child: "Child"
    status: int


class Child:
    """One process of the job, the leader of its own process group."""

    def __init__(
        self,
        process: int,
        command: Sequence[str],
        environment: Mapping[str, str],
        with_tags: bool,
        events: SimpleQueue,
        guardian: Guardian,
    ) -> None:
        self.process, self.guardian, self.events = process, guardian, events
        pipe = subprocess.PIPE if with_tags else None
        self._popen = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL if with_tags else None,
            stdout=pipe,
            stderr=pipe,
            start_new_session=True,
        )
        guardian.report("+", self._popen.pid)
        self._copiers = self._start_copying() if with_tags else []
        threading.Thread(target=self._wait, name="hfjax child", daemon=True).start()

    def _start_copying(self) -> list[LineCopier]:
        """Start to copy both streams, tagged."""
        make_copier = lambda source, target, *on_loss: LineCopier(
            source,
            target.buffer,
            tag(self.process, target.isatty() and "NO_COLOR" not in os.environ),
            *on_loss,
        )
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        on_loss = lambda error: self.events.put(OutputLost(error))
        copiers = [
            make_copier(self._popen.stdout, sys.stdout, on_loss),
            make_copier(self._popen.stderr, sys.stderr),
        ]
        for copier in copiers:
            copier.start()
        return copiers

    def _wait(self) -> None:
        status = self._popen.wait()
        self.kill()  # what it started and left behind
        self.guardian.report("-", self._popen.pid)
        self.events.put(ChildExit(self, status))

    def send_signal(self, number: int) -> None:
        """Send a signal to the process itself, which knows how to end what it started."""
        with contextlib.suppress(ProcessLookupError):
            self._popen.send_signal(number)

    def kill(self) -> None:
        """Kill the process and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)

    def suspended_pids(self) -> list[int]:
        """Return which of its processes are suspended; none where the system does not tell."""
        return find_suspended(self._popen.pid)

    def drain(self) -> None:
        """Wait until what it wrote has been copied."""
        for copier in self._copiers:
            copier.join(DRAIN)


def find_suspended(group: int) -> list[int]:
    """Return the processes of a group that a signal or a debugger has suspended."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            state, _, process_group = path.read_text().rpartition(")")[2].split()[:3]
            if state in "Tt" and int(process_group) == group:
                pids.append(int(path.parent.name))
    return sorted(pids)
