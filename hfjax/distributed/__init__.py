"""Several processes: launch, rendezvous, consensus, a common stop, a watchdog.

Joining: `init`, with `environment` (the processes of this run), `rendezvous` and
`rendezvous_client` (server and client), `wire_format`, `ports`. Running: `consensus`, `exchange`,
`stop`, `watchdog`. Launching: `launcher`, `job`, `child_processes`, `supervisor`, `exit_codes`.
`simulated_devices` are for programs that need more devices than there are.
"""

from hfjax.utils.lazy_import import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
