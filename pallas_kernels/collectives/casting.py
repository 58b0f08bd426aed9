"""all_gather and reduce_scatter with the cast fused into the send.

Data is sent in `wire` (bfloat16 by default) and summed in float32: an owner starts with its own
rows, never rounded, and adds those of the other ranks, the lowest rank first. So the same operands
give the same bits on every run. `all_gather` and `reduce_scatter` are each other's transpose;
cotangents are sent and summed the same way.

The kernels are for the GPUs of one host, which access each other's memory: each rank stores every
piece directly into its owner's memory, in one hop, and no cast copy is ever in memory. Across hosts
`reference` sends the same bytes.

The lower bound on S ranks, x of n elements of b bytes, w bytes on the wire:
                      a link carries, each way     the memory of a device moves
    all_gather        (S - 1) * n * w              n * b + S * n * w       (x is one of S pieces)
    reduce_scatter    (S - 1) / S * n * w          n * b + 2 * (S - 1) / S * n * w + 4 * n / S
One of these bounds it, the link on NVLink (450 GB/s each way against 4800 on an H200).
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from hfjax.pallas_kernels.collectives import kernel, reference as plain
from hfjax.pallas_kernels.collectives.reference import Axis
from hfjax.pallas_kernels.ring.peers import MeshRing, unreachable_reason
from hfjax.utils.paths import Shaped

DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
MAX_GPUS = 8  # GPUs of a host that access each other's memory


@dataclass(frozen=True)
class Tuning:
    """Elements per tile, tiles in flight, and thread blocks (at most one per multiprocessor)."""

    elements: int = 4096
    stages: int = 3
    blocks: int = 132


def refuses(
    op: str, x: Shaped, axis: Axis, size: int, wire: DTypeLike = jnp.bfloat16
) -> str | None:
    """Return why the kernel of `op` cannot take `x` over an axis of size `size`, or None.

    `op` is "all_gather" or "reduce_scatter".
    """
    call = f"{op} of x {x.shape} {x.dtype} over {axis!r} of size {size}, sent as {wire}"
    if not isinstance(axis, str):
        return f"{call}: one axis is needed. Use the reference for several."
    if not 1 <= size <= MAX_GPUS:
        return f"{call}: at most {MAX_GPUS} GPUs reach each other. Use the reference."
    if reason := unreachable_reason(size, Tuning().blocks):
        return f"{call}: {reason}"
    if x.dtype not in DTYPES or jnp.dtype(wire) not in map(jnp.dtype, DTYPES):
        return f"{call}: float32, bfloat16 or float16 is needed for both. Cast x."
    if op == "reduce_scatter" and (x.ndim == 0 or x.shape[0] % size):
        return f"{call}: the rows must be a multiple of {size}. Pad them."
    num_pieces = 1 if op == "all_gather" else size
    aligned = 16 // min(x.dtype.itemsize, jnp.dtype(wire).itemsize)
    if x.size == 0 or x.size % (num_pieces * aligned):
        return (
            f"{call}: a piece must be a multiple of {aligned} elements (16 bytes), so x one of "
            f"{num_pieces * aligned}. Pad x, or use the reference."
        )
    return None


def _make_ring(op: str, x: jax.Array, axis: Axis, wire: DTypeLike) -> MeshRing:
    size = lax.axis_size(axis)
    if reason := refuses(op, x, axis, size, wire):
        raise ValueError(reason)
    assert isinstance(axis, str)
    return MeshRing(axis, size)


def make_collectives(tuning: Tuning) -> list[Callable]:
    """Return `all_gather` and `reduce_scatter` with a tuning."""

    def gather(x: jax.Array, axis: Axis, wire: DTypeLike) -> jax.Array:
        ring = _make_ring("all_gather", x, axis, wire)
        gathered = kernel.gather(ring, x.reshape(-1), wire, tuning)
        return gathered.reshape(ring.size * x.shape[0], *x.shape[1:])

    def scatter(x: jax.Array, axis: Axis, wire: DTypeLike) -> jax.Array:
        ring = _make_ring("reduce_scatter", x, axis, wire)
        summed = kernel.scatter(ring, x.reshape(ring.size, -1), wire, tuning)
        return summed.reshape(x.shape[0] // ring.size, *x.shape[1:])

    return plain.make_pair(gather, scatter)


all_gather, reduce_scatter = make_collectives(Tuning())
