"""The collectives of `casting.py` in plain JAX: the same wire dtype and order of additions.

Each piece is cast and then sent with `all_gather` or `all_to_all`, never with `psum_scatter`, which
would sum in the dtype of the wire. A device sends the same bytes as with the kernels; the kernels
save the cast copy in memory.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from hfjax.utils.vma import mark_varying, varying_axes

Axis = str | tuple[str, ...]


def as_varying(x: jax.Array, axis: Axis) -> jax.Array:
    """Return `x`, marked as varying along the axis if shard_map tracks that."""
    return mark_varying(x, varying_axes(lax.axis_index(axis)))


def _gather(x: jax.Array, axis: Axis, wire: DTypeLike) -> jax.Array:
    return lax.all_gather(x.astype(wire), axis, axis=0, tiled=True)


def _scatter(x: jax.Array, axis: Axis, wire: DTypeLike) -> jax.Array:
    size = lax.axis_size(axis)
    if x.ndim == 0 or x.shape[0] % size:
        raise ValueError(
            f"x {x.shape} over {axis!r} of size {size}: the rows must be a multiple of that size. "
            "Pad the rows, or reduce over another axis."
        )
    chunks = x.reshape(size, x.shape[0] // size, *x.shape[1:])  # by owner
    summed = lax.dynamic_index_in_dim(chunks, lax.axis_index(axis), keepdims=False)
    summed = summed.astype(jnp.promote_types(x.dtype, jnp.float32))
    if size == 1:
        return summed
    received = lax.all_to_all(chunks.astype(wire), axis, split_axis=0, concat_axis=0)
    rank = lax.axis_index(axis)
    for other in range(size):  # the lowest rank first
        # A select, not a multiplication: the own entry is not used and may be NaN.
        summed = summed + jnp.where(other == rank, 0, received[other].astype(summed.dtype))
    return summed


def _vjp(
    collective: Callable, axis: Axis, wire: DTypeLike, like: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array]:
    if lax.axis_size(axis) > 1:  # otherwise nothing is sent, so nothing is rounded
        cotangent = collective(cotangent, axis, wire)
    return (cotangent.astype(like.dtype),)


def make_pair(gather: Callable, scatter: Callable) -> list[Callable]:
    """Return `all_gather` and `reduce_scatter`, differentiable, of (x, axis, wire=bfloat16).

    The first returns the rows of all devices along the axis, in `wire`, the second this device's
    rows of the sum over the axis, in float32; both inside `jax.shard_map`. The transpose of the
    gather is the scatter and vice versa.
    """

    def make_differentiable(collective: Callable, transpose: Callable) -> Callable:
        function = jax.custom_vjp(collective, nondiff_argnums=(1, 2))
        forward = lambda x, *how: (collective(x, *how), jnp.zeros((0,), x.dtype))
        function.defvjp(forward, partial(_vjp, transpose))
        return lambda x, axis, wire=jnp.bfloat16: function(as_varying(x, axis), axis, wire)

    return [make_differentiable(gather, scatter), make_differentiable(scatter, gather)]


all_gather, reduce_scatter = make_pair(_gather, _scatter)
