"""What is said where processes meet, one JSON a line; what is heard is checked: any may speak."""

import json
import os
import secrets
import socket
from dataclasses import asdict, dataclass, fields
from importlib import metadata
from typing import Any

import jax

LONGEST = 4096  # bytes of a line and characters of what it tells; who says more is somebody else
MOST = 1 << 32  # numbers of processes and pids are below


@dataclass(frozen=True)
class Hello:
    """What a process says of itself."""

    process: int
    processes: int
    host: str
    pid: int
    jax: str
    hfjax: str
    run: str  # what only processes of one run know; empty: nobody gave them anything
    token: str  # of this attempt: who comes again is no second process of that number

    @property
    def who(self) -> str:
        """The process for a person: number, host and pid."""
        return f"process {self.process} ({self.host}, pid {self.pid})"


def hello(process: int, processes: int, run: str = "") -> Hello:
    """Return what this process says of itself."""
    try:
        version = metadata.version("hfjax")
    except metadata.PackageNotFoundError:
        version = "not installed"
    place, token = (socket.gethostname(), os.getpid()), secrets.token_hex(8)
    return Hello(process, processes, *place, jax.__version__, version, run, token)


def spoken(one: Hello) -> bytes:
    """Return a hello as a line."""
    return json.dumps({"hfjax": asdict(one)}).encode() + b"\n"


def hello_in(line: bytes) -> Hello | None:
    """Return the hello in a line, or None if it is something else."""
    told = _json(line).get("hfjax")
    kinds = {field.name: field.type for field in fields(Hello)}
    if not isinstance(told, dict) or told.keys() != kinds.keys():
        return None
    if not all(_fits(told[name], kind) for name, kind in kinds.items()):
        return None
    one = Hello(**told)
    return one if one.process < one.processes else None


def word_in(line: bytes) -> dict[str, Any] | None:
    """Return what the meeting says in a line, or None if it is something else."""
    told = _json(line)
    numbers = lambda given: isinstance(given, list) and all(_fits(x, int) for x in given)
    given = told.get("seconds")
    seconds = isinstance(given, int | float) and 0 <= given < MOST
    fits = {
        "missing": numbers,
        "late": lambda given: numbers(given) and given and seconds,
        "refused": lambda given: _fits(given, str),
        "go": lambda given: given is True,
    }
    known = [name for name in fits if name in told]
    return told if known and all(fits[name](told[name]) for name in known) else None


def _json(line: bytes) -> dict:
    """Return the object that a line is, or an empty one."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}


def _fits(given: Any, kind: Any) -> bool:
    """Return whether a value is a number that may be, or a text that may be shown."""
    if type(given) is not kind:
        return False
    return 0 <= given < MOST if kind is int else len(given) <= LONGEST and given.isprintable()
