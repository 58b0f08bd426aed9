"""Run a command as several processes of one machine, which live and end together."""

import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from hfjax.processes.children import Child, Guardian
from hfjax.processes.devices import device_variables
from hfjax.processes.job import Job, Limits, next_event
from hfjax.processes.ports import free_port

DEFAULT = Limits()


def _on_stderr(words: str) -> None:
    print(f"hfjax launch: {words}", file=sys.stderr, flush=True)


def launch(
    command: Sequence[str],
    processes: int,
    max_restarts: int = 0,
    *,
    devices: int | None = None,
    gpus: int | None = None,
    limits: Limits = DEFAULT,
    say: Callable[[str], Any] = _on_stderr,
) -> int:
    """Run `processes` copies of a command as one job; return its exit code.

    When one fails the others are ended and, up to `max_restarts` times, all start again. `devices`
    fake CPU devices each, or `gpus` each; by default the visible GPUs are dealt evenly.
    """
    _check(command, processes, max_restarts)
    shares = device_variables(processes, devices, gpus)
    events: SimpleQueue = SimpleQueue()
    restart = 0
    with _signals_to(events), Guardian() as guardian:
        while True:
            children = _start(command, shares, restart, events, guardian)
            job = Job(children, events, limits, say)
            code = job.run()
            if not job.may_restart or restart == max_restarts:
                return code
            pause = min(limits.backoff * 2**restart, 30)
            restart += 1
            say(f"restart {restart} of {max_restarts} in {pause:g} s")
            if next_event(events, time.monotonic() + pause) is not None:
                return code


def _check(command: Sequence[str], processes: int, max_restarts: int) -> None:
    if processes < 1:
        raise ValueError(f"{processes} processes: give at least 1 (-n).")
    if max_restarts < 0:
        raise ValueError(f"{max_restarts} restarts: give 0 or more (--max-restarts).")
    if not command:
        raise ValueError("no command. Put it after --: hfjax launch -n 2 -- python train.py")
    if shutil.which(command[0]) is None:
        raise ValueError(
            f"command {command[0]!r} is not a program on PATH, nor a file that may be executed. "
            f"For a script: hfjax launch -n {processes} -- python {command[0]}"
        )


@contextmanager
def _signals_to(events: SimpleQueue) -> Iterator[None]:
    """Put signals that ask to stop into the queue, and restore their handlers at the end."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        numbers.append(signal.SIGHUP)
    before = {n: signal.signal(n, lambda number, _: events.put(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _start(
    command: Sequence[str],
    shares: list[dict[str, str]],
    restart: int,
    events: SimpleQueue,
    guardian: Guardian,
) -> list[Child]:
    """Start all processes of one attempt, with a port of its own that only this machine sees."""
    port = free_port()
    told = {
        "HFJAX_COORDINATOR": f"localhost:{port}",
        "JAX_COORDINATOR_BIND_ADDRESS": f"127.0.0.1:{port}",
        "HFJAX_RUN": secrets.token_hex(8),
        "HFJAX_PROCESSES": str(len(shares)),
        "HFJAX_RESTART": str(restart),
        "PYTHONUNBUFFERED": "1",
    }
    environments = [
        {**os.environ, **told, **share, "HFJAX_PROCESS": str(process)}
        for process, share in enumerate(shares)
    ]
    return [
        Child(process, command, environment, len(shares) > 1, events, guardian)
        for process, environment in enumerate(environments)
    ]
