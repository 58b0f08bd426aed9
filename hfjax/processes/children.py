"""The processes of a job on this machine: started, listened to, ended with all they started."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import IO

from hfjax.processes import guardian
from hfjax.processes.output import Lines, tag

DRAIN = 2.0  # seconds to read what a process that ended has written


class Guardian:
    """A process that ends the children's groups if this one dies, even by SIGKILL."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guardian.__file__))],
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
    ):
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
        to_lines = lambda source, target: Lines(
            source, target.buffer, tag(self.process, _coloured(target))
        )
        assert self._popen.stdout is not None
        assert self._popen.stderr is not None
        lines = [
            to_lines(self._popen.stdout, sys.stdout),
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

    def drain(self) -> None:
        """Wait until what it wrote has been copied."""
        for lines in self._lines:
            lines.join(DRAIN)


def _coloured(target: IO[str]) -> bool:
    return target.isatty() and "NO_COLOR" not in os.environ
