"""A tiled matmul on the tensor cores, shared by the two kernels over a ring.

The structure of the best Hopper matmuls: one block per multiprocessor for the whole launch
(persistent grid), one warpgroup that only copies (TMA, some stages ahead, also across tile
boundaries), two warpgroups that multiply half a tile each into fp32 registers and write it back
through shared memory while the copies of the next tile are already in flight. Tiles are walked in
bands of rows, so that concurrent blocks share their operands in the L2 cache.

Shapes: matrices A [M, K] and B [K, N]; a tile is `rows` x `columns` of A @ B. M, K, N need not be
multiples of a tile: TMA reads zeros beyond an edge and writes nothing there.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from hfjax.pallas_kernels import plgpu
from hfjax.pallas_kernels.mosaic import Ref, kernel, run_role, tile_transforms
from hfjax.pallas_kernels.ring.peers import Ring
from hfjax.utils.paths import Index, Shaped

CONSUMERS = 2  # warpgroups that multiply; the third one copies
HALF = 64  # rows of a tile per consumer
ROWS = CONSUMERS * HALF  # of a tile
DEPTH = 64  # of K, per copy and multiplication: one swizzled row of 16-bit numbers
CHUNK = 64  # columns per write-back
COPIER_REGISTERS, CONSUMER_REGISTERS = 40, 232  # per thread; there are 64 Ki for 384 threads


@dataclass(frozen=True)
class Tuning:
    """Tile sizes of a matmul; the defaults take 224 KiB of shared memory and do not spill."""

    columns: int = 256  # of a tile
    stages: int = 4  # pairs of copies in flight or in use
    band: int = 8  # rows of tiles walked together, for the L2 cache
    blocks: int = 132  # per rank: at most as many as the GPU has multiprocessors

    def __post_init__(self) -> None:
        if self.columns not in (2 * CHUNK, 4 * CHUNK) or self.stages < 2:
            raise ValueError(
                f"Tuning(columns={self.columns}, stages={self.stages}): columns are {2 * CHUNK} or "
                f"{4 * CHUNK}, stages 2 or more. Change the tuning"
            )


DEFAULT_TUNING = Tuning()


@dataclass(frozen=True)
class Tiles:
    """The order in which all blocks walk the tiles of `steps` matmuls of the same shape."""

    steps: int
    rows: int
    columns: int
    blocks: int
    band: int

    @property
    def each_step(self) -> int:
        return self.rows * self.columns

    def at(self, number: Index) -> tuple:
        """Return the step, row and column of a tile."""
        in_step = lax.rem(number, jnp.int32(self.each_step))
        row, column = plgpu.planar_snake(in_step, (self.rows, self.columns), 0, self.band)
        return lax.div(number, jnp.int32(self.each_step)), row, column

    def walk(self, step_fn: Callable, carry: Any) -> Any:
        """Return the carry after `step_fn(number, carry)` on each tile of this block, in order."""
        block = lax.axis_index("block")
        return lax.fori_loop(
            0, self._mine(), lambda i, carry: step_fn(block + i * self.blocks, carry), carry
        )

    def last(self) -> jax.Array:
        """Return the number of this block's last tile, negative if it has none."""
        return lax.axis_index("block") + (self._mine() - 1) * self.blocks

    def _mine(self) -> jax.Array:
        after = jnp.int32(self.steps * self.each_step + self.blocks - 1) - lax.axis_index("block")
        return lax.div(after, jnp.int32(self.blocks))


def make_tiles(tuning: Tuning, steps: int, rows: int, columns: int) -> Tiles:
    """Return the walk over the tiles of `steps` matmuls of `rows` x `columns`."""
    shape = pl.cdiv(rows, ROWS), pl.cdiv(columns, tuning.columns)
    return Tiles(steps, *shape, blocks=tuning.blocks, band=tuning.band)


def tile_slices(row: Index, column: Index, tuning: Tuning) -> tuple:
    """Return the rows and the columns of a tile."""
    return pl.ds(row * ROWS, ROWS), pl.ds(column * tuning.columns, tuning.columns)


@dataclass(frozen=True)
class Stages:
    """The copies in flight: slots in shared memory, filled and freed cyclically."""

    a: Any
    b: Any
    staged: Any  # two chunks per consumer, being written back
    full: Any
    empty: Any
    tuning: Tuning

    def slot(self, number: Index) -> jax.Array:
        return lax.rem(number, jnp.int32(self.tuning.stages))

    def claim(self, number: Index) -> jax.Array:
        """Return the slot of copy `number` once it is free again (for the copier)."""
        slot = self.slot(number)

        @pl.when(number >= self.tuning.stages)
        def _() -> None:
            plgpu.barrier_wait(self.empty.at[slot])

        return slot

    def wait_full(self, number: Index) -> jax.Array:
        """Return the slot of copy `number` once its data has arrived (for consumers)."""
        plgpu.barrier_wait(self.full.at[self.slot(number)])
        return self.slot(number)

    def release(self, number: Index) -> None:
        plgpu.barrier_arrive(self.empty.at[self.slot(number)])

    def drain(self, count: jax.Array) -> None:
        """Wait until the last of `count` copies were consumed: no barrier is left pending."""
        last = lax.min(count, jnp.int32(self.tuning.stages))

        @pl.loop(count - last, count)
        def _(number: jax.Array) -> None:
            plgpu.barrier_wait(self.empty.at[self.slot(number)])


