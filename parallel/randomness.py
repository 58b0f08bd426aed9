"""Random keys of a step: one per row of the global batch, so that no mesh changes a mask.

A variable that holds a key and says `per_row=True` becomes one key per row. The keys of
`nnx.Rngs` become one key per device and microbatch: right, but other masks on another mesh.
"""

from typing import Any

import jax
from flax import nnx
from jax import lax


def is_random(variable: Any) -> bool:
    """Return whether a variable is the state of a random generator."""
    return isinstance(variable, nnx.RngState) or bool(variable.get_metadata("per_row", False))


def keys_for(variable: Any, key: jax.Array, step: Any, first_row: Any, rows: int) -> jax.Array:
    """Return what a variable holds while the rows from `first_row` (counted globally) run."""
    if variable.get_metadata("per_row", False):
        ids = first_row + lax.iota("int32", rows)
        return jax.vmap(_fold, (None, 0), key.ndim)(_fold(key, step), ids)
    if isinstance(variable, nnx.RngKey):
        return _fold(_fold(key, step), first_row)
    return key


def _fold(key: jax.Array, number: Any) -> jax.Array:
    """Return the key, or each of the stacked keys, with a number folded in."""
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(key, number)
