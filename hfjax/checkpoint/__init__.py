"""Checkpoints: Orbax directories with a manifest, restored under any strategy."""

from hfjax.checkpoint.checkpoints import Checkpoints
from hfjax.checkpoint.keep import Keep
from hfjax.checkpoint.reading import Restored
from hfjax.checkpoint.shortcuts import latest, recorded, restore, save

__all__ = ["Checkpoints", "Keep", "Restored", "latest", "recorded", "restore", "save"]
