"""Who speaks: of several processes, the first."""

from typing import Any

from jax._src import distributed


def speaks() -> bool:
    """Return whether this process is the one that prints and writes logs (starts no backend)."""
    return distributed.global_state.process_id == 0


def say(*words: Any) -> None:
    """Print at once, in the process that speaks."""
    if speaks():
        print(*words, flush=True)
