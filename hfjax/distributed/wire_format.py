"""Messages of the rendezvous, a JSON object per line; all input is checked: anyone may send it."""

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from typing import Any

import jax

LONGEST = 4096  # bytes of a line and characters of its texts; a longer one is not ours
MOST = 1 << 32  # numbers of processes and pids are below


@dataclass(frozen=True)
class Hello:
    """How a process introduces itself."""

    process: int
    processes: int
    host: str
    pid: int
    jax: str
    hfjax: str
    run: str  # known to the processes of one run only; empty: not set
    token: str  # of this attempt: a reconnection is no second process of that number

    @property
    def who(self) -> str:
        """The process for a message: number, host and pid."""
        return f"process {self.process} ({self.host}, pid {self.pid})"


def make_hello(process: int, processes: int, run: str = "") -> Hello:
    """Return the hello of this process."""
    try:
        version = metadata.version("hfjax")
    except metadata.PackageNotFoundError:
        version = "not installed"
    machine, token = (socket.gethostname(), os.getpid()), secrets.token_hex(8)
    return Hello(process, processes, *machine, jax.__version__, version, run, token)


def encode_hello(message: Hello) -> bytes:
    """Return a hello as a line."""
    return json.dumps({"hfjax": asdict(message)}).encode() + b"\n"


def parse_hello(line: bytes) -> Hello | None:
    """Return the hello in a line, or None if it is something else."""
    values = _parse_object(line).get("hfjax")
    kinds = {field.name: field.type for field in fields(Hello)}
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        return None
    if not all(_is_valid(values[name], kind) for name, kind in kinds.items()):
        return None
    message = Hello(**values)
    return message if message.process < message.processes else None


def parse_message(line: bytes) -> dict[str, Any] | None:
    """Return the server's message in a line, or None if it is something else."""
    message = _parse_object(line)
    is_number_list = lambda value: isinstance(value, list) and all(_is_valid(x, int) for x in value)
    value = message.get("seconds")
    has_seconds = isinstance(value, int | float) and 0 <= value < MOST
    fits = {
        "missing": is_number_list,
        "late": lambda value: is_number_list(value) and value and has_seconds,
        "refused": lambda value: _is_valid(value, str),
        "go": lambda value: value is True,
    }
    known = [name for name in fits if name in message]
    return message if known and all(fits[name](message[name]) for name in known) else None


def _parse_object(line: bytes) -> dict:
    """Return the JSON object in a line, or an empty one."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _is_valid(value: Any, kind: Any) -> bool:
    """Return whether a value is a number in range, or a short text that can be printed."""
    if type(value) is not kind:
        return False
    return 0 <= value < MOST if kind is int else len(value) <= LONGEST and value.isprintable()
