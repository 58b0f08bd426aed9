"""Wrappers of Mosaic GPU (Pallas for Hopper): `kernel` launches a body."""

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

RefSlice: TypeAlias = "TransformedRef"  # a slice of a ref: `ref.at[…]`
Ref: TypeAlias = "jax.Ref | TransformedRef"  # such a slice, or a whole ref

WARPGROUP = 128  # threads that together issue one wgmma
SWIZZLE = 128  # bytes per tile row in shared memory, for the tensor cores

interpreter: Any = None  # tests set an interpreter here: kernels then run without a GPU


def kernel(body: Callable, out: Any, scratch: Any = (), **launch: Any) -> Callable:
    """Return a function that runs `body(*inputs, *outputs, *scratch)` on refs.

    `out` and `scratch` are trees of shapes; `launch` has the grid, its axis names and threads.
    Outputs vary over the mesh axes over which inputs vary.
    """
    run = plgpu.kernel(body, out_type=out, scratch_types=scratch, interpret=interpreter, **launch)

    def run_marked(*inputs: jax.Array):
        # shard_map assumes that a kernel's outputs are equal on all devices.
        axes = frozenset[str]().union(*map(varying_axes, inputs))
        return jax.tree.map(partial(mark_varying, axes=axes), run(*inputs))

    return run_marked


def lane_params() -> "plgpu.CompilerParams":
    """Return the parameters of kernels with explicit register layouts and shared memory layouts."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)


def tile_transforms(dtype: DTypeLike, columns: int | None = None) -> tuple:
    """Return the shared memory layout of a matrix for the tensor cores: tiled and swizzled.

    The `columns` of a tile are 128, 64 or 32 bytes: 128 unless an array's width requires less.
    """
    size = jnp.dtype(dtype).itemsize
    columns = columns or SWIZZLE // size
    return (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(columns * size))


def load(ref: RefSlice, layout: Any) -> jax.Array:
    """Return the content of a ref (also in device memory), in a register layout."""
    index = ((),) if jax.__version_info__ < (0, 11) else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def run_role(is_active: jax.Array, registers: int, action: Any, run: Callable[[], None]) -> None:
    """Run a role in the active warpgroups, with `registers` registers per thread."""

    @pl.when(is_active)
    def _() -> None:
        plgpu.set_max_registers(registers, action=action)
        run()


def row_layout() -> Any:
    """Return the register layout of one number per row of an accumulator."""
    return plgpu.Layout.WGMMA.reduce(1)


def pad_axis(x: jax.Array, axis: int, multiple: int, **pad_options) -> jax.Array:
    """Return x with an axis padded to a multiple (x itself if it is one)."""
    more = -x.shape[axis] % multiple
    if not more:
        return x
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)], **pad_options)
