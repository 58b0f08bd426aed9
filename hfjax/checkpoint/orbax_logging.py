"""What Orbax and tensorstore print is kept back: of a failed save or read one error tells.

Orbax writes to the logger of absl, which other libraries and the user may use: a record is Orbax'
if a file of Orbax wrote it, or if its error came through one.
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
    """From now on print no warnings, nor traces of what fails: they are behind the error raised."""
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(_should_log)
    old_hook = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        trace = (unraisable.exc_type, unraisable.exc_value, unraisable.exc_traceback)
        if not _is_late(unraisable.exc_value) and not _is_from_orbax(*trace):
            old_hook(unraisable)

    sys.unraisablehook = hook


def _should_log(record: logging.LogRecord) -> bool:
    """Return whether a record is no warning or error of those who write.

    Who lowers absl's level on purpose still reads what they do. An error without a trace is told:
    it may be that of a manager of the user's own.
    """
    if record.exc_info and _is_from_orbax(*record.exc_info):
        return False
    return ORBAX not in record.pathname or record.levelno != logging.WARNING


def _is_from_orbax(*error: Any) -> bool:
    """Return whether an error, (type, value, traceback), passed through Orbax or tensorstore."""
    trace_text = "".join(traceback.format_exception(*error))
    return any(name in trace_text for name in WRITERS)


def _is_late(error: BaseException | None) -> bool:
    """Return whether a thread of tensorstore found the event loop gone, since the save failed."""
    is_main = threading.current_thread() is threading.main_thread()
    return not is_main and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
