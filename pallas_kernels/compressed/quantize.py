"""Block-scaled quantisation to 8 bits, in one pass: int8, or fp8 (e4m3).

Every block of `block` consecutive elements along the last dimension shares one float32 scale, the
largest magnitude over the largest code; values are rounded to the nearest, ties to even (MX and
bitsandbytes scale by block too: Dettmers et al. 2022, "8-bit Optimizers via Block-wise
Quantization"). A block of zeros, or of magnitudes below 1e-30, becomes zeros. A block with a NaN
or an infinity is non-finite as a whole after the round trip: a broken gradient stays visible.

With `compress` the error of earlier rounds is added first, and what the quantisation loses now
is the error of the next round (error feedback: Seide et al. 2014, "1-Bit Stochastic Gradient
Descent"; Karimireddy et al. 2019, "Error Feedback Fixes SignSGD").

The floor, n elements of x of b bytes: the device's memory moves n * (b + 1 + 4 / block) bytes for
`quantize` and 8 * n more for `compress` (an error read, an error written); about 6 operations an
element, far below what hides behind that. `dequantize` is left to XLA, which fuses it into its
reader.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.base.paths import Shaped
from hfjax.pallas_kernels import mosaic, plgpu
from hfjax.pallas_kernels.collectives import stream
from hfjax.pallas_kernels.mosaic import Ref

BLOCK = 256
BLOCKS = (128, 256)
TINY = 1e-30  # magnitudes below are zeros: one over their scale may overflow


@dataclass(frozen=True)
class Code:
    """How a value is written in 8 bits."""

    dtype: Any
    largest: float


CODES = {"int8": Code(jnp.int8, 127.0), "fp8": Code(jnp.float8_e4m3fn, 448.0)}


@dataclass(frozen=True)
class Tuning:
    """Rows of blocks to a tile, tiles in flight, and blocks of threads: one to a processor."""

    tile: int = 16
    stages: int = 3
    blocks: int = 132


def code(how: str) -> Code:
    """Return the code of that name."""
    if how not in CODES:
        raise ValueError(f"how={how!r}: one of {', '.join(map(repr, CODES))} is needed.")
    return CODES[how]


def largest_of(x: jax.Array, axis: int) -> jax.Array:
    """Return the largest magnitude along an axis, infinity where something is NaN."""
    # A maximum does not always keep a NaN: XLA's of a CPU can lose it.
    return jnp.max(jnp.where(x != x, jnp.inf, jnp.abs(x)), axis=axis)


def in_blocks(x: jax.Array, block: int) -> jax.Array:
    """Return `x` (…, n) as (…, ceil(n / block), block), zeros after the end."""
    if rest := -x.shape[-1] % block:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, rest)])
    return x.reshape(*x.shape[:-1], -1, block)


def _out_of_blocks(blocks: jax.Array, n: int) -> jax.Array:
    whole = blocks.reshape(*blocks.shape[:-2], -1)
    return whole if whole.shape[-1] == n else whole[..., :n]


def reference(x: jax.Array, how: str, block: int = BLOCK) -> tuple[jax.Array, jax.Array]:
    """Return `x` (…, n) in 8 bits, and float32 scales (…, ceil(n / block)).

    >>> values, scales = reference(jnp.array([0.0, 127.0, -2.6]), "int8")
    >>> values.tolist(), scales.tolist()
    ([0, 127, -3], [1.0])
    """
    kind = code(how)
    blocks = in_blocks(x, block).astype(jnp.float32)
    peak = largest_of(blocks, axis=-1)
    inverse = jnp.where(peak > TINY, kind.largest / peak, 0.0)
    values = blocks * inverse[..., None]
    if kind.dtype == jnp.int8:
        values = jnp.round(values)
    return _out_of_blocks(values.astype(kind.dtype), x.shape[-1]), peak * (1 / kind.largest)


def dequantize(values: jax.Array, scales: jax.Array, block: int = BLOCK) -> jax.Array:
    """Return float32 values (…, n) of what `quantize` returned."""
    blocks = in_blocks(values, block).astype(jnp.float32) * scales[..., None]
    return _out_of_blocks(blocks, values.shape[-1])


def reference_compress(
    x: jax.Array, error: jax.Array, how: str, block: int = BLOCK
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return `x + error` in 8 bits, its scales, and what was lost: the next error."""
    meant = x.astype(jnp.float32) + error
    values, scales = reference(meant, how, block)
    values = lax.optimization_barrier(values)  # XLA drops a way to fp8 and back: nothing was lost
    return values, scales, meant - dequantize(values, scales, block)


def rows_in_warps() -> Any:
    """Return the layout of a tile in registers in which a warp holds whole rows, four in a row.

    A row's maximum then needs no more than shuffles within the warp, and 32 threads touch 128
    consecutive elements: 16 bytes each of float32.
    """
    from jax.experimental.mosaic.gpu.fragmented_array import Tiling

    return plgpu.Layout.TILED(Tiling(((4, 128), (4,))), (-3,), (-2,), -1)


def spread(rows: jax.Array, like: jax.Array) -> jax.Array:
    """Return one number a row, next to every element of the row."""
    return plgpu.layout_cast(lax.broadcast_in_dim(rows, like.shape, (0,)), rows_in_warps())


