"""Agree to stop: a signal to any process ends the loops of all at the same step.

`leave` ends a process immediately: JAX's exit waits for the other processes, also for dead ones.
"""

import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.distributed.exit_codes import FAILED, FINISHED, INTERRUPTED, RESUMABLE, stop_signals
from hfjax.utils.command_errors import tolerant_stream

LAG = 2  # calls; the same in every process, so that all stop at the same one
ASKED = "asked"
LOST = "stdout"
REASONS = (None, ASKED, LOST, "SIGHUP", "SIGINT", "SIGTERM")  # the last wins where they differ


class Stop:
    """A common decision to stop: `with Stop() as stop: for …: if stop.agreed(): save, break`.

    SIGTERM, SIGHUP (except under nohup), Ctrl-C and `request()` ask for it, and so does a standard
    output that cannot be written: its reader has left, or its disk is full. A second Ctrl-C raises
    KeyboardInterrupt. While entered it handles these signals and replaces `sys.stdout`, which only
    the main thread may do.

    Args:
        mesh: The devices on which processes agree. None: all.

    Attributes:
        reason: Why the processes agreed to stop: "SIGTERM", "SIGINT", "SIGHUP", "stdout" or
            "asked"; None until then.

    Example:
        >>> from hfjax.distributed import Stop
        >>> with Stop() as stop:
        ...     for step in range(10):
        ...         if step == 3:
        ...             stop.request()
        ...         if stop.agreed():
        ...             break
        >>> step, stop.reason
        (3, 'asked')
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self.reason: str | None = None
        self._requested = 0  # index into REASONS, of this process
        self._interrupted = False
        self._old_handlers: dict[int, Any] = {}
        self._streams = ExitStack()
        self._pending: deque[jax.Array] = deque()
        self._vote = _Vote(mesh) if jax.process_count() > 1 else None

    def __enter__(self) -> "Stop":
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("Stop takes signals, which Python gives to the main thread only.")
        for number in stop_signals():
            self._old_handlers[number] = signal.signal(number, self._on_signal)
        self._streams.enter_context(redirect_stdout(tolerant_stream(sys.stdout, self._on_loss)))
        self._streams.enter_context(redirect_stderr(tolerant_stream(sys.stderr)))
        return self

    def __exit__(self, *_: object) -> None:
        self._streams.close()
        for number, old_handler in self._old_handlers.items():
            signal.signal(number, signal.SIG_DFL if old_handler is None else old_handler)

    def request(self) -> None:
        """Ask to stop from the program (a time limit, say); one process suffices."""
        self._requested = max(self._requested, REASONS.index(ASKED))

    def agreed(self) -> bool:
        """Return whether to stop now: the same answer in the same call of every process.

        With several processes it answers the requests of two calls ago, and so waits for no step
        but one that is two steps old.
        """
        if self.reason is None:
            self.reason = REASONS[self._requested if self._vote is None else self._vote_with_lag()]
        return self.reason is not None

    def _vote_with_lag(self) -> int:
        assert self._vote is not None
        self._pending.append(self._vote(self._requested))
        return int(self._pending.popleft()) if len(self._pending) > LAG else 0

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGINT" and self._interrupted:
            raise KeyboardInterrupt
        self._interrupted |= name == "SIGINT"
        hint = "; again to stop at once" if name == "SIGINT" else ""
        self._request(name, f"{name}: stopping after this step{hint}")

    def _on_loss(self, error: OSError) -> None:
        self._request(LOST, f"standard output: {error.strerror}: stopping after this step")

    def _request(self, reason: str, line: str) -> None:
        self._requested = max(self._requested, REASONS.index(reason))
        with suppress(OSError):  # the terminal may be gone
            os.write(2, f"{line}\n".encode())


class _Vote:
    """The largest of all processes' numbers, computed asynchronously on their devices."""

    def __init__(self, mesh: Mesh | None) -> None:
        devices = np.array(jax.devices()) if mesh is None else mesh.devices.reshape(-1)
        flat_mesh = Mesh(devices, ("every",))
        sharded, replicated = NamedSharding(flat_mesh, P("every")), NamedSharding(flat_mesh, P())
        ballot = lambda value, _: np.full(1, value, np.int32)
        self._ballots = [
            jax.make_array_from_callback((devices.size,), sharded, partial(ballot, value))
            for value in range(len(REASONS))
        ]
        self._largest = jax.jit(jnp.max, out_shardings=replicated)

    def __call__(self, number: int) -> jax.Array:
        return self._largest(self._ballots[number])


def leave(code: int) -> NoReturn:
    """End this process now: flush what was printed, and run no exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed, or its reader is gone
    os._exit(code)


@contextmanager
def leaving() -> Iterator[None]:
    """Run the main part of a program: with several processes an error ends it immediately.

    Otherwise a process whose peer died would report it and then wait for that peer at the exit. In
    one process, and at an orderly exit, it changes nothing.

    Example:
        >>> from hfjax.distributed import leaving
        >>> with leaving():
        ...     print("train")
        train
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized() or _is_orderly(error):
            raise
        leave(_print_error(error))


def _is_orderly(error: BaseException) -> bool:
    """Return whether all processes end this way, so that the exit does not wait in vain."""
    return isinstance(error, SystemExit) and error.code in (None, FINISHED, *RESUMABLE)


def _print_error(error: BaseException) -> int:
    """Print an error as Python would, and return its exit code."""
    if isinstance(error, SystemExit) and isinstance(error.code, int):
        return error.code
    with suppress(OSError):  # nobody reads
        if isinstance(error, SystemExit):
            print(error.code, file=sys.stderr)
        else:
            traceback.print_exception(error)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
