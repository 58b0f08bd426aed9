"""Several processes: how they find each other, stop together, and are watched.

Joining: `distributed`, by `environment` (who is in this run), `meeting` and `guest` (the two ends
of a first talk), `spoken`, `ports`. Going on: `agreement`, `exchange`, `stop`, `watchdog`. Starting
them: `launcher`, `job`, `children`, `guardian`, `exit_codes`.
"""

from hfjax.base.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__)
