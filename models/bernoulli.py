"""A part of what `jax.random.bernoulli` draws: masks that no mesh changes. [S]equence.

JAX numbers the elements of an array in order and makes random bits of key and
number, each by itself (`jax_threefry_partitionable`). So a part of a mask can be drawn alone.
"""

import math

import jax
import jax.numpy as jnp
from jax.extend.random import threefry2x32_p

USUAL = ("threefry2x32", "fry")  # names of JAX's usual kind of key


def part_of_bernoulli(
    key: jax.Array,
    p: float,
    at_S: jax.Array,
    length: int,
    shape: tuple[int, ...],
    of_D: jax.Array | None = None,
) -> jax.Array:
    """Return the rows `at_S` of `jax.random.bernoulli(key, p, (length, *shape))`.

    If `of_D` is given, `shape` has one dimension, and only these columns are returned. Keys of
    another kind than JAX's usual one draw the whole.

    >>> key, at = jax.random.key(0), jnp.array([1, 4])
    >>> whole = jax.random.bernoulli(key, 0.5, (6, 3))
    >>> bool((part_of_bernoulli(key, 0.5, at, 6, (3,)) == whole[at]).all())
    True
    >>> of = jnp.array([0, 2])
    >>> bool((part_of_bernoulli(key, 0.5, at, 6, (3,), of) == whole[at][:, of]).all())
    True
    """
    of_elements = (
        getattr(jax.config, "jax_threefry_partitionable", True) and math.prod(shape) < 1 << 16
    )
    if not of_elements or str(jax.random.key_impl(key)) not in USUAL:
        rows = jax.random.bernoulli(key, p, (length, *shape))[at_S]
        return rows if of_D is None else rows[..., of_D]
    high, low = _numbers(at_S, math.prod(shape), of_D)
    first, second = (jnp.broadcast_to(k, high.shape) for k in jax.random.key_data(key))
    one, other = threefry2x32_p.bind(first, second, high, low)
    dtype = jnp.asarray(p, float).dtype  # as jax.random.bernoulli has it: float64 in x64 mode
    double = dtype == jnp.float64
    bits = (one.astype("uint64") << 32) | other.astype("uint64") if double else one ^ other
    here = shape if of_D is None else of_D.shape
    return (_uniform(bits, dtype) < jnp.asarray(p, dtype)).reshape(*at_S.shape, *here)


def _numbers(
    at_S: jax.Array, width: int, of_D: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return the numbers of all elements, or of these columns, of some rows: two 32-bit words."""
    columns = jnp.arange(width, dtype="uint32") if of_D is None else of_D.astype("uint32")
    at = at_S.astype("uint32")[:, None]
    low_half = (at & 0xFFFF) * width
    high_half = (at >> 16) * width + (low_half >> 16)
    low, high = (high_half << 16) | (low_half & 0xFFFF), high_half >> 16
    all_low = low + columns[None]
    return high + (all_low < low).astype("uint32"), all_low


def _uniform(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return numbers from 0 to 1 as JAX makes them of random bits."""
    info = jnp.finfo(dtype)
    one = jnp.ones((), dtype).view(bits.dtype)
    return ((bits >> (info.bits - info.nmant)) | one).view(dtype) - 1
