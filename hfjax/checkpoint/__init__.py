"""Checkpoints: Orbax directories with a manifest, restored under any strategy.

`checkpoints` saves and restores, by `writer` and `restoring`; `directory` is what a directory
holds, `retention` which steps stay, `manifest` the checksums, `metadata` what is written beside the
arrays. `arrays` are those of a state by path, `compare` says what does not fit a layout,
`orbax_logging` silences what Orbax prints of a failure that is raised anyway.
"""

from hfjax.checkpoint.checkpoints import Checkpoints, latest, recorded, restore, save
from hfjax.checkpoint.restoring import Restored
from hfjax.checkpoint.retention import Keep

__all__ = ["Checkpoints", "Keep", "Restored", "latest", "recorded", "restore", "save"]
