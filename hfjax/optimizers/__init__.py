"""Wrappers of any optax optimizer: `transforms` (by path, averages, master weights), `rates`."""

from hfjax.optimizers.rates import rate
from hfjax.optimizers.transforms import adamw, averaged, by_path, ema, master, matching, scaled

__all__ = ["adamw", "averaged", "by_path", "ema", "master", "matching", "rate", "scaled"]
