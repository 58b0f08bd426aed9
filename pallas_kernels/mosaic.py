"""Kernels of Mosaic GPU (Pallas for Hopper), spelled in one way: `kernel` launches a body."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from hfjax.pallas_kernels import plgpu
from hfjax.utils.vma import mark_varying, varying_axes

if TYPE_CHECKING:
    from jax.experimental.hijax import TransformedRef

RefSlice: TypeAlias = "TransformedRef"  # a part of the memory that a kernel sees: `ref.at[…]`
Ref: TypeAlias = "jax.Ref | TransformedRef"  # such a part, or all that a ref is of

WARPGROUP = 128  # threads that issue one matrix instruction together
SWIZZLE = 128  # bytes of a row of a tile in shared memory, as the matrix units want it

interpreter: Any = None  # tests put an interpreter here: kernels then run without a GPU


def kernel(body: Callable, out: Any, scratch: Any = (), **launch: Any) -> Callable:
    """Return a function that runs `body(*inputs, *outputs, *scratch)` on refs.

    `out` and `scratch` are trees of shapes; `launch` has the grid, its axes' names, threads. Where
    the inputs differ between devices, so do the outputs.
    """
    run = plgpu.kernel(body, out_type=out, scratch_types=scratch, interpret=interpreter, **launch)

    def run_marked(*inputs: jax.Array):
        # shard_map takes what a kernel returns for equal on all devices.
        axes = frozenset[str]().union(*map(varying_axes, inputs))
        return jax.tree.map(partial(mark_varying, axes=axes), run(*inputs))

    return run_marked


def lane_params() -> "plgpu.CompilerParams":
    """Return for a kernel: its layouts in registers are told, shared memory stays as written."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def tile_transforms(dtype: DTypeLike, columns: int | None = None) -> tuple:
    """Return how a matrix lies in shared memory for the matrix units: tiled and swizzled.

    `columns` that go together are 128, 64 or 32 bytes: 128 unless an array's width asks for less.
    """
    size = jnp.dtype(dtype).itemsize
    columns = columns or SWIZZLE // size
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * size))


def load(ref: RefSlice, layout: Any) -> jax.Array:
    """Return what a ref (of device memory, too) holds, laid out over registers as told."""
    index = ((),) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def run_role(is_active: jax.Array, registers: int, action: Any, run: Callable[[], None]) -> None:
    """Run something in the warpgroups whose part it is, with as many registers."""

    @pl.when(is_active)
    def _() -> None:
        plgpu.set_max_registers(registers, action=action)
        run()


def row_layout() -> Any:
    """Return the layout of one number for each row of such sums."""
    return plgpu.Layout.WGMMA.reduce(1)


def pad_axis(x: jax.Array, axis: int, multiple: int, **pad_options) -> jax.Array:
    """Return x with an axis grown to a multiple (x itself where it is one)."""
    more = -x.shape[axis] % multiple
    if not more:
        return x
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)], **pad_options)
