"""Where the processes of a run meet before JAX starts: a listener in process 0."""

import json
import selectors
import socket
import time
from typing import Any

from hfjax.distributed.wire_format import LONGEST, Hello, hello_in

LINGER = 3.0  # seconds in which those who come late are still told why the others left
AHEAD = 0.2  # seconds before process 0 is late itself, the meeting tells that it is
TELL = 0.25  # seconds between two messages that say who is missing
STRANGERS = 64  # connections that have not said who they are; then the first of them has to go


def problem(hellos: list[Hello]) -> str | None:
    """Return why these processes cannot be one run, or None."""
    seen: dict[int, Hello] = {}
    for one in hellos:
        first = seen.setdefault(one.process, one)
        if first.token != one.token:
            return (
                f"two processes say that they are number {one.process} of {one.processes}: "
                f"pid {first.pid} on {first.host} and pid {one.pid} on {one.host}. Give each its "
                "own number, and start no second run at this address."
            )
    for field in ("processes", "jax", "hfjax"):
        first = hellos[0] if hellos else None
        other = next((o for o in hellos if getattr(o, field) != getattr(first, field)), None)
        if first is not None and other is not None:
            return _differ(field, first, other)
    return None


def _differ(field: str, first: Hello, other: Hello) -> str:
    one, two = getattr(first, field), getattr(other, field)
    if field == "processes":
        return (
            f"{first.who} was told of {one} processes, {other.who} of {two}. Start all with the "
            "same number."
        )
    return (
        f"{first.who} has {field} {one}, {other.who} has {two}. All need the same: they run one "
        "program."
    )


def missing(hellos: list[Hello], processes: int) -> list[int]:
    """Return the numbers that nobody has said yet."""
    return sorted(set(range(processes)) - {one.process for one in hellos})


class Meeting:
    """Process 0's side: takes hellos until all are here, one refuses, or it is too late."""

    def __init__(
        self, listener: socket.socket, processes: int, timeout: float, run: str = ""
    ) -> None:
        self.listener, self.processes, self.timeout = listener, processes, timeout
        self._run = run
        self._end = time.monotonic() + timeout - AHEAD
        self._told = float("-inf")
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._heard: dict[socket.socket, bytearray] = {}
        self._hellos: dict[socket.socket, Hello] = {}
        self._verdict: dict[str, Any] | None = None

    def run(self) -> None:
        """Hold the meeting; its end is told to all who came. Every socket is closed then."""
        while time.monotonic() < self._end and self._missing():
            self._listen()
            if self._verdict is None and (why := problem(list(self._hellos.values()))):
                self._verdict, self._end = {"refused": why}, time.monotonic() + LINGER
            if self._verdict is not None or time.monotonic() - self._told > TELL:
                self._told = time.monotonic()
                self._tell(self._verdict or {"missing": self._missing()})
        self._close()

    def _missing(self) -> list[int]:
        return missing(list(self._hellos.values()), self.processes)

    def _listen(self) -> None:
        for key, _ in self._selector.select(min(TELL, max(self._end - time.monotonic(), 0))):
            if key.fileobj is self.listener:
                self._accept()
            else:
                self._hear(key.fileobj)  # type: ignore[arg-type]

    def _accept(self) -> None:
        silent = [guest for guest in self._heard if guest not in self._hellos]
        if len(silent) >= self.processes + STRANGERS:
            self._forget(silent[0])
        try:
            guest, _ = self.listener.accept()
        except OSError:  # it has left, or too many files are open
            return
        guest.settimeout(1.0)
        self._heard[guest] = bytearray()
        self._selector.register(guest, selectors.EVENT_READ)

    def _hear(self, guest: socket.socket) -> None:
        """Take what a guest says; forget guests that leave or say something else."""
        if guest not in self._heard:
            return  # it had to go a moment ago
        try:
            said = guest.recv(LONGEST)
        except OSError:
            said = b""
        heard = self._heard[guest]
        heard += said
        if said and len(heard) <= LONGEST and not heard.endswith(b"\n"):
            return  # the rest is to come
        one = hello_in(bytes(heard)) if said else None
        if one is not None and one.run == self._run:
            self._hellos[guest] = one
            return
        if one is not None:
            self._say(guest, {"refused": _stranger(one)})
        self._forget(guest)

    def _forget(self, guest: socket.socket) -> None:
        self._selector.unregister(guest)
        self._heard.pop(guest, None)
        self._hellos.pop(guest, None)
        guest.close()

    def _tell(self, message: dict[str, Any]) -> None:
        for guest in list(self._hellos):
            if not self._say(guest, message):
                self._forget(guest)

    def _say(self, guest: socket.socket, message: dict[str, Any]) -> bool:
        """Tell one guest, and return whether it can be reached."""
        try:
            guest.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def _close(self) -> None:
        """Free the port, then tell the end: whoever hears "go" finds JAX here, or nobody yet."""
        self._selector.unregister(self.listener)
        self.listener.close()
        left = self._missing()
        late = {"late": [number for number in left if number] or left, "seconds": self.timeout}
        self._tell(self._verdict or (late if left else {"go": True}))
        for guest in list(self._heard):
            self._forget(guest)
        self._selector.close()


def _stranger(one: Hello) -> str:
    """Return why a process is not let in."""
    return (
        f"{one.who} was started by another launcher or SLURM job than process 0 at this address "
        "(HFJAX_RUN differs). Give each run an address of its own, and its processes one HFJAX_RUN."
    )
