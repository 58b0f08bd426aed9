"""Silence Orbax and tensorstore: a failed save or read raises one error, and prints no others.

Orbax logs to absl's logger, which other libraries and the user may use: a record is Orbax' if a
file of Orbax wrote it, or if its error passed through one.
"""

import logging
import sys
import threading
import traceback
from functools import cache
from typing import Any

ORBAX = "orbax/checkpoint/"  # in the path of each of its files
WRITERS = (ORBAX, "orbax.checkpoint", "tensorstore")  # in a trace


@cache
def silence_orbax() -> None:
    """Stop printing Orbax' warnings and traces of failures: the raised error has their cause."""
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(_should_log)
    old_hook = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        trace = (unraisable.exc_type, unraisable.exc_value, unraisable.exc_traceback)
        if not _is_late(unraisable.exc_value) and not _is_from_orbax(*trace):
            old_hook(unraisable)

    sys.unraisablehook = hook


def _should_log(record: logging.LogRecord) -> bool:
    """Return whether to log a record: not a warning or error of the libraries that write.

    With absl's level lowered on purpose, their progress is logged. An error without a trace is
    logged: it may be that of a manager of the user's own.
    """
    if record.exc_info and _is_from_orbax(*record.exc_info):
        return False
    return ORBAX not in record.pathname or record.levelno != logging.WARNING


def _is_from_orbax(*error: Any) -> bool:
    """Return whether an error, (type, value, traceback), passed through Orbax or tensorstore."""
    trace_text = "".join(traceback.format_exception(*error))
    return any(name in trace_text for name in WRITERS)


def _is_late(error: BaseException | None) -> bool:
    """Return whether a tensorstore thread found the event loop closed, after a failed save."""
    is_main = threading.current_thread() is threading.main_thread()
    return not is_main and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
