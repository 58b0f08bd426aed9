"""Checkpoints: Orbax directories with a manifest, restored under any strategy.

`checkpoints` saves and restores, by `writer` and `reading`; `directory` is what a directory holds,
`keep` which steps stay, `manifest` the checksums, `record` what is written beside the arrays.
`arrays` are those of a state by path, `compare` says what does not fit a layout, `quiet` keeps back
what others print.
"""

from hfjax.checkpoint.checkpoints import Checkpoints, latest, recorded, restore, save
from hfjax.checkpoint.keep import Keep
from hfjax.checkpoint.reading import Restored

__all__ = ["Checkpoints", "Keep", "Restored", "latest", "recorded", "restore", "save"]
