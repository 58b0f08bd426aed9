"""Leave at once: JAX's exit waits for the other processes, also for those that are dead."""

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import jax

from hfjax.processes.codes import FAILED, FINISHED, INTERRUPTED, RESUMABLE


def leave(code: int) -> NoReturn:
    """End this process now, with what was printed written out, and no exit handlers run."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue  # closed, or its reader is gone
    os._exit(code)


@contextmanager
def leaving() -> Iterator[None]:
    """Run the main part of a program: in a run of several processes an error ends it at once.

    Otherwise a process whose peer died would tell so and then wait for that peer at the exit.
    """
    try:
        yield
    except BaseException as error:
        if not jax.distributed.is_initialized() or _orderly(error):
            raise
        leave(_tell(error))


def _orderly(error: BaseException) -> bool:
    """Return whether all processes end so: there is nothing to be afraid of at the exit."""
    return isinstance(error, SystemExit) and error.code in (None, FINISHED, *RESUMABLE)


def _tell(error: BaseException) -> int:
    """Print an error as Python would, and return its exit code."""
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        return INTERRUPTED if isinstance(error, KeyboardInterrupt) else FAILED
    if isinstance(error.code, int):
        return error.code
    print(error.code, file=sys.stderr)
    return FAILED
