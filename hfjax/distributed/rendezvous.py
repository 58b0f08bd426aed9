"""The rendezvous of a run's processes before JAX starts: a server in process 0."""

import json
import selectors
import socket
import time
from typing import Any

from hfjax.distributed.wire_format import LONGEST, Hello, parse_hello

LINGER = 3.0  # seconds in which late processes still learn why the others left
AHEAD = 0.2  # seconds before process 0's own timeout at which the server announces it
SEND_EVERY = 0.25  # seconds between two messages that list missing processes
STRANGERS = 64  # connections without a hello; beyond, the first of them is dropped


def find_conflict(hellos: list[Hello]) -> str | None:
    """Return why these processes cannot be one run, or None."""
    by_process: dict[int, Hello] = {}
    for peer in hellos:
        first = by_process.setdefault(peer.process, peer)
        if first.token != peer.token:
            return (
                f"two processes say that they are number {peer.process} of {peer.processes}: "
                f"pid {first.pid} on {first.host} and pid {peer.pid} on {peer.host}. Give each its "
                "own number, and start no second run at this address."
            )
    for field in ("processes", "jax", "hfjax"):
        first = hellos[0] if hellos else None
        other = next((o for o in hellos if getattr(o, field) != getattr(first, field)), None)
        if first is not None and other is not None:
            return _difference(field, first, other)
    return None


def _difference(field: str, first: Hello, other: Hello) -> str:
    a, b = getattr(first, field), getattr(other, field)
    if field == "processes":
        return (
            f"{first.who} was told of {a} processes, {other.who} of {b}. Start all with the "
            "same number."
        )
    return (
        f"{first.who} has {field} {a}, {other.who} has {b}. All need the same: they run one "
        "program."
    )


def missing_processes(hellos: list[Hello], processes: int) -> list[int]:
    """Return the numbers of processes that have sent no hello yet."""
    return sorted(set(range(processes)) - {hello.process for hello in hellos})


class RendezvousServer:
    """Process 0's side: takes hellos until all are in, two conflict, or the time is over."""

    def __init__(
        self, listener: socket.socket, processes: int, timeout: float, run_id: str = ""
    ) -> None:
        self.listener, self.processes, self.timeout = listener, processes, timeout
        self._run_id = run_id
        self._end = time.monotonic() + timeout - AHEAD
        self._last_sent = float("-inf")
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._buffers: dict[socket.socket, bytearray] = {}
        self._hellos: dict[socket.socket, Hello] = {}
        self._verdict: dict[str, Any] | None = None

    def run(self) -> None:
        """Run the rendezvous, send its outcome to all clients, and close every socket."""
        while time.monotonic() < self._end and self._missing():
            self._poll()
            if self._verdict is None and (why := find_conflict(list(self._hellos.values()))):
                self._verdict, self._end = {"refused": why}, time.monotonic() + LINGER
            if self._verdict is not None or time.monotonic() - self._last_sent > SEND_EVERY:
                self._last_sent = time.monotonic()
                self._broadcast(self._verdict or {"missing": self._missing()})
        self._close()

    def _missing(self) -> list[int]:
        return missing_processes(list(self._hellos.values()), self.processes)

    def _poll(self) -> None:
        for key, _ in self._selector.select(min(SEND_EVERY, max(self._end - time.monotonic(), 0))):
            if key.fileobj is self.listener:
                self._accept()
            else:
                self._receive(key.fileobj)  # type: ignore[arg-type]

    def _accept(self) -> None:
        silent = [client for client in self._buffers if client not in self._hellos]
        if len(silent) >= self.processes + STRANGERS:
            self._drop(silent[0])
        try:
            client, _ = self.listener.accept()
        except OSError:  # the client has left, or too many files are open
            return
        client.settimeout(1.0)
        self._buffers[client] = bytearray()
        self._selector.register(client, selectors.EVENT_READ)

    def _receive(self, client: socket.socket) -> None:
        """Read from a client; drop clients that leave or send something else."""
        if client not in self._buffers:
            return  # it was just dropped
        try:
            chunk = client.recv(LONGEST)
        except OSError:
            chunk = b""
        buffer = self._buffers[client]
        buffer += chunk
        if chunk and len(buffer) <= LONGEST and not buffer.endswith(b"\n"):
            return  # the rest is to come
        hello = parse_hello(bytes(buffer)) if chunk else None
        if hello is not None and hello.run == self._run_id:
            self._hellos[client] = hello
            return
        if hello is not None:
            self._send(client, {"refused": _foreign_message(hello)})
        self._drop(client)

    def _drop(self, client: socket.socket) -> None:
        self._selector.unregister(client)
        self._buffers.pop(client, None)
        self._hellos.pop(client, None)
        client.close()

    def _broadcast(self, message: dict[str, Any]) -> None:
        for client in list(self._hellos):
            if not self._send(client, message):
                self._drop(client)

    def _send(self, client: socket.socket, message: dict[str, Any]) -> bool:
        """Send a message to one client; return whether it can be reached."""
        try:
            client.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def _close(self) -> None:
        """Free the port, then send the outcome: after "go" a client finds JAX, or nobody yet."""
        self._selector.unregister(self.listener)
        self.listener.close()
        left = self._missing()
        timeout_message = {
            "late": [number for number in left if number] or left,
            "seconds": self.timeout,
        }
        self._broadcast(self._verdict or (timeout_message if left else {"go": True}))
        for client in list(self._buffers):
            self._drop(client)
        self._selector.close()


def _foreign_message(hello: Hello) -> str:
    """Return why a process of another run is refused."""
    return (
        f"{hello.who} was started by another launcher or SLURM job than process 0 at this address "
        "(HFJAX_RUN differs). Give each run an address of its own, and its processes one HFJAX_RUN."
    )
