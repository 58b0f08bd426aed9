"""A program that ends while a step is written: finished first, or told that it is lost."""

import atexit
import concurrent.futures.thread  # noqa: F401  (its own exit is registered first: it runs last)
import sys
import threading
from typing import Protocol


class Closes(Protocol):
    """What has to be closed."""

    def close(self) -> None: ...


_OPEN: dict[int, Closes] = {}


def finish_at_exit(one: Closes) -> None:
    """Close it when the program ends, unless `finished` says that it is done.

    From Python 3.12 on no thread starts by then: what is not nearly written cannot be finished.
    """
    _OPEN[id(one)] = one


def finished(one: Closes) -> None:
    """It is closed."""
    _OPEN.pop(id(one), None)


def _finish() -> None:
    for one in list(_OPEN.values()):
        try:
            one.close()
        except Exception as error:
            advice = "The program ended without close(): use `with hfjax.Checkpoints(…)`."
            print(f"hfjax: {error} {advice}", file=sys.stderr)


# A plain `atexit` comes too late: executors, with which Orbax writes, take no work by then.
getattr(threading, "_register_atexit", atexit.register)(_finish)
