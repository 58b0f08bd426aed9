"""Several processes: how they find each other, stop together, and are watched.

Joining: `distributed`, by `environment` (who is in this run), `meeting` and `guest` (the two ends
of a first talk), `spoken`, `ports`. Going on: `agreement`, `exchange`, `stop`, `watchdog`. Starting
them: `launcher`, `job`, `children`, `guardian`, `exit_codes`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfjax.processes.agreement import check_same, say, speaks
    from hfjax.processes.exit_codes import exit_code
    from hfjax.processes.stop import Stop, leaving
    from hfjax.processes.watchdog import Watchdog

_MODULES = {  # imported when they are asked for: a launcher needs no JAX
    "Stop": "stop",
    "Watchdog": "watchdog",
    "check_same": "agreement",
    "exit_code": "exit_codes",
    "leaving": "stop",
    "say": "agreement",
    "speaks": "agreement",
}
__all__ = ["Stop", "Watchdog", "check_same", "exit_code", "leaving", "say", "speaks"]


def __getattr__(name: str) -> Any:
    """Return a public name, its module imported only now."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
