"""Several processes: how they find each other, stop together, and are watched."""

from hfjax.processes.codes import exit_code
from hfjax.processes.leave import leaving
from hfjax.processes.same import check_same
from hfjax.processes.speech import say, speaks
from hfjax.processes.stop import Stop
from hfjax.processes.watchdog import Watchdog

__all__ = ["Stop", "Watchdog", "check_same", "exit_code", "leaving", "say", "speaks"]
