"""Wrappers of any optax optimizer, and Muon by the names of dimensions.

`transforms` (by path, averages, master weights), `rates`, `muon_by_names` (the optimizer),
`matrix_axes` (which dimensions are a matrix), `matrix_exchange` (whole matrices on each device).
"""

from hfjax.optimizers.muon_by_names import muon
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
    "muon",
    "scaled",
]
