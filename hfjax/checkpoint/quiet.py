"""What Orbax and tensorstore print of a save that fails is kept back: one error tells it."""

import logging
import sys
import threading
import traceback
from functools import cache
from typing import Any

WRITERS = ("orbax", "tensorstore")


@cache
def keep_quiet() -> None:
    """From now on print no traces of a failed save: they are behind the error that is raised."""
    for logger in ("absl", "asyncio"):
        logging.getLogger(logger).addFilter(_is_to_be_told)
    before = sys.unraisablehook

    def hook(given: Any) -> None:
        if not _is_late(given.exc_value):
            before(given)

    sys.unraisablehook = hook


def _is_to_be_told(record: logging.LogRecord) -> bool:
    """Return whether a record is no error of those who write."""
    if not record.exc_info:
        return True
    told = "".join(traceback.format_exception(*record.exc_info))
    return not any(name in told for name in WRITERS)


def _is_late(error: BaseException | None) -> bool:
    """Return whether a thread of tensorstore found the event loop gone, since the save failed."""
    mine = threading.current_thread() is threading.main_thread()
    return not mine and isinstance(error, RuntimeError) and str(error) == "Event loop is closed"
