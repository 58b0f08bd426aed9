"""Wrappers of any optax optimizer: by path, rates, averages, master weights."""

from hfjax.optimizers.fused_adamw import adamw
from hfjax.optimizers.rates import rate
from hfjax.optimizers.transforms import averaged, by_path, ema, master, matching, scaled

__all__ = ["adamw", "averaged", "by_path", "ema", "master", "matching", "rate", "scaled"]