def load(ref: Ref) -> jax.Array:
    """Return a tile in shared memory as float32, whole rows to a warp."""
    return plgpu.layout_cast(ref[...], rows_in_warps()).astype(jnp.float32)


def load_scales(ref: Ref) -> jax.Array:
    """Return the scales of a tile's rows, to the threads that hold the rows."""
    return plgpu.layout_cast(ref[...], rows_in_warps().reduce(1))


def encode(meant: jax.Array, kind: Code) -> tuple[jax.Array, jax.Array]:
    """Return a tile's values and scales, a row to a block (in a kernel)."""
    peak = largest_of(meant, axis=1)
    inverse = jnp.where(peak > TINY, kind.largest / peak, 0.0)
    values = meant * spread(inverse, meant)
    if kind.dtype == jnp.int8:
        values = jnp.round(values)
    return values.astype(kind.dtype), peak * (1 / kind.largest)


def decode(values: jax.Array, scales: jax.Array) -> jax.Array:
    """Return a tile as float32 of its values and scales (in a kernel)."""
    return values.astype(jnp.float32) * spread(scales, values)


def _body(*refs: Ref, kind: Code, tiles: stream.Tiles, stages: int, inputs: int) -> None:
    given, refs = refs[:inputs], refs[inputs:]
    left, leaving = refs[: len(refs) // 2], refs[len(refs) // 2 :]

    def step(each: jax.Array, turn: jax.Array, slot: jax.Array, *shared: Ref) -> None:
        meant = sum(map(load, shared[1:]), load(shared[0]))
        values, scales = encode(meant, kind)
        found = [values, scales]
        if inputs == 2:
            found.append(meant - decode(values, scales))
        plgpu.wait_smem_to_gmem(len(found) * (stream.SLOTS - 1), wait_read_only=True)
        for tile, ref in zip(found, leaving, strict=True):
            ref[slot] = tile
        plgpu.commit_smem()
        for ref, out in zip(leaving, left, strict=True):
            plgpu.copy_smem_to_gmem(ref.at[slot], out.at[tiles.rows_of(each)])

    place = lambda tile, turn: (tile, 0)
    shape = (tiles.tile, given[0].shape[1])
    stream.stream(step, tiles, [(ref, shape, place) for ref in given], 1, stages)
    plgpu.wait_smem_to_gmem(0)


def _run(operands: list[jax.Array], how: str, block: int, tuning: Tuning) -> tuple[jax.Array, ...]:
    kind, shape = code(how), operands[0].shape
    operands = [x.reshape(-1, block) for x in operands]
    rows = operands[0].shape[0]
    tiles = stream.tiles(rows, tuning.tile, tuning.blocks)
    wide, narrow = (tiles.whole, block), (tiles.whole,)
    out = [(wide, kind.dtype), (narrow, jnp.float32), (wide, jnp.float32)][: len(operands) + 1]
    found = mosaic.kernel(
        partial(_body, kind=kind, tiles=tiles, stages=tuning.stages, inputs=len(operands)),
        tuple(jax.ShapeDtypeStruct(*one) for one in out),
        [plgpu.SMEM((stream.SLOTS, tiles.tile, *s[1:]), dtype) for s, dtype in out],
        grid=(tiles.blocks,),
        grid_names=("block",),
        compiler_params=mosaic.by_hand(),
    )(*operands)
    values, scales, *lost = (x[:rows] for x in found)
    scales = scales.reshape(*shape[:-1], shape[-1] // block)
    return values.reshape(shape), scales, *(x.reshape(shape) for x in lost)


def refuses(x: Shaped, how: str, block: int = BLOCK) -> str | None:
    """Return why the kernels cannot take these operands, or None."""
    if how not in CODES:
        return f"how={how!r}: one of {', '.join(map(repr, CODES))} is needed."
    if block not in BLOCKS:
        return f"block={block}: one of {BLOCKS} is needed; other sizes run without the kernel."
    if x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"x {x.shape} is {x.dtype}: float32, bfloat16 or float16 is needed. Cast it."
    if not x.shape or x.size == 0 or x.shape[-1] % block:
        return f"x {x.shape}: the last dimension must be a multiple of block={block}. Reshape it."
    return None


def refuses_error(x: Shaped, error: Shaped) -> str | None:
    """Return why `error` cannot be the error of `x`, or None."""
    if error.shape != x.shape or error.dtype != jnp.float32:
        return f"error {error.shape} {error.dtype}: float32 {x.shape} is needed, as x. Cast it."
    return None


def _check(reason: str | None) -> None:
    if reason:
        raise ValueError(reason)


def quantize(
    x: jax.Array, how: str, block: int = BLOCK, tuning: Tuning = Tuning()
) -> tuple[jax.Array, jax.Array]:
    """Return `x` (…, n) in 8 bits, and float32 scales (…, n / block)."""
    _check(refuses(x, how, block))
    values, scales = _run([x], how, block, tuning)
    return values, scales


def compress(
    x: jax.Array, error: jax.Array, how: str, block: int = BLOCK, tuning: Tuning = Tuning()
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return `x + error` in 8 bits, its scales, and what was lost: the next error."""
    _check(refuses(x, how, block))
    _check(refuses_error(x, error))
    values, scales, lost = _run([x, error], how, block, tuning)
    return values, scales, lost
