"""Shared by the attention kernels: plans, warpgroup roles, accumulators and masks in registers.

[B]atch, [S] queries, [T] keys, [H] query heads, [G] key heads, head [D]im. A thread block has
`consumers` warpgroups that multiply, each with 64 rows of its own, and one more that copies tiles
to shared memory, `stages` of them ahead.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from hfjax.pallas_kernels import mosaic, plgpu
from hfjax.pallas_kernels.attention.mask import Mask
from hfjax.pallas_kernels.mosaic import WARPGROUP, Ref, RefSlice
from hfjax.utils.paths import Index

ROWS = 64  # of a warpgroup's tile: the rows of one wgmma
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
FEEDER_REGISTERS = 24


@dataclass(frozen=True)
class Tiling:
    """The tiling of a kernel: warpgroups of 64 rows, and the tiles that they visit."""

    consumers: int = 2  # warpgroups that multiply
    tile: int = 128  # rows of a visited tile
    stages: int = 2  # tiles in shared memory at a time

    @property
    def rows(self) -> int:
        """The number of rows of a thread block."""
        return self.consumers * ROWS


class Shape(NamedTuple):
    """Sizes of the operands, with sequences padded to whole tiles."""

    batch: int
    queries: int
    keys: int
    heads: int
    groups: int
    width: int

    @property
    def group_size(self) -> int:
        """The number of query heads that share a key head."""
        return self.heads // self.groups


@dataclass(frozen=True)
class Plan:
    """The static parameters of a kernel."""

    mask: Mask
    shape: Shape
    keys: int  # their number before padding to whole tiles
    tiling: Tiling
    documents: bool
    dtype: Any

    @property
    def scale(self) -> float:
        return self.shape.width**-0.5

    @property
    def ragged(self) -> bool:
        return self.keys < self.shape.keys

    @property
    def has_partial_tiles(self) -> bool:
        """Whether any tile can be partially visible."""
        return self.documents or not self.mask.everything or self.ragged


class TileVisits(NamedTuple):
    """One entry of the table of visits: see `mask`."""

    start: Any
    full: Any
    full_end: Any
    end: Any
    low: Any
    high: Any

    @property
    def num_full(self) -> Index:
        """The number of fully visible tiles; they come first."""
        return self.full_end - self.full

    @property
    def steps(self) -> Index:
        return self.end - self.start

    def tile(self, step: Index) -> jax.Array:
        """Return the number of the tile visited in a step."""
        return jnp.where(step < self.num_full, self.full + step, self.partial_tile(step))

    def partial_tile(self, step: Index) -> jax.Array:
        """Return the number of a partially visible tile: those before and after the full ones."""
        past_full, before = step - self.num_full, self.full - self.start
        return jnp.where(
            past_full < before, self.start + past_full, self.full_end + past_full - before
        )


def read_visits(visits_ref: Ref, batch: Index, tile: Index) -> TileVisits:
    """Return an entry of the table; without documents it is the same for the whole batch."""
    entry = visits_ref.at[batch if visits_ref.shape[0] > 1 else 0, tile]
    return TileVisits(*(entry[i] for i in range(len(TileVisits._fields))))


def launch(plan: Plan, name: str, body: Callable, grid: dict[str, int], *trees: Any) -> Any:
    """Run `body(inputs, outputs, scratch)` on refs; the trees are (inputs, outputs, scratch).

    Inputs are a named tuple of arrays, or None for absent ones.
    """
    inputs, outputs, scratch = trees
    present = [name for name, x in inputs._asdict().items() if x is not None]

    def on_refs(*refs: jax.Ref) -> None:
        refs_by_name = dict(zip(present, refs, strict=False))
        absent = dict.fromkeys(inputs._fields)
        body(type(inputs)(**(absent | refs_by_name)), refs[len(present) : -1], refs[-1])

    return mosaic.kernel(
        on_refs,
        list(outputs),
        (scratch,),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        num_threads=plan.tiling.consumers + 1,
        thread_name="thread",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(*(getattr(inputs, name) for name in present))


def registers(consumers: int) -> int:
    """Return how many registers a consumer thread may request, a multiple of eight.

    A block starts with equally many per thread, a multiple of eight too, and the total is fixed:
    requesting one beyond it blocks for ever.

    >>> registers(2), (2 * registers(2) + FEEDER_REGISTERS) * 128 <= 168 * 3 * 128
    (240, True)
    """
    each = 65536 // WARPGROUP // (consumers + 1) // 8 * 8
    left = each * (consumers + 1) - FEEDER_REGISTERS
    return min(240, left // consumers // 8 * 8)


def run_roles(plan: Plan, multiply: Callable[[Any], None], feed: Callable[[], None]) -> None:
    """Run `multiply(number)` in the consumer warpgroups and `feed()` in the last one."""
    thread, consumers = lax.axis_index("thread"), plan.tiling.consumers

    num_registers = registers(consumers)
    mosaic.run_role(thread < consumers, num_registers, "increase", lambda: multiply(thread))
    mosaic.run_role(thread == consumers, FEEDER_REGISTERS, "decrease", feed)


def slot_index(step: Index, stages: int) -> jax.Array:
    """Return the shared memory slot of a step's tile."""
    return lax.rem(step, jnp.int32(stages))


