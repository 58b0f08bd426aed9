"""Wrappers of any optax optimizer: `transforms` (by path, averages, master weights), `rates`."""

from hfjax.optimizers.rates import lr_schedule
from hfjax.optimizers.transforms import (
    adamw,
    averaged,
    by_path,
    ema,
    master_weights,
    matching,
    scaled,
)

__all__ = [
    "adamw",
    "averaged",
    "by_path",
    "ema",
    "lr_schedule",
    "master_weights",
    "matching",
    "scaled",
]
