"""Kernels of Mosaic GPU (Pallas for Hopper), spelled in one way: `kernel` launches a body."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["BY_HAND", "Tiling", "kernel", "tiled"]

WARPGROUP = 128  # threads that issue one matrix instruction together
SWIZZLE = 128  # bytes of a row of a tile in shared memory, as the matrix units want it

# Layouts in registers are ours to say, and what is in shared memory stays as it is written.
BY_HAND = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)

interpreter: Any = None  # tests put an interpreter here: kernels then run without a GPU


def kernel(body: Callable, out: Any, scratch: Any = (), **launch: Any) -> Callable:
    """Return a function that runs `body(*inputs, *outputs, *scratch)` on refs.

    `out` and `scratch` are trees of shapes; `launch` has the grid, its axes' names, threads.
    """
    return plgpu.kernel(body, out_type=out, scratch_types=scratch, interpret=interpreter, **launch)


def tiled(dtype: Any) -> tuple:
    """Return how a matrix lies in shared memory for the matrix units: tiled and swizzled."""
    columns = SWIZZLE // jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(SWIZZLE))
