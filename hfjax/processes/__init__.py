"""Several processes: how they find each other, stop together, and are watched."""

from hfjax.processes.agreement import check_same, say, speaks
from hfjax.processes.exit_codes import exit_code
from hfjax.processes.stop import Stop, leaving
from hfjax.processes.watchdog import Watchdog

__all__ = ["Stop", "Watchdog", "check_same", "exit_code", "leaving", "say", "speaks"]
