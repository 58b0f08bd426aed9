"""One attempt at a job: from the start of its processes to the end of the last."""

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any

from hfjax.distributed.child_processes import Child, ChildExit, OutputLost
from hfjax.distributed.exit_codes import HUNG, MISTAKE, is_resumable

WAIT = 0.25  # seconds
SELF_REPORT = 1.0  # seconds of the grace, in which one that fails because a peer did may report it


@dataclass(frozen=True)
class Limits:
    """How long a job waits, in seconds."""

    grace: float = 5.0  # from the failure of a process to the end of the others
    stop: float = 60.0  # for all to save and end after SIGTERM or Ctrl-C
    backoff: float = 1.0  # before the first restart; doubles each time, up to 30

    def __post_init__(self) -> None:
        for name, seconds in (("grace", self.grace), ("stop timeout", self.stop)):
            if seconds < 0:
                raise ValueError(f"{name} {seconds:g}: give 0 seconds or more.")


class Job:
    """The processes of an attempt, which live and end together."""

    def __init__(
        self, children: list[Child], events: SimpleQueue, limits: Limits, say: Callable[[str], Any]
    ) -> None:
        self.children, self.events, self.limits, self.say = children, events, limits, say
        self.running = set(children)
        self.failed = self.stopping = self.ending = self.killed = False
        self._saved = False  # a process stopped to be resumed
        self._code = 0
        self._deadline: float | None = None

    @property
    def may_restart(self) -> bool:
        """Whether a process failed in a way that may pass, nobody asked to stop, and all ended."""
        was_stopped = self.stopping or self._saved
        return self.failed and not was_stopped and not self.running and self._code != MISTAKE

    def run(self) -> int:
        """Wait for the processes; return the exit code of the first that did not finish."""
        while self.running:
            event = next_event(self.events, self._deadline)
            if isinstance(event, ChildExit):
                self._on_end(event.child, event.status)
            elif isinstance(event, OutputLost):
                self._stop(str(event), signal.SIGTERM)
            elif event is not None:
                self._on_signal(event)
            elif not self.killed:
                self._on_deadline()
            else:
                self.say(f"{self._names} cannot be killed (it waits for a disk?): left behind")
                break
        for child in self.children:
            child.drain()
        return self._code

    def _set_deadline(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def _on_end(self, child: Child, status: int) -> None:
        self.running.discard(child)
        code = status if status >= 0 else 128 - status
        was_ended = self.ending or self.killed
        if status == -signal.SIGKILL and self.failed and not was_ended:
            self._on_kill(child, code)
        if code == 0 or self.failed:
            return
        if is_resumable(status) or (self.stopping and is_resumable(code)):
            self._saved, self._code = True, self._code or code
            if self._deadline is None:
                self._set_deadline(self.limits.stop)
        else:
            self._on_failure(child, status, code)

    def _on_kill(self, child: Child, code: int) -> None:
        """Report a kill that is noticed late: peers may fail before its memory is freed."""
        self._code = code
        self.say(f"process {child.process} {_outcome(-signal.SIGKILL)}: the others may fail for it")

    def _on_failure(self, child: Child, status: int, code: int) -> None:
        self.failed, self._code = True, code
        child.drain()
        self._report_suspended(": the others may fail for it")
        others = f"; ending {self._names}" if self.running else ""
        self.say(f"process {child.process} {_outcome(status)}{others}")
        self._set_deadline(min(SELF_REPORT, self.limits.grace / 2))

    def _report_suspended(self, more: str = "") -> None:
        """Report suspended processes, which send neither output nor heartbeats."""
        for child in sorted(self.running, key=lambda child: child.process):
            if pids := ", ".join(map(str, child.suspended_pids())):
                who = f"process {child.process} is suspended (SIGSTOP or a debugger; pid {pids})"
                self.say(f"{who}{more}")

    def _on_signal(self, number: int) -> None:
        """Forward a signal once and wait for all to save; a second Ctrl-C kills them."""
        if self.stopping and number == signal.SIGINT:
            self._code, self.failed = 128 + number, True
            self._kill("SIGINT again")
        else:
            forwarded = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
            self._stop(signal.Signals(number).name, forwarded)

    def _stop(self, why: str, number: int) -> None:
        """Signal all to save and end, once."""
        if self.stopping:
            return
        self.stopping = True
        limit = self.limits.stop
        self.say(f"{why}: {self._names} may take {limit:g} s to save and end")
        self._send(number)
        if not self.failed:
            self._set_deadline(limit)

    def _on_deadline(self) -> None:
        if self.failed and not self.ending:
            self.ending = True
            self._send(signal.SIGTERM)
            self._set_deadline(self.limits.grace - min(SELF_REPORT, self.limits.grace / 2))
        elif not self.failed:
            self._code, self.failed = HUNG, True
            self._report_suspended()
            self._kill(f"not ended after {self.limits.stop:g} s")
        else:
            self._kill(f"not ended {self.limits.grace:g} s after the failure")

    def _kill(self, why: str) -> None:
        self.say(f"{why}: killing {self._names}")
        self.killed = True
        for child in self.running:
            child.kill()
        self._set_deadline(self.limits.grace)

    def _send(self, number: int) -> None:
        for child in self.running:
            child.send_signal(number)

    @property
    def _names(self) -> str:
        numbers = ", ".join(map(str, sorted(child.process for child in self.running)))
        return f"process{'es' if len(self.running) > 1 else ''} {numbers}"


def next_event(events: SimpleQueue, deadline: float | None) -> ChildExit | OutputLost | int | None:
    """Return the next exit of a child, lost output or signal; None at the deadline.

    A signal that comes just before `get` starts to wait does not wake it: hence the short waits.
    """
    while deadline is None or time.monotonic() < deadline:
        try:
            return events.get(timeout=WAIT)
        except Empty:
            continue
    return None


def _outcome(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"failed with exit code {status}"
