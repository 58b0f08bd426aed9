"""Wrappers of any optax optimizer: by path, rates, averages, master weights."""

from hfjax.optimizers.rates import rate
from hfjax.optimizers.transforms import adamw, averaged, by_path, ema, master, matching, scaled

__all__ = ["adamw", "averaged", "by_path", "ema", "master", "matching", "rate", "scaled"]
