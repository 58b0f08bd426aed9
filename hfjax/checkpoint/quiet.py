"""What Orbax and tensorstore print of a failed save or read is kept back: one error tells it."""

import logging
import sys
import threading
import traceback
from functools import cache
from typing import Any

WRITERS = ("orbax", "tensorstore")


@cache
def keep_quiet() -> None:
    """From now on print no traces of what fails: they are behind the error that is raised."""
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(_is_to_be_told)
    before = sys.unraisablehook

    def hook(given: Any) -> None:
        trace = (given.exc_type, given.exc_value, given.exc_traceback)
        if not _is_late(given.exc_value) and not _is_of_writers(*trace):
            before(given)

    sys.unraisablehook = hook


def _is_to_be_told(record: logging.LogRecord) -> bool:
    """Return whether a record is no error of those who write."""
    return not record.exc_info or not _is_of_writers(*record.exc_info)


def _is_of_writers(*error: Any) -> bool:
    """Return whether an error, (type, value, traceback), passed through Orbax or tensorstore."""
    told = "".join(traceback.format_exception(*error))
    return any(name in told for name in WRITERS)


def _is_late(error: BaseException | None) -> bool:
    """Return whether a thread of tensorstore found the event loop gone, since the save failed."""
    mine = threading.current_thread() is threading.main_thread()
    return not mine and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
