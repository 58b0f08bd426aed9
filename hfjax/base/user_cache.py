"""Where hfjax keeps what it can make again."""

import os
from pathlib import Path


def user_cache() -> Path:
    """Return hfjax's folder in the user's cache, as XDG_CACHE_HOME says."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfjax"
