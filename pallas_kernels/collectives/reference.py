"""The collectives of `collectives.py` in plain JAX: the same wire, the same order of additions.

XLA sends what it is given: each piece is cast and then sent with `all_gather` or `all_to_all`,
never with `psum_scatter`, which would add up in the dtype of the wire. The bytes that leave a
device are those of the kernels; what the kernels save is the cast copy in memory.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from hfjax.base.varying import alike, varying

Axis = str | tuple[str, ...]


def differing(x: jax.Array, axis: Axis) -> jax.Array:
    """Return `x`, marked as differing along the axis where shard_map keeps account of that."""
    return alike(x, varying(lax.axis_index(axis)))


def sum_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype in which contributions are added: float32, or wider where they are."""
    return jnp.promote_types(dtype, jnp.float32)


def split_rows(x: jax.Array, axis: Axis) -> jax.Array:
    """Return `x` with its rows grouped by the device along the axis that owns them."""
    size = lax.axis_size(axis)
    if x.ndim == 0 or x.shape[0] % size:
        raise ValueError(
            f"x {x.shape} over {axis!r} of size {size}: the rows must be a multiple of that size. "
            "Pad the rows, or reduce over another axis."
        )
    return x.reshape(size, x.shape[0] // size, *x.shape[1:])


def own_piece(pieces: jax.Array, axis: Axis) -> jax.Array:
    """Return the piece that this device owns."""
    return lax.dynamic_index_in_dim(pieces, lax.axis_index(axis), keepdims=False)


def exchange(pieces: jax.Array, axis: Axis) -> jax.Array:
    """Return what every device held for this one, in the order of their ranks."""
    return lax.all_to_all(pieces, axis, split_axis=0, concat_axis=0)


def add_others(own: jax.Array, received: Callable[[int], jax.Array], axis: Axis) -> jax.Array:
    """Return `own` plus `received(rank)` of every other rank, the lowest rank first."""
    rank = lax.axis_index(axis)
    for other in range(lax.axis_size(axis)):
        # A select, not a product: what stands in the own place is not read, it may be NaN.
        own = own + jnp.where(other == rank, 0, received(other).astype(own.dtype))
    return own


def _gather(x: jax.Array, axis: Axis, wire: DTypeLike) -> jax.Array:
    return lax.all_gather(x.astype(wire), axis, axis=0, tiled=True)


def _scatter(x: jax.Array, axis: Axis, wire: DTypeLike) -> jax.Array:
    pieces = split_rows(x, axis)
    own = own_piece(pieces, axis).astype(sum_dtype(x.dtype))
    if lax.axis_size(axis) == 1:
        return own
    received = exchange(pieces.astype(wire), axis)
    return add_others(own, lambda rank: received[rank], axis)


def _like(x: jax.Array) -> jax.Array:
    return jnp.zeros((0,), x.dtype)


def _pull(
    move: Callable, axis: Axis, wire: DTypeLike, like: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array]:
    if lax.axis_size(axis) > 1:  # else nothing is sent, so nothing is rounded
        cotangent = move(cotangent, axis, wire)
    return (cotangent.astype(like.dtype),)


def family(gather: Callable, scatter: Callable) -> tuple[Callable, ...]:
    """Return `all_gather` and `reduce_scatter`, differentiable, of (x, axis, wire).

    The cotangent of a gather goes through the scatter and the other way round.
    """

    def differentiable(move: Callable, back: Callable) -> Callable:
        function = jax.custom_vjp(move, nondiff_argnums=(1, 2))
        function.defvjp(lambda x, *how: (move(x, *how), _like(x)), partial(_pull, back))
        return function

    functions = differentiable(gather, scatter), differentiable(scatter, gather)
    return tuple(lambda x, axis, wire, f=f: f(differing(x, axis), axis, wire) for f in functions)


_family = family(_gather, _scatter)


def all_gather(x: jax.Array, axis: Axis, wire: DTypeLike = jnp.bfloat16) -> jax.Array:
    """Return the rows of all devices along the axis, in `wire` (inside `jax.shard_map`)."""
    return _family[0](x, axis, wire)


def reduce_scatter(x: jax.Array, axis: Axis, wire: DTypeLike = jnp.bfloat16) -> jax.Array:
    """Return this device's rows of the sum over the axis, in float32 (inside `jax.shard_map`)."""
    return _family[1](x, axis, wire)
