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
    key: jax.Array, p: float, at_S: jax.Array, length: int, shape: tuple[int, ...]
) -> jax.Array:
    """Return the rows `at_S` of `jax.random.bernoulli(key, p, (length, *shape))`.

    Keys of another kind than JAX's usual one draw the whole.

    >>> key, at = jax.random.key(0), jnp.array([1, 4])
    >>> whole = jax.random.bernoulli(key, 0.5, (6, 3))
    >>> bool((part_of_bernoulli(key, 0.5, at, 6, (3,)) == whole[at]).all())
    True
    """
    of_elements = (
        getattr(jax.config, "jax_threefry_partitionable", True) and math.prod(shape) < 1 << 16
    )
    if not of_elements or str(jax.random.key_impl(key)) not in USUAL:
        return jax.random.bernoulli(key, p, (length, *shape))[at_S]
    high, low = _numbers(at_S, math.prod(shape))
    first, second = (jnp.broadcast_to(k, high.shape) for k in jax.random.key_data(key))
    one, other = threefry2x32_p.bind(first, second, high, low)
    dtype = jnp.asarray(p, float).dtype  # as jax.random.bernoulli has it: float64 in x64 mode
    double = dtype == jnp.float64
    bits = (one.astype("uint64") << 32) | other.astype("uint64") if double else one ^ other
    return (_uniform(bits, dtype) < jnp.asarray(p, dtype)).reshape(*at_S.shape, *shape)


def _numbers(at_S: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Return the numbers of all elements of some rows, in two words of 32 bits."""
    at = at_S.astype("uint32")[:, None]
    low_half = (at & 0xFFFF) * width
    high_half = (at >> 16) * width + (low_half >> 16)
    low, high = (high_half << 16) | (low_half & 0xFFFF), high_half >> 16
    all_low = low + jnp.arange(width, dtype="uint32")[None]
    return high + (all_low < low).astype("uint32"), all_low


def _uniform(bits: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Return numbers from 0 to 1 as JAX makes them of random bits."""
    info = jnp.finfo(dtype)
    one = jnp.ones((), dtype).view(bits.dtype)
    return ((bits >> (info.bits - info.nmant)) | one).view(dtype) - 1
