"""Shows what the library logs as the output of a command."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING

from hfjax.utils import progress
from hfjax.utils.tables import escape_controls

if TYPE_CHECKING:
    from rich.console import Console

LOGGER = logging.getLogger("hfjax")


class LogHandler(logging.Handler):
    """Prints messages, above a progress bar that is on its console.

    An error of printing is raised, so that it ends the command as one of any other output.
    """

    @cached_property
    def console(self) -> "Console":
        """Standard output."""
        from rich.console import Console  # takes 0.1 s: `hfjax --help` does not need it

        return Console(highlight=False, soft_wrap=True)

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message, on standard error if it is of progress; escape what moves a terminal."""
        text = record.getMessage()
        if record.name == progress.__name__:
            print(text, file=sys.stderr, flush=True)
        else:
            text = escape_controls(text) if self.console.is_terminal else text
            self.console.print(text, markup=False)


@contextmanager
def show_log() -> Iterator[LogHandler]:
    """Show what the library logs, and on a terminal the progress of what takes long."""
    handler, level, propagate = LogHandler(), LOGGER.level, LOGGER.propagate
    LOGGER.addHandler(handler)
    LOGGER.setLevel(logging.INFO)
    LOGGER.propagate = False  # a user's own code may have configured the root logger
    try:
        with progress.use_terminal(sys.stderr):
            yield handler
    finally:
        LOGGER.removeHandler(handler)
        LOGGER.setLevel(level)
        LOGGER.propagate = propagate


def log_handler() -> LogHandler | None:
    """Return the handler that `show_log` has added."""
    return next((x for x in LOGGER.handlers if isinstance(x, LogHandler)), None)
