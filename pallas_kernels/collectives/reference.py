"""The collectives of `collectives.py` in plain JAX: the same wire, the same order of additions.

XLA sends what it is given: each piece is cast and then sent with `all_gather` or `all_to_all`,
never with `psum_scatter`, which would add up in the dtype of the wire. The bytes that leave a
device are those of the kernels; what the kernels save is the cast copy in memory.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from hfjax.utils.vma import alike, varying

Axis = str | tuple[str, ...]


def differing(x: jax.Array, axis: Axis) -> jax.Array:
    """Return `x`, marked as differing along the axis where shard_map keeps account of that."""
    return alike(x, varying(lax.axis_index(axis)))


def _gather(x: jax.Array, axis: Axis, wire: DTypeLike) -> jax.Array:
    return lax.all_gather(x.astype(wire), axis, axis=0, tiled=True)


def _scatter(x: jax.Array, axis: Axis, wire: DTypeLike) -> jax.Array:
    size = lax.axis_size(axis)
    if x.ndim == 0 or x.shape[0] % size:
        raise ValueError(
            f"x {x.shape} over {axis!r} of size {size}: the rows must be a multiple of that size. "
            "Pad the rows, or reduce over another axis."
        )
    pieces = x.reshape(size, x.shape[0] // size, *x.shape[1:])  # by the device that owns them
    total = lax.dynamic_index_in_dim(pieces, lax.axis_index(axis), keepdims=False)
    total = total.astype(jnp.promote_types(x.dtype, jnp.float32))
    if size == 1:
        return total
    received = lax.all_to_all(pieces.astype(wire), axis, split_axis=0, concat_axis=0)
    rank = lax.axis_index(axis)
    for other in range(size):  # the lowest rank first
        # A select, not a product: what stands in the own place is not read, it may be NaN.
        total = total + jnp.where(other == rank, 0, received[other].astype(total.dtype))
    return total


def _pull(
    move: Callable, axis: Axis, wire: DTypeLike, like: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array]:
    if lax.axis_size(axis) > 1:  # else nothing is sent, so nothing is rounded
        cotangent = move(cotangent, axis, wire)
    return (cotangent.astype(like.dtype),)


def family(gather: Callable, scatter: Callable) -> list[Callable]:
    """Return `all_gather` and `reduce_scatter`, differentiable, of (x, axis, wire=bfloat16).

    The first returns the rows of all devices along the axis, in `wire`, the second this device's
    rows of the sum over the axis, in float32; both inside `jax.shard_map`. The cotangent of a
    gather goes through the scatter and the other way round.
    """

    def differentiable(move: Callable, back: Callable) -> Callable:
        function = jax.custom_vjp(move, nondiff_argnums=(1, 2))
        forward = lambda x, *how: (move(x, *how), jnp.zeros((0,), x.dtype))
        function.defvjp(forward, partial(_pull, back))
        return lambda x, axis, wire=jnp.bfloat16: function(differing(x, axis), axis, wire)

    return [differentiable(gather, scatter), differentiable(scatter, gather)]


all_gather, reduce_scatter = family(_gather, _scatter)
