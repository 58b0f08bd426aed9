"""The collectives of `collectives.py` in plain JAX: what is sent is 8 bits an element, and scales.

XLA moves values and scales by `all_to_all` and `all_gather`, so this runs across hosts too, with
`compress=quantize.compress` where that kernel is at hand. Blocks never reach over the rows of two
owners; a last block may be short.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.pallas_kernels.collectives.reference import (
    Axis,
    add_others,
    differing,
    exchange,
    flat,
    own_piece,
    split_rows,
)
from hfjax.pallas_kernels.compressed.quantize import BLOCK, dequantize, reference_compress


class Errors(NamedTuple):
    """What a device still owes: of what it sent (as x), and of the sum that it owns (n / S)."""

    sent: Any  # a jax.Array, or where it lies
    owned: Any


def no_errors(x: jax.Array, size: int) -> Errors:
    """Return the errors before the first `compressed_all_reduce` of `x` over `size` devices."""
    return Errors(jnp.zeros(x.shape, jnp.float32), jnp.zeros((x.size // size,), jnp.float32))


def _as_bytes(values: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(values, jnp.int8)  # not every transport knows fp8


def compressed_reduce_scatter(
    x: jax.Array,
    error: jax.Array,
    axis: Axis,
    how: str = "int8",
    block: int = BLOCK,
    compress: Callable = reference_compress,
) -> tuple[jax.Array, jax.Array]:
    """Return this device's rows of the sum over the axis, in float32, and the new error.

    The own rows are not sent, so they lose nothing and their error is zero.
    """
    x, error = differing(x, axis), differing(error, axis)
    size, rank = lax.axis_size(axis), lax.axis_index(axis)
    pieces, errors = (split_rows(one, axis).reshape(size, -1) for one in (x, error))
    total = own_piece(pieces, axis).astype(jnp.float32) + own_piece(errors, axis)
    lost = jnp.zeros_like(errors)
    if size > 1:
        values, scales, lost = compress(pieces, errors, how, block)
        received = exchange(_as_bytes(values), axis).view(values.dtype)
        scales = exchange(scales, axis)
        total = add_others(total, lambda r: dequantize(received[r], scales[r], block), axis)
        lost = jnp.where(jnp.arange(size)[:, None] == rank, 0, lost)
    return total.reshape(x.shape[0] // size, *x.shape[1:]), lost.reshape(x.shape)


def compressed_all_gather(
    x: jax.Array,
    error: jax.Array,
    axis: Axis,
    how: str = "int8",
    block: int = BLOCK,
    compress: Callable = reference_compress,
) -> tuple[jax.Array, jax.Array]:
    """Return the rows of all devices in float32, the same bits on each, and the new error."""
    x, error = differing(x, axis), differing(error, axis)
    size = lax.axis_size(axis)
    if size == 1:
        return x.astype(jnp.float32) + error, jnp.zeros_like(error)
    values, scales, lost = compress(x.reshape(-1), error.reshape(-1), how, block)

    def whole(one: jax.Array) -> jax.Array:
        return lax.all_gather(one, axis, axis=0, to="invarying")

    received = whole(_as_bytes(values)).view(values.dtype)
    found = dequantize(received, whole(scales), block)
    return found.reshape(size * x.shape[0], *x.shape[1:]), lost.reshape(x.shape)


def compressed_all_reduce(
    x: jax.Array,
    errors: Errors,
    axis: Axis,
    how: str = "int8",
    block: int = BLOCK,
    compress: Callable = reference_compress,
) -> tuple[jax.Array, Errors]:
    """Return the sum over the axis in float32, the same bits on each device, and the new errors."""
    return in_two_halves(
        lambda x, error: compressed_reduce_scatter(x, error, axis, how, block, compress),
        lambda x, error: compressed_all_gather(x, error, axis, how, block, compress),
    )(x, errors, axis)


def in_two_halves(scatter: Callable, gather: Callable) -> Callable:
    """Return the sum over an axis as a scatter and a gather, each with its own error."""

    def reduce(x: jax.Array, errors: Errors, axis: Axis) -> tuple[jax.Array, Errors]:
        shard, sent = scatter(flat(x, axis), flat(errors.sent, axis))
        total, owned = gather(shard, errors.owned)
        return total.reshape(x.shape), Errors(sent.reshape(x.shape), owned)

    return reduce
