"""The client of the rendezvous (in process 0 too: its own address must lead to it)."""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from hfjax.distributed.environment import Settings
from hfjax.distributed.wire_format import LONGEST, encode_hello, make_hello, parse_message

REPORT_EVERY = 5.0  # seconds
SILENCE = 2.0  # seconds; the server sends four times a second


class RendezvousClient:
    """A process that joins the run."""

    def __init__(self, settings: Settings, timeout: float, say: Callable[[str], Any]) -> None:
        self.settings, self.timeout, self.say = settings, timeout, say
        self.deadline = time.monotonic() + timeout
        self.missing: list[int] = []
        self.reason: str | None = "no answer"  # why the coordinator cannot be reached
        self._hello = encode_hello(
            make_hello(settings.process, settings.processes, settings.run_id)
        )
        self._last_report = time.monotonic()

    @property
    def seconds_left(self) -> float:
        """Seconds left, always above 0."""
        return max(self.deadline - time.monotonic(), 0.01)

    @property
    def is_late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.deadline

    def meet(self) -> None:
        """Join the rendezvous; retry if the coordinator is not there yet, or leaves."""
        while not self.is_late:
            try:
                verdict = self._connect()
            except OSError as error:
                verdict = None
                if not self.is_late:
                    self.reason = error.strerror or str(error)
            if verdict is not None:
                return self._handle(verdict)
            self._report_waiting()
            time.sleep(0.05)
        raise TimeoutError(self._timeout_message())

    def _connect(self) -> dict[str, Any] | None:
        """Return the message that ends the rendezvous; None: retry."""
        with connection(self.settings, min(SILENCE, self.seconds_left)) as sock:
            sock.sendall(self._hello)
            for message in read_messages(sock, self.deadline, self.settings.processes):
                if "missing" not in message:
                    return message
                self.missing, self.reason = message["missing"], None
                self._report_waiting()
                if self.is_late:
                    return {"late": self.missing, "seconds": self.timeout}
        self.reason = "whoever answered has left, or is another program"
        return None

    def _handle(self, verdict: dict[str, Any]) -> None:
        """Continue, or raise."""
        if "refused" in verdict:
            raise ValueError(verdict["refused"])
        if "late" in verdict:
            self.missing, self.reason = verdict["late"], None
            self.timeout = verdict["seconds"]
            raise TimeoutError(self._timeout_message())
        if self.settings.process:
            self._await_jax()

    def _await_jax(self) -> None:
        """Wait for process 0's JAX to listen: a connection refused costs JAX a second."""
        while not self.is_late:
            try:
                return connection(self.settings, min(SILENCE, self.seconds_left)).close()
            except OSError as error:
                self.reason = error.strerror or str(error)
                time.sleep(0.02)
        raise TimeoutError(self._timeout_message())

    def _report_waiting(self) -> None:
        """Report every few seconds what it is waiting for."""
        if time.monotonic() - self._last_report < REPORT_EVERY:
            return
        self._last_report = time.monotonic()
        waited = f"({self.timeout - self.seconds_left:.0f} s of {self.timeout:g})"
        if self.reason is not None:
            self.say(
                f"{self._own_name} cannot reach {self._coordinator_text}: {self.reason} {waited}"
            )
        elif self.settings.process == 0:
            self.say(f"waiting for {self._missing} {waited}")

    def _timeout_message(self) -> str:
        if self.reason is None and self.missing:
            return (
                f"{self._missing} did not come within {self.timeout:g} s. Look at what is printed "
                f"there, and whether {self.settings.coordinator} can be reached from there."
            )
        return (
            f"{self._own_name} could not reach {self._coordinator_text} within {self.timeout:g} s: "
            f"{self.reason or 'it did not say who is missing'}. "
            f"Is process 0 running, is the address right ({self.settings.names[0]}), and is the "
            "port open between the machines?"
        )

    @property
    def _missing(self) -> str:
        numbers = ", ".join(map(str, self.missing[:8])) + (", …" if len(self.missing) > 8 else "")
        kind = "process" if len(self.missing) == 1 else "processes"
        return f"{kind} {numbers} of {self.settings.processes}"

    @property
    def _own_name(self) -> str:
        return f"process {self.settings.process} of {self.settings.processes}"

    @property
    def _coordinator_text(self) -> str:
        return f"the coordinator at {self.settings.coordinator}"


def connection(settings: Settings, timeout: float) -> socket.socket:
    """Return a connection to the coordinator."""
    return socket.create_connection(settings.address, timeout=timeout)


def read_messages(sock: socket.socket, deadline: float, processes: int) -> Iterator[dict[str, Any]]:
    """Yield the server's messages, until it ends or turns out to be something else."""
    buffer = b""
    while len(buffer) < LONGEST + 12 * processes:  # the longest lists all missing processes
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("no end of what is said")
        sock.settimeout(min(SILENCE, left))
        chunk = sock.recv(LONGEST)
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            if (message := parse_message(line)) is None:
                return
            yield message
        if not chunk:
            return
