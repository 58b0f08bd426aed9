"""Collectives that send 8 bits an element, and what that loses is sent later (error feedback).

`compressed_reduce_scatter(x, error, axis)` adds to x the error that is left of earlier steps,
sends it to the owners quantised block by block (see quantize.py), and returns what this device's
quantisation lost as the error of the next step. `compressed_all_gather` does the same with rows
that are sent to all; `compressed_all_reduce` is one after the other, the second error kept by the
owner of the sum's rows. (Seide et al. 2014; Karimireddy et al. 2019, error feedback; Tang et al.
2019, "DoubleSqueeze", for both halves.)

The law, for any steps t and up to float32's rounding: what was applied, and what is still owed,
are the true gradients,
    sum over t of applied[t] + sum over devices of errors = sum over t and devices of x[t].
A step that is not applied (non-finite, skipped) keeps the errors from before it. A NaN or an
infinity anywhere in a block makes the block of the result non-finite, and of the new error.

Nothing of this is differentiable: it is for gradients, not under a gradient.

The floor on S ranks, x of n elements of b bytes, blocks of B:
                      a link carries, each way         the memory of a device moves
    reduce_scatter    (S - 1) / S * n * (1 + 4 / B)    n * (b + 8) + (2 * (S - 1) + 4) * n / S
    all_gather        (S - 1) * n * (1 + 4 / B)        n * (b + 8) + 6 * S * n  (x: one of S pieces)
A quarter of float32 on the wire and half of bfloat16; within a host NVLink is rarely so scarce,
across hosts it is `compressed_reference`, with the kernel of `quantize.compress`.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.pallas_kernels.collectives.casting import LARGEST
from hfjax.pallas_kernels.collectives.reference import Axis, differing
from hfjax.pallas_kernels.compressed import kernel, quantize
from hfjax.pallas_kernels.compressed.quantize import BLOCK
from hfjax.pallas_kernels.compressed.reference import Errors, in_two_halves
from hfjax.pallas_kernels.ring.peers import MeshRing, unreachable


@dataclass(frozen=True)
class Tuning:
    """Elements to a tile, tiles in flight, and blocks of threads (at most one to a processor)."""

    elements: int = 4096
    stages: int = 2
    blocks: int = 132


def refuses(
    what: str, x: Any, axis: Axis, size: int, how: str = "int8", block: int = BLOCK
) -> str | None:
    """Return why the kernel of `what` cannot take `x` over an axis of that size, or None.

    `what` is "compressed_all_gather", "compressed_reduce_scatter" or "compressed_all_reduce".
    """
    given = f"{what} of x {x.shape} {x.dtype} over {axis!r} of size {size}"
    if not isinstance(axis, str):
        return f"{given}: one axis is needed. Use the reference for several."
    if not 1 <= size <= LARGEST:
        return f"{given}: at most {LARGEST} GPUs reach each other. Use the reference."
    if reason := unreachable(size, Tuning().blocks):
        return f"{given}: {reason}"
    if what == "compressed_reduce_scatter" and (x.ndim == 0 or x.shape[0] % size):
        return f"{given}: the rows must be a multiple of {size}. Pad them."
    pieces = 1 if what == "compressed_all_gather" else size
    if x.size == 0 or x.size % (pieces * block):
        return (
            f"{given}: a piece must be a multiple of block={block} elements, so x one of "
            f"{pieces * block}. Pad x, or use the reference."
        )
    flat = jax.ShapeDtypeStruct((x.size,), x.dtype)
    return quantize.refuses(flat, how, block)


def _ring(what: str, x: jax.Array, error: jax.Array, axis: Axis, how: str, block: int) -> MeshRing:
    size = lax.axis_size(axis)
    if reason := refuses(what, x, axis, size, how, block):
        raise ValueError(reason)
    if reason := quantize.refuses_error(x, error):
        raise ValueError(reason)
    assert isinstance(axis, str)
    return MeshRing(axis, size)


def compressed_reduce_scatter(
    x: jax.Array,
    error: jax.Array,
    axis: Axis,
    how: str = "int8",
    block: int = BLOCK,
    tuning: Tuning = Tuning(),
) -> tuple[jax.Array, jax.Array]:
    """Return this device's rows of the sum over the axis, in float32, and the new error.

    The own rows are not sent, so they lose nothing and their error is zero.
    """
    ring = _ring("compressed_reduce_scatter", x, error, axis, how, block)
    pieces, errors = (differing(one, axis).reshape(ring.size, -1, block) for one in (x, error))
    total, lost = kernel.scatter(ring, pieces, errors, how, tuning)
    return total.reshape(x.shape[0] // ring.size, *x.shape[1:]), lost.reshape(x.shape)


def compressed_all_gather(
    x: jax.Array,
    error: jax.Array,
    axis: Axis,
    how: str = "int8",
    block: int = BLOCK,
    tuning: Tuning = Tuning(),
) -> tuple[jax.Array, jax.Array]:
    """Return the rows of all devices in float32, the same bits on each, and the new error."""
    ring = _ring("compressed_all_gather", x, error, axis, how, block)
    if ring.size == 1:
        return x.astype(jnp.float32) + error, jnp.zeros_like(error)
    blocks, errors = (differing(one, axis).reshape(-1, block) for one in (x, error))
    whole, lost = kernel.gather(ring, blocks, errors, how, tuning)
    lost = differing(lost, axis).reshape(x.shape)
    return whole.reshape(ring.size * x.shape[0], *x.shape[1:]), lost


def compressed_all_reduce(
    x: jax.Array,
    errors: Errors,
    axis: Axis,
    how: str = "int8",
    block: int = BLOCK,
    tuning: Tuning = Tuning(),
) -> tuple[jax.Array, Errors]:
    """Return the sum over the axis in float32, the same bits on each device, and the new errors."""
    return in_two_halves(
        lambda x, error: compressed_reduce_scatter(x, error, axis, how, block, tuning),
        lambda x, error: compressed_all_gather(x, error, axis, how, block, tuning),
    )(x, errors, axis)
