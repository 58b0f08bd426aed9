"""What is still being written when a program ends without closing it is finished first."""

import atexit
import concurrent.futures.thread  # noqa: F401  (its own exit is registered first: it runs last)
import threading
from typing import Protocol


class Closes(Protocol):
    """What has to be closed."""

    def close(self) -> None: ...


_OPEN: dict[int, Closes] = {}


def finish_at_exit(one: Closes) -> None:
    """Close it when the program ends, unless `finished` says that it is done."""
    _OPEN[id(one)] = one


def finished(one: Closes) -> None:
    """It is closed."""
    _OPEN.pop(id(one), None)


def _finish() -> None:
    for one in list(_OPEN.values()):
        one.close()


# A plain `atexit` comes too late: executors, with which Orbax writes, take no work by then.
getattr(threading, "_register_atexit", atexit.register)(_finish)
