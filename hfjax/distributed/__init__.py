"""Several processes: how they find each other, stop together, and are watched.

Joining: `init`, by `environment` (who is in this run), `rendezvous` and `rendezvous_client` (the
two ends of a first talk), `wire_format`, `ports`. Going on: `consensus`, `exchange`, `stop`,
`watchdog`. Starting them: `launcher`, `job`, `child_processes`, `supervisor`, `exit_codes`.
"""

from hfjax.utils.lazy_import import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
