"""How a process attends the meeting (process 0 too: its own address must lead to it)."""

import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

from hfjax.distributed.environment import Settings
from hfjax.distributed.wire_format import LONGEST, hello, spoken, word_in

TELL_EVERY = 5.0  # seconds
SILENCE = 2.0  # seconds; the meeting speaks four times a second


class Guest:
    """One process on its way into the run."""

    def __init__(self, settings: Settings, timeout: float, say: Callable[[str], Any]) -> None:
        self.settings, self.timeout, self.say = settings, timeout, say
        self.deadline = time.monotonic() + timeout
        self.missing: list[int] = []
        self.reason: str | None = "no answer"  # why the coordinator cannot be reached
        self._hello = spoken(hello(settings.process, settings.processes, settings.run))
        self._told = time.monotonic()

    @property
    def left(self) -> float:
        """Seconds left, a little more than none."""
        return max(self.deadline - time.monotonic(), 0.01)

    @property
    def late(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() >= self.deadline

    def attend(self) -> None:
        """Meet the others; come again if the coordinator is not there yet, or leaves."""
        while not self.late:
            try:
                end = self._visit()
            except OSError as error:
                end = None
                if not self.late:
                    self.reason = error.strerror or str(error)
            if end is not None:
                return self._obey(end)
            self._tell()
            time.sleep(0.05)
        raise TimeoutError(self._too_late())

    def _visit(self) -> dict[str, Any] | None:
        """Return the word that ends the meeting; None: come again."""
        with connection(self.settings, min(SILENCE, self.left)) as met:
            met.sendall(self._hello)
            for word in words(met, self.deadline, self.settings.processes):
                if "missing" not in word:
                    return word
                self.missing, self.reason = word["missing"], None
                self._tell()
                if self.late:
                    return {"late": self.missing, "seconds": self.timeout}
        self.reason = "whoever answered has left, or is another program"
        return None

    def _obey(self, end: dict[str, Any]) -> None:
        """Go on, or raise."""
        if "refused" in end:
            raise ValueError(end["refused"])
        if "late" in end:
            self.missing, self.reason = end["late"], None
            self.timeout = end["seconds"]
            raise TimeoutError(self._too_late())
        if self.settings.process:
            self._await_jax()

    def _await_jax(self) -> None:
        """Wait for process 0's JAX to listen: a connection refused costs JAX a second."""
        while not self.late:
            try:
                return connection(self.settings, min(SILENCE, self.left)).close()
            except OSError as error:
                self.reason = error.strerror or str(error)
                time.sleep(0.02)
        raise TimeoutError(self._too_late())

    def _tell(self) -> None:
        """Say every few seconds what is waited for."""
        if time.monotonic() - self._told < TELL_EVERY:
            return
        self._told = time.monotonic()
        waited = f"({self.timeout - self.left:.0f} s of {self.timeout:g})"
        if self.reason is not None:
            self.say(f"{self._me} cannot reach {self._there}: {self.reason} {waited}")
        elif self.settings.process == 0:
            self.say(f"waiting for {self._absent} {waited}")

    def _too_late(self) -> str:
        if self.reason is None and self.missing:
            return (
                f"{self._absent} did not come within {self.timeout:g} s. Look at what is printed "
                f"there, and whether {self.settings.coordinator} can be reached from there."
            )
        return (
            f"{self._me} could not reach {self._there} within {self.timeout:g} s: "
            f"{self.reason or 'it did not say who is missing'}. "
            f"Is process 0 running, is the address right ({self.settings.named[0]}), and is the "
            "port open between the machines?"
        )

    @property
    def _absent(self) -> str:
        shown = ", ".join(map(str, self.missing[:8])) + (", …" if len(self.missing) > 8 else "")
        kind = "process" if len(self.missing) == 1 else "processes"
        return f"{kind} {shown} of {self.settings.processes}"

    @property
    def _me(self) -> str:
        return f"process {self.settings.process} of {self.settings.processes}"

    @property
    def _there(self) -> str:
        return f"the coordinator at {self.settings.coordinator}"


def connection(settings: Settings, timeout: float) -> socket.socket:
    """Return a connection to the coordinator."""
    return socket.create_connection(settings.address, timeout=timeout)


def words(met: socket.socket, deadline: float, processes: int) -> Iterator[dict[str, Any]]:
    """Yield what the meeting says, until it ends or turns out to be something else."""
    heard = b""
    while len(heard) < LONGEST + 12 * processes:  # the longest names all who are missing
        if (left := deadline - time.monotonic()) <= 0:
            raise TimeoutError("no end of what is said")
        met.settimeout(min(SILENCE, left))
        said = met.recv(LONGEST)
        *lines, heard = (heard + said).split(b"\n")
        for line in lines:
            if (word := word_in(line)) is None:
                return
            yield word
        if not said:
            return
