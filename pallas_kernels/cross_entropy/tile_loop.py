"""Assign tiles of logits to the thread blocks of a Hopper GPU, and copy their operands ahead.

In one launch, each block takes units round-robin (a tile of rows, every `lanes`-th tile of
columns); one warpgroup copies x and w to shared memory (TMA, a ring of stages, running ahead over
units), two multiply (64 rows each, float32 accumulators) and process each tile, in registers, as
the launch's `Work` says.

[N] rows, [D] width; w is [C, P, D]: column c of part p of the vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from hfjax.pallas_kernels import plgpu
from hfjax.pallas_kernels.cross_entropy.logits import EVEN, Tuning
from hfjax.pallas_kernels.mosaic import RefSlice, kernel, pad_axis, run_role, tile_transforms
from hfjax.utils.paths import Index

ROWS = 64  # of one warpgroup: the rows of one wgmma
WORKERS = 2  # warpgroups that multiply; one more copies
TILE = WORKERS * ROWS


@dataclass(frozen=True)
class Walk:
    """The assignment of rows x columns tiles to the blocks of a launch, in units."""

    rows: int
    columns: int
    lanes: int
    group: int
    blocks: int

    @property
    def units(self) -> int:
        return self.rows * self.lanes

    def unit(self, number: Index) -> tuple[Any, Any]:
        """Return (row of tiles, lane): rows of a group vary fastest, then lanes, then groups."""
        number = jnp.asarray(number, jnp.int32)
        band, in_band = divmod_(number, self.group * self.lanes)
        height = jnp.minimum(self.group, self.rows - band * self.group)
        lane, row = divmod_(in_band, height)
        return band * self.group + row, lane

    def block_units(self, block: Index) -> jax.Array:
        """Return the number of units of a block: block, block + blocks, …"""
        return lax.div(self.units - block + self.blocks - 1, jnp.int32(self.blocks))

    def tiles(self, lane: Index) -> jax.Array:
        """Return the number of column tiles of a lane."""
        return lax.div(self.columns - lane + self.lanes - 1, jnp.int32(self.lanes))


def divmod_(number: Index, divisor: Index) -> tuple[Any, Any]:
    """Return quotient and remainder of non-negative numbers."""
    divisor = jnp.asarray(divisor, jnp.int32)
    return lax.div(number, divisor), lax.rem(number, divisor)


def best_lanes(rows: int, columns: int, tuning: Tuning) -> int:
    """Return the number of units per row of tiles that minimises idle blocks.

    At least enough to keep all blocks busy with one group of rows, whose x fits the L2 cache.

    >>> [best_lanes(rows, 197, Tuning()) for rows in (128, 16, 1)]
    [33, 33, 99]
    """
    start = 0.1  # fixed cost of a unit, in tiles
    blocks = tuning.blocks
    least = min(columns, -(-blocks // tuning.group))

    def time(lanes: int) -> float:
        return -(-rows * lanes // blocks) * (-(-columns // lanes) + start)

    return min(range(least, min(columns, blocks) + 1), key=time)


@dataclass(frozen=True)
class Work:
    """Callbacks on the logits of a unit: at its start, for each tile, at its end."""

    start: Callable  # (row) -> carry
    tile: Callable  # (carry, logits, row, column) -> carry
    end: Callable  # (carry, row, lane) -> None


def launch(work: Callable, out: Any, scratch: Any, walk: Walk, tuning: Tuning) -> Callable:
    """Return a function of (numbers, x, w, *more); `work(refs, worker)` returns its `Work`.

    numbers: [part of w, its number of real columns].
    """

    def body(numbers: jax.Ref, x: jax.Ref, w: jax.Ref, *refs) -> None:
        *refs, x_stages, w_stages, full, free = refs
        buffers = StageBuffers(x, w, x_stages, w_stages, full, free, walk, tuning)
        warpgroup = lax.axis_index("warpgroup")

        def multiply() -> None:
            buffers.multiply(work(numbers, refs, warpgroup), warpgroup)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        run_role(warpgroup < WORKERS, 232, "increase", multiply)
        run_role(warpgroup == WORKERS, 40, "decrease", lambda: buffers.fill(numbers[0]))

    def run_kernel(numbers: jax.Array, x: jax.Array, w: jax.Array, *more: jax.Array):
        stage_shapes = [
            plgpu.SMEM(
                (tuning.stages, WORKERS, ROWS, tuning.depth),
                x.dtype,
                transforms=tile_transforms(x.dtype),
            ),
            plgpu.SMEM(
                (tuning.stages, tuning.columns, tuning.depth),
                w.dtype,
                transforms=tile_transforms(w.dtype),
            ),
            plgpu.Barrier(num_arrivals=WORKERS + 1, num_barriers=tuning.stages),
            plgpu.Barrier(num_arrivals=WORKERS, num_barriers=tuning.stages),
        ]
        run = kernel(
            body,
            out,
            [*scratch, *stage_shapes],
            grid=(walk.blocks,),
            grid_names=("block",),
            num_threads=WORKERS + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(approx_math=True),
        )
        return run(numbers, pad_axis(x, 0, EVEN), w, *more)

    return run_kernel


@dataclass(frozen=True)
class StageBuffers:
    """The stages in shared memory between the copying warpgroup and those that multiply."""

    x: Any
    w: Any
    x_stages: Any
    w_stages: Any
    full: Any
    free: Any
    walk: Walk
    tuning: Tuning

    @property
    def steps(self) -> int:
        """The number of stages per tile."""
        return self.x.shape[1] // self.tuning.depth

    def slot(self, step: Index) -> jax.Array:
        return lax.rem(step, jnp.int32(self.tuning.stages))

    def each_tile(self, start: Callable, tile: Callable, end: Callable) -> jax.Array:
        """Iterate over this block's tiles; return the total number of steps.

        In `tile(carry, row, lane, number, step)`, step is the tile's first one.
        """
        block = lax.axis_index("block")

        def unit(i: jax.Array, step: jax.Array) -> jax.Array:
            row, lane = self.walk.unit(block + i * self.walk.blocks)

            def one(number: jax.Array, state: tuple) -> tuple:
                carry, step = state
                return tile(carry, row, lane, number, step), step + self.steps

            carry, step = lax.fori_loop(0, self.walk.tiles(lane), one, (start(row), step))
            end(carry, row, lane)
            return step

        return lax.fori_loop(0, self.walk.block_units(block), unit, jnp.int32(0))

    def column(self, lane: jax.Array, number: jax.Array) -> jax.Array:
        column = (number * self.walk.lanes + lane) * self.tuning.columns
        return pl.multiple_of(column, self.tuning.columns)

    def fill(self, part: jax.Array) -> None:
        """Copy the operands of all tiles, as far ahead as stages allow."""
        nothing = lambda *_: None

        def tile(
            _: None, row: jax.Array, lane: jax.Array, number: jax.Array, step: jax.Array
        ) -> None:
            columns = pl.ds(self.column(lane, number), self.tuning.columns)
            w = self.w.at[columns, part]
            lax.fori_loop(0, self.steps, partial(self._copy_stage, row * TILE, w, step), None)

        steps = self.each_tile(nothing, tile, nothing)
        for behind in range(self.tuning.stages, 0, -1):
            self._wait_read(steps - behind)

    def _wait_read(self, step: jax.Array) -> None:
        @pl.when(step >= 0)
        def _wait() -> None:
            plgpu.barrier_wait(self.free.at[self.slot(step)])

    def _copy_stage(
        self, row: jax.Array, w: RefSlice, step: jax.Array, k: jax.Array, _: None
    ) -> None:
        self._wait_read(step + k - self.tuning.stages)
        slot = self.slot(step + k)
        full = self.full.at[slot]
        depth = pl.ds(pl.multiple_of(k * self.tuning.depth, self.tuning.depth), self.tuning.depth)
        for worker in range(WORKERS):
            first_row = pl.multiple_of(row + worker * ROWS, ROWS)
            x_rows = self.x.at[pl.ds(first_row, ROWS), depth]
            plgpu.copy_gmem_to_smem(x_rows, self.x_stages.at[slot, worker], full)
        plgpu.copy_gmem_to_smem(w.at[:, depth], self.w_stages.at[slot], full)

    def multiply(self, work: Work, worker: jax.Array) -> None:
        """Pass the logits of each tile, [64, columns] in registers, to the work."""
        shape = plgpu.WGMMAAccumulatorRef((ROWS, self.tuning.columns), jnp.float32)
        first_row = lambda row: pl.multiple_of(row * TILE + worker * ROWS, ROWS)

        def tile(carry, row: jax.Array, lane: jax.Array, number: jax.Array, step: jax.Array):
            logits = pl.run_scoped(partial(self._product, worker, step), shape)
            return work.tile(carry, logits, first_row(row), self.column(lane, number))

        end = lambda carry, row, lane: work.end(carry, first_row(row), lane)
        self.each_tile(lambda row: work.start(first_row(row)), tile, end)

    def _product(self, worker: jax.Array, step: jax.Array, logits: Any) -> jax.Array:
        def one(k: jax.Array, _: None) -> None:
            slot = self.slot(step + k)
            plgpu.barrier_wait(self.full.at[slot])
            columns = self.w_stages.at[slot].transpose((1, 0))
            plgpu.wgmma(logits, self.x_stages.at[slot, worker], columns)
            plgpu.wgmma_wait(1)

            @pl.when(k > 0)
            def _stage_before_was_read() -> None:
                plgpu.barrier_arrive(self.free.at[self.slot(step + k - 1)])

        lax.fori_loop(0, self.steps, one, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.free.at[self.slot(step + self.steps - 1)])
        return logits[...]