def drain(count: Index, stages: int, *free: jax.Ref) -> None:
    """Wait until the last tiles are free: no block may end while a barrier is pending."""

    @pl.loop(jnp.maximum(count - stages, 0), count)
    def _tile(step: jax.Array) -> None:
        for barrier in free:
            plgpu.barrier_wait(barrier.at[slot_index(step, stages)])


def accumulator(shape: tuple[int, int], start: Any = None) -> Any:
    """Return a float32 accumulator of the tensor cores, initialised from `start` if given."""
    acc_type: Any = getattr(plgpu, "ACC")  # noqa: B009  (not declared as exported)
    return acc_type(shape, jnp.float32) if start is None else acc_type.init(start)


def matmul_add(acc: jax.Array, a: "jax.Array | Ref", b: Ref) -> jax.Array:
    """Return acc + a @ b: a in registers or shared memory, b in shared memory."""
    return matmul_add_all((acc, a, b))[0]


def matmul_add_all(*operands: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    """Return acc + a @ b for each (acc, a, b), issued together."""
    if mosaic.interpreter is not None:
        return tuple(acc + _interpreted(a, b) for acc, a, b in operands)

    def accumulate(refs: tuple) -> None:
        for ref, (_, a, b) in zip(refs, operands, strict=True):
            plgpu.wgmma(ref, a, b)

    return pl.run_state(accumulate)(tuple(accumulator(x.shape, x) for x, _, _ in operands))


def _interpreted(a: Any, b: Any) -> jax.Array:
    """Return a @ b: the interpreter lacks initialised accumulators and operands in registers."""
    if isinstance(a, jax.Array):
        product = jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # the interpreter objects if b was read through another proxy
        return product

    def multiply(sum_ref: Any) -> jax.Array:
        plgpu.wgmma(sum_ref, a, b)
        return sum_ref[...]

    return pl.run_scoped(multiply, accumulator((a.shape[0], b.shape[1])))


def opaque_index(x: Index) -> jax.Array:
    """Return an index that the compiler treats as new in every step.

    Otherwise it would keep derived addresses in registers during the whole loop, and spill sums.
    """
    return lax.optimization_barrier(x)


def matrix_layout() -> Any:
    """Return the register layout of a tensor core accumulator."""
    return plgpu.Layout.WGMMA


def column_layout() -> Any:
    """Return the register layout of one number per column of an accumulator."""
    return matrix_layout().reduce(0)


def constant(shape: tuple[int, ...], value: float, layout: Any = None) -> jax.Array:
    """Return a constant array in registers, by default in an accumulator's layout."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout or matrix_layout())


def rows_to_matrix(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return one number per row, broadcast to a matrix."""
    return lax.broadcast_in_dim(x, shape, [0])


def columns_to_matrix(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return one number per column, broadcast to a matrix."""
    return lax.broadcast_in_dim(x, shape, [1])


def indices(shape: tuple[int, ...], axis: int, first: Index) -> jax.Array:
    """Return the row or column numbers of a tile, from `first` on."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=matrix_layout()) + first


def visible_mask(
    plan: Plan, visits: TileVisits, query: jax.Array, key: jax.Array, same: jax.Array | None
) -> jax.Array:
    """Return where a query sees a key, from their numbers and whether their documents match.

    It compares only what the mask needs and subtracts nothing: so values that are the same in every
    tile take one register per row or column.
    """
    conditions = [] if same is None else [same]
    if not plan.mask.everything:
        conditions.append(key <= query + visits.high)
    if plan.mask.window is not None:
        conditions.append(key >= query + visits.low)
    if plan.ragged:
        conditions.append(key < plan.keys)
    is_visible = conditions[0]
    for condition in conditions[1:]:
        is_visible = jnp.logical_and(is_visible, condition)
    return is_visible


def write_tile(ref: RefSlice, value: jax.Array, smem: RefSlice) -> None:
    """Write a tile to device memory: float32 from registers, others through shared memory."""
    if ref.dtype == jnp.float32:  # four threads write 32 contiguous bytes
        ref[...] = value
        return
    smem[...] = value.astype(ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, ref)