def scratch(tuning: Tuning, w: Shaped) -> list:
    """Return the shared memory of `Stages`, in the order of its fields."""
    stages, dtype = tuning.stages, w.dtype
    transforms = tile_transforms(dtype, math.gcd(DEPTH, *w.shape))
    return [
        plgpu.SMEM((stages, ROWS, DEPTH), dtype, transforms=transforms),
        plgpu.SMEM((stages, DEPTH, tuning.columns), dtype, transforms=transforms),
        plgpu.SMEM((CONSUMERS, 2, HALF, CHUNK), dtype, transforms=transforms),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
    ]


def copy_operands(stages: Stages, a: Ref, b: Ref, tile: tuple, begin: jax.Array) -> jax.Array:
    """Copy the operands of tile (row, column), depth by depth; return the next copy's number."""
    row, column = tile
    rows, columns = tile_slices(row, column, stages.tuning)

    def copy(k: jax.Array, number: jax.Array) -> jax.Array:
        slot, depths = stages.claim(number), pl.ds(k * DEPTH, DEPTH)
        plgpu.copy_gmem_to_smem(a.at[rows, depths], stages.a.at[slot], stages.full.at[slot])
        plgpu.copy_gmem_to_smem(b.at[depths, columns], stages.b.at[slot], stages.full.at[slot])
        return number + 1

    return lax.fori_loop(0, pl.cdiv(b.shape[0], DEPTH), copy, begin)


def _nothing(*_: Any) -> None:
    pass


def multiply(
    stages: Stages,
    depths: int,
    begin: jax.Array,
    on_stage: Callable = _nothing,
    before_release: Callable = _nothing,
) -> tuple[jax.Array, ...]:
    """Return this warpgroup's half of a tile in fp32, as chunks of columns.

    `on_stage(k, slot)` is called for each slot while it is multiplied; a slot is released one step
    later, and the last one after `before_release()`.
    """
    half = pl.ds(lax.axis_index("warpgroup") * HALF, HALF)

    def accumulate(acc: Any) -> tuple[jax.Array, ...]:
        def step(k: jax.Array, number: jax.Array) -> jax.Array:
            slot = stages.wait_full(number)
            plgpu.wgmma(acc, stages.a.at[slot, half], stages.b.at[slot])
            on_stage(k, slot)
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _() -> None:
                stages.release(number - 1)

            return number + 1

        end = lax.fori_loop(0, depths, step, begin)
        plgpu.wgmma_wait(0)
        before_release()
        stages.release(end - 1)
        value = acc[...]
        return tuple(value[:, c : c + CHUNK] for c in range(0, stages.tuning.columns, CHUNK))

    shape = (HALF, stages.tuning.columns)
    return pl.run_scoped(accumulate, plgpu.ACC(shape, jnp.float32))  # pyright: ignore


def write_back(stages: Stages, chunks: tuple, store: Callable) -> None:
    """Call `store(chunk, column)` with each chunk of this warpgroup's half, cast."""
    for number, chunk in enumerate(chunks):
        staged = stages.staged.at[lax.axis_index("warpgroup"), number % 2]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last has read it
        staged[...] = chunk.astype(staged.dtype)
        plgpu.commit_smem()
        store(staged, number * CHUNK)


def launch(
    name: str,
    body: Callable,
    ring: Ring,
    shapes: Sequence[tuple[int, ...]],
    x: jax.Array,
    w: jax.Array,
    tuning: Tuning,
) -> jax.Array:
    """Return a kernel's result for x and w; `shapes` are those of the result and of received data.

    `body(ring, stages, x, w, out, landed)` has the roles of the copier and of a consumer.
    """
    shapes = shapes[: min(ring.size, 2)]  # a single rank receives nothing
    out_shapes = [jax.ShapeDtypeStruct((*ring.ranks, *shape), x.dtype) for shape in shapes]

    def run_block(*refs: jax.Ref) -> None:
        x, w, out, *landed, a, b, staged, full, empty = refs
        stages = Stages(a, b, staged, full, empty, tuning)
        work = body(ring, stages, ring.local(x), ring.local(w), ring.local(out), landed)
        warpgroup = lax.axis_index("warpgroup")

        def consume() -> None:
            work.consumes()
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        copy = lambda: stages.drain(work.tiles.walk(work.copy, jnp.int32(0)))
        run_role(warpgroup == CONSUMERS, COPIER_REGISTERS, "decrease", copy)
        run_role(warpgroup < CONSUMERS, CONSUMER_REGISTERS, "increase", consume)

    run_block.__name__ = name
    return kernel(
        run_block,
        out_shapes,
        scratch(tuning, jax.ShapeDtypeStruct(w.shape[-2:], w.dtype)),
        grid=(*ring.ranks, tuning.blocks),
        grid_names=(*ring.rank_names, "block"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
    )(x, w)[0]
