"""Random keys of a step: one per row of the global batch, so that no mesh changes a mask.

A variable that holds a key and says `per_row=True` becomes one key per row. Any other key, those
of `nnx.Rngs` among them, becomes one per device and microbatch: right, but other masks on another
mesh.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


def is_random(variable: Any) -> bool:
    """Return whether a variable is the state of a random generator: any typed key is."""
    if isinstance(variable, nnx.RngState) or _is_key(variable):
        return True
    return isinstance(variable, nnx.Variable) and bool(variable.get_metadata("per_row", False))


def _is_key(variable: Any) -> bool:
    return jnp.issubdtype(variable.dtype, jax.dtypes.prng_key)


def keys_for(variable: Any, key: jax.Array, step: Any, first_row: Any, rows: int) -> jax.Array:
    """Return what a variable holds while the rows from `first_row` (counted globally) run."""
    if isinstance(variable, nnx.Variable) and variable.get_metadata("per_row", False):
        ids = first_row + lax.iota("int32", rows)
        return jax.vmap(_fold, (None, 0), key.ndim)(_fold(key, step), ids)
    if isinstance(variable, nnx.RngKey) or _is_key(variable):
        return _fold(_fold(key, step), first_row)
    return key


def _fold(key: jax.Array, number: Any) -> jax.Array:
    """Return the key, or each of the stacked keys, with a number folded in."""
    fold = jax.random.fold_in
    for _ in range(key.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(key, number)
