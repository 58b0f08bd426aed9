"""End a process that makes no progress, instead of letting the whole run wait for it."""

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hfjax.distributed.exit_codes import HUNG
from hfjax.distributed.stop import leave


def _print_error(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Watchdog:
    """Ends the process with exit code HUNG (124) when no beat came for `timeout` seconds.

    It reports what the process was doing and where each of its threads is. Time in which the whole
    process was stopped (Ctrl-Z) does not count.

    Args:
        timeout: Seconds above 0. None: it never ends anything.
        say: Called with the message. Default: print it on standard error.

    Example:
        >>> from hfjax.distributed import Watchdog
        >>> with Watchdog(timeout=600) as watchdog:
        ...     with watchdog.allow(3600, "compiling"):
        ...         compiled = True
        ...     for step in range(3):
        ...         watchdog.beat(f"step {step}")
    """

    def __init__(self, timeout: float | None, say: Callable[[str], Any] = _print_error) -> None:
        if timeout is not None and timeout <= 0:
            raise ValueError(
                f"watchdog timeout {timeout:g}: give seconds above 0, or None for no watchdog."
            )
        self.timeout, self.say = timeout, say
        self._limit = timeout
        self._doing = "starting"
        self._waited = 0.0  # seconds since the last beat
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="hfjax watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.timeout is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()

    def beat(self, doing: str) -> None:
        """Report progress, with what comes next.

        Args:
            doing: What the message says if no other beat follows.
        """
        self._doing, self._waited = doing, 0.0

    @contextmanager
    def allow(self, seconds: float, doing: str) -> Iterator[None]:
        """Give a slow phase (a compilation, a checkpoint) its own limit, if that is longer.

        It beats when the phase begins and when it ends.

        Args:
            seconds: The limit, in place of `timeout`.
            doing: What the message says if the phase does not end.
        """
        old_limit = self._limit
        self.beat(doing)
        if old_limit is not None:
            self._limit = max(old_limit, seconds)
        try:
            yield
        finally:
            self.beat(f"after {doing}")
            self._limit = old_limit

    def _watch(self) -> None:
        assert self.timeout is not None
        pause = min(self.timeout / 10, 1.0)
        last = time.monotonic()
        while not self._ended.wait(pause):
            now = time.monotonic()
            self._waited += min(now - last, 2 * pause)
            last = now
            if self._limit is not None and self._waited > self._limit:
                self._end_process(self._limit)

    def _end_process(self, limit: float) -> None:
        try:
            self.say(
                f"no progress for {limit:g} s, while doing: {self._doing}. This process ends with "
                f"exit code {HUNG}; where its threads are:"
            )
            faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
        finally:  # also where nobody reads standard error
            leave(HUNG)
