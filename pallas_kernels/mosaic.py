"""Kernels of Mosaic GPU (Pallas for Hopper), spelled in one way: `kernel` launches a body."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

WARPGROUP = 128  # threads that issue one matrix instruction together
SWIZZLE = 128  # bytes of a row of a tile in shared memory, as the matrix units want it

interpreter: Any = None  # tests put an interpreter here: kernels then run without a GPU


def kernel(body: Callable, out: Any, scratch: Any = (), **launch: Any) -> Callable:
    """Return a function that runs `body(*inputs, *outputs, *scratch)` on refs.

    `out` and `scratch` are trees of shapes; `launch` has the grid, its axes' names, threads.
    """
    launched = plgpu.kernel(
        body, out_type=out, scratch_types=scratch, interpret=interpreter, **launch
    )

    def run(*operands: Any) -> Any:
        # jax loses along which mesh axes a kernel's results vary: along those of its operands.
        axes = frozenset().union(*(varying(x) for x in operands))
        return jax.tree.map(lambda x: vary(x, axes), launched(*operands))

    return run


def varying(x: Any) -> frozenset:
    """Return the mesh axes along which x differs, as far as `jax.shard_map` was asked to know."""
    return jax.typeof(x).manual_axis_type.varying


def vary(x: Any, axes: frozenset) -> Any:
    missing = tuple(sorted(axes - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def tiled(dtype: Any, columns: int | None = None) -> tuple:
    """Return how a matrix lies in shared memory for the matrix units: tiled and swizzled.

    `columns` that go together are 128, 64 or 32 bytes: 128 unless an array's width asks for less.
    """
    size = jnp.dtype(dtype).itemsize
    columns = columns or SWIZZLE // size
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * size))
