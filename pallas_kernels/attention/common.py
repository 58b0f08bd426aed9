"""What the kernels of attention share: their plan, who does what, sums and masks in registers.

[B]atch, [S] queries, [T] keys, [H] heads of queries, [G] heads of keys, head [D]im. A block of
threads has `consumers` warpgroups that multiply, each with 64 rows of its own, and one more
that feeds them: it brings tile after tile to shared memory, `stages` of them ahead.
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
    """How a kernel cuts its work: warpgroups of 64 rows, and the tiles that they visit."""

    consumers: int = 2  # warpgroups that multiply
    tile: int = 128  # rows of a tile that is visited
    stages: int = 2  # tiles in shared memory at a time

    @property
    def rows(self) -> int:
        """Rows of a block of threads."""
        return self.consumers * ROWS


class Shape(NamedTuple):
    """Sizes of the operands, sequences in whole tiles."""

    batch: int
    queries: int
    keys: int
    heads: int
    groups: int
    width: int

    @property
    def group_size(self) -> int:
        """How many heads of queries share a head of keys."""
        return self.heads // self.groups


@dataclass(frozen=True)
class Plan:
    """What a kernel is compiled for."""

    mask: Mask
    shape: Shape
    keys: int  # how many there were before they were padded to whole tiles
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
        """Whether any tile can be seen in part."""
        return self.documents or not self.mask.everything or self.ragged


class TileVisits(NamedTuple):
    """One row of the table of visits: see `flash_mask`."""

    start: Any
    full: Any
    full_end: Any
    end: Any
    low: Any
    high: Any

    @property
    def num_full(self) -> Index:
        """How many tiles are seen whole; they come first."""
        return self.full_end - self.full

    @property
    def steps(self) -> Index:
        return self.end - self.start

    def tile(self, step: Index) -> jax.Array:
        """Return the number of the tile visited in a step."""
        return jnp.where(step < self.num_full, self.full + step, self.partial_tile(step))

    def partial_tile(self, step: Index) -> jax.Array:
        """Return the number of a tile that is seen in part: those before and after the whole."""
        past_full, before = step - self.num_full, self.full - self.start
        return jnp.where(
            past_full < before, self.start + past_full, self.full_end + past_full - before
        )


def read_visits(visits_ref: Ref, batch: Index, tile: Index) -> TileVisits:
    """Return a row of the table; without documents all batches have the same."""
    entry = visits_ref.at[batch if visits_ref.shape[0] > 1 else 0, tile]
    return TileVisits(*(entry[i] for i in range(len(TileVisits._fields))))


def launch(plan: Plan, name: str, body: Callable, grid: dict[str, int], *trees: Any) -> Any:
    """Run `body(inputs, outputs, scratch)` on refs; the trees are (inputs, outputs, scratch).

    Inputs are a named tuple of arrays, None where there is none.
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
    """Return how many registers a thread that multiplies may ask for, in eights.

    A block begins with as many for each thread alike, in eights too, and there are never more: who
    asks for one that is not there waits for ever.

    >>> registers(2), (2 * registers(2) + FEEDER_REGISTERS) * 128 <= 168 * 3 * 128
    (240, True)
    """
    each = 65536 // WARPGROUP // (consumers + 1) // 8 * 8
    left = each * (consumers + 1) - FEEDER_REGISTERS
    return min(240, left // consumers // 8 * 8)


def run_roles(plan: Plan, multiply: Callable[[Any], None], feed: Callable[[], None]) -> None:
    """Run `multiply(number)` in the warpgroups that multiply and `feed()` in the last one."""
    thread, consumers = lax.axis_index("thread"), plan.tiling.consumers

    num_registers = registers(consumers)
    mosaic.run_role(thread < consumers, num_registers, "increase", lambda: multiply(thread))
    mosaic.run_role(thread == consumers, FEEDER_REGISTERS, "decrease", feed)


def slot_index(step: Index, stages: int) -> jax.Array:
    """Return the place in shared memory of a step's tile."""
    return lax.rem(step, jnp.int32(stages))


def drain(count: Index, stages: int, *free: jax.Ref) -> None:
    """Wait until the last tiles are free: no block ends while a barrier is under way."""

    @pl.loop(jnp.maximum(count - stages, 0), count)
    def _tile(step: jax.Array) -> None:
        for barrier in free:
            plgpu.barrier_wait(barrier.at[slot_index(step, stages)])


def accumulator(shape: tuple[int, int], start: Any = None) -> Any:
    """Return registers in which the matrix units sum, in float32, from `start` where given."""
    acc_type: Any = getattr(plgpu, "ACC")  # noqa: B009  (not declared as exported)
    return acc_type(shape, jnp.float32) if start is None else acc_type.init(start)


def matmul_add(acc: jax.Array, a: "jax.Array | Ref", b: Ref) -> jax.Array:
    """Return total + a @ b: a in registers or shared memory, b in shared memory."""
    return matmul_add_all((acc, a, b))[0]


def matmul_add_all(*operands: tuple[Any, Any, Any]) -> tuple[Any, ...]:
    """Return total + a @ b of each (total, a, b), issued together."""
    if mosaic.interpreter is not None:
        return tuple(acc + _interpreted(a, b) for acc, a, b in operands)

    def accumulate(refs: tuple) -> None:
        for ref, (_, a, b) in zip(refs, operands, strict=True):
            plgpu.wgmma(ref, a, b)

    return pl.run_state(accumulate)(tuple(accumulator(x.shape, x) for x, _, _ in operands))


def _interpreted(a: Any, b: Any) -> jax.Array:
    """Return a @ b: the interpreter knows neither sums with a past nor operands in registers."""
    if isinstance(a, jax.Array):
        product = jnp.dot(a, b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()  # it minds that b was read by other means than the matrix units
        return product

    def multiply(sum_ref: Any) -> jax.Array:
        plgpu.wgmma(sum_ref, a, b)
        return sum_ref[...]

    return pl.run_scoped(multiply, accumulator((a.shape[0], b.shape[1])))


def opaque_index(x: Index) -> jax.Array:
    """Return a number that the compiler takes for a new one in every step.

    It would keep every address made of it in registers during the whole loop, and spill sums.
    """
    return lax.optimization_barrier(x)


def matrix_layout() -> Any:
    """Return the layout in which the matrix units leave their sums in registers."""
    return plgpu.Layout.WGMMA


def column_layout() -> Any:
    """Return the layout of one number for each column of such sums."""
    return matrix_layout().reduce(0)


def constant(shape: tuple[int, ...], value: float, layout: Any = None) -> jax.Array:
    """Return a constant array that lies in registers like a sum of the matrix units."""
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout or matrix_layout())


def rows_to_matrix(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return one number per row as a matrix."""
    return lax.broadcast_in_dim(x, shape, [0])


def columns_to_matrix(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return one number per column as a matrix."""
    return lax.broadcast_in_dim(x, shape, [1])


def indices(shape: tuple[int, ...], axis: int, first: Index) -> jax.Array:
    """Return the row's or the column's number, counted from `first`, everywhere in a tile."""
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=matrix_layout()) + first


def visible_mask(
    plan: Plan, visits: TileVisits, query: jax.Array, key: jax.Array, same: jax.Array | None
) -> jax.Array:
    """Return where a query sees a key, from their numbers and whether their documents agree.

    Only what the mask needs is compared, and nothing subtracted: what is the same in every tile
    takes one register per row or column then.
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
    """Write a tile to device memory: float32 from registers, others by way of shared memory."""
    if ref.dtype == jnp.float32:  # four threads write 32 bytes that lie together
        ref[...] = value
        return
    smem[...] = value.astype(ref.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(smem, ref)
