"""Kernels of Mosaic GPU (Pallas for Hopper), spelled in one way: `kernel` launches a body."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu.fragmented_array import Tiling
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["BY_HAND", "Tiling", "kernel", "tiled"]

WARPGROUP = 128  # threads that issue one matrix instruction together
SWIZZLE = 128  # bytes of a row of a tile in shared memory, as the matrix units want it

# Layouts in registers are ours to say, and what is in shared memory stays as it is written.
BY_HAND = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)

interpreter: Any = None  # tests put an interpreter here: kernels then run without a GPU


def kernel(
    body: Callable, out: Any, scratch: Any = (), equal_along: tuple[str, ...] = (), **launch: Any
) -> Callable:
    """Return a function that runs `body(*inputs, *outputs, *scratch)` on refs.

    `out` and `scratch` are trees of shapes; `launch` has the grid, its axes' names, threads. Where
    the inputs differ between devices, so do the outputs, but `equal_along` some axes of the mesh.
    """
    run = plgpu.kernel(body, out_type=out, scratch_types=scratch, interpret=interpreter, **launch)

    def marked(*inputs):
        axes = frozenset().union(*(jax.typeof(x).mat.varying for x in inputs)) - set(equal_along)
        return jax.tree.map(partial(_differing, axes=axes), run(*inputs))

    return marked


def _differing(x: jax.Array, axes: frozenset) -> jax.Array:
    # shard_map takes what a kernel returns for equal on all devices.
    names = tuple(sorted(axes - jax.typeof(x).mat.varying))
    return lax.pcast(x, names, to="varying") if names else x


def tiled(dtype: Any) -> tuple:
    """Return how a matrix lies in shared memory for the matrix units: tiled and swizzled."""
    columns = SWIZZLE // jnp.dtype(dtype).itemsize
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(SWIZZLE))
