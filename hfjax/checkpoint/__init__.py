"""Checkpoints: Orbax directories with a manifest, restored under any strategy.

`checkpoints` saves and restores, with `writer` and `restoring`; `directory` lists, deletes and
locks the steps of a directory, `retention` decides which stay, `manifest` has the checksums,
`metadata` the record beside the arrays. `arrays` maps a state to arrays by path, `compare` reports
what does not fit a layout, `orbax_logging` silences Orbax about failures that are raised anyway.
"""

from hfjax.checkpoint.checkpoints import (
    CheckpointManager,
    checkpoint_metadata,
    latest_step,
    restore,
    save,
)
from hfjax.checkpoint.restoring import RestoredRun
from hfjax.checkpoint.retention import RetentionPolicy

__all__ = [
    "CheckpointManager",
    "RestoredRun",
    "RetentionPolicy",
    "checkpoint_metadata",
    "latest_step",
    "restore",
    "save",
]
