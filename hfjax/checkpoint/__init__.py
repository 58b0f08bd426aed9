"""Checkpoints: Orbax directories with a manifest, restored under any strategy."""

from hfjax.checkpoint.checkpoints import Checkpoints, latest, recorded, restore, save
from hfjax.checkpoint.keep import Keep
from hfjax.checkpoint.reading import Restored

__all__ = ["Checkpoints", "Keep", "Restored", "latest", "recorded", "restore", "save"]
