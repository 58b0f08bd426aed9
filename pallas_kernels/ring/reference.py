"""The matmuls over a ring in plain JAX: shards travel by `ppermute`, in both directions.

Each step's transfer is independent of that step's matmul, so XLA can overlap them.
Shapes: M rows of one shard, R = S M rows of all, K contracted, N columns; S ranks along `axis`.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.utils.paths import Index


def shards(x: jax.Array, axis: str) -> Iterator[tuple]:
    """Yield (rank, its x) for every rank, the nearest ones first."""
    size, own_rank = lax.axis_size(axis), lax.axis_index(axis)
    forward = backward = x
    yield own_rank, x
    for step in range(1, size // 2 + 1):
        forward = lax.ppermute(forward, axis, _shift(size, 1))
        yield (own_rank - step) % size, forward
        if 2 * step < size:
            backward = lax.ppermute(backward, axis, _shift(size, -1))
            yield (own_rank + step) % size, backward


def _shift(size: int, offset: int) -> list:
    return [(rank, (rank + offset) % size) for rank in range(size)]


def _product(a: Any, b: Any) -> jax.Array:
    """Return a @ b, accumulated in (at least) float32."""
    wide = jnp.promote_types(a.dtype, jnp.float32)
    return jnp.matmul(a, b, preferred_element_type=wide)


def _slice_rows(x: Any, rank: Index, count: int) -> jax.Array:
    return lax.dynamic_slice_in_dim(x, rank * count, count, 0)


def gather_matmul(x_MK: jax.Array, w_KN: jax.Array, axis: str) -> jax.Array:
    """Return all ranks' x, concatenated, times w: [R, N]."""
    rows = x_MK.shape[0]
    out = jnp.zeros((lax.axis_size(axis) * rows, w_KN.shape[1]), x_MK.dtype)
    for rank, shard in shards(x_MK, axis):
        block = _product(shard, w_KN).astype(x_MK.dtype)
        out = lax.dynamic_update_slice_in_dim(out, block, rank * rows, 0)
    return out


def matmul_scatter(x_RK: jax.Array, w_KN: jax.Array, axis: str) -> jax.Array:
    """Return this rank's rows of the sum over ranks of x times w: [M, N].

    Two partial sums of half the columns travel in opposite directions, in float32 (on links too).
    """
    size, own_rank = lax.axis_size(axis), lax.axis_index(axis)
    rows, middle = x_RK.shape[0] // size, w_KN.shape[1] // 2
    halves = []
    for w_half, direction in ((w_KN[:, :middle], 1), (w_KN[:, middle:], -1)):
        acc = _product(_slice_rows(x_RK, (own_rank - direction) % size, rows), w_half)
        for step in range(2, size + 1):
            acc = lax.ppermute(acc, axis, _shift(size, direction))
            acc += _product(_slice_rows(x_RK, (own_rank - direction * step) % size, rows), w_half)
        halves.append(acc.astype(x_RK.dtype))
    return jnp.concatenate(halves, 1)


def weight_gradient(x_MK: jax.Array, y_RN: jax.Array, axis: str) -> jax.Array:
    """Return (all ranks' x, concatenated)^T times y, [K, N], without materialising all of x."""
    rows = x_MK.shape[0]
    products = (_product(x.T, _slice_rows(y_RN, rank, rows)) for rank, x in shards(x_MK, axis))
    return reduce(jnp.add, products)
