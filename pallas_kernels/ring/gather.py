"""The kernel of `all_gather_matmul`: shards of x travel the ring while they are multiplied.

At step s a rank multiplies the shard of the rank s places ahead. A block with a tile in the first
column also sends its rows from shared memory to the rank before, and signals a semaphore of that
shard and those rows, for which the copier of each block there waits. So there is no barrier between
steps, and each shard crosses each link once.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from hfjax.pallas_kernels import plgpu
from hfjax.pallas_kernels.mosaic import Ref, RefSlice
from hfjax.pallas_kernels.ring.peers import Ring, rank_ahead
from hfjax.pallas_kernels.ring.tiles import (
    DEPTH,
    HALF,
    Stages,
    Tuning,
    copy_operands,
    launch,
    make_tiles,
    multiply,
    tile_slices,
    write_back,
)


def gather_matmul(ring: Ring, x: jax.Array, w: jax.Array, tuning: Tuning) -> jax.Array:
    """Return all shards of x times w, [S, M, N] (operands of a virtual ring lead with ranks).

    x: [M, K], this rank's shard. w: [K, N].
    """
    (depth, columns), rows = w.shape[-2:], x.shape[-2]
    shapes = (ring.size, rows, columns), (ring.size - 1, rows, depth)
    return launch("all_gather_matmul", _Gather, ring, shapes, x, w, tuning)


class _Gather:
    """The roles of one block's warpgroups."""

    def __init__(
        self, ring: Ring, stages: Stages, x: Any, w: Any, out: Ref, landed: Sequence[Ref]
    ) -> None:
        self.ring, self.stages, self.x, self.w, self.out = ring, stages, x, w, out
        self.depths = pl.cdiv(w.shape[0], DEPTH)
        self.tiles = make_tiles(stages.tuning, ring.size, x.shape[0], w.shape[1])
        if landed:
            self.before = rank_ahead(ring, ring.size - 1)
            self.landed = ring.local(landed[0])
            self.landed_before = ring.peer(landed[0], self.before)
            self.arrived = ring.semaphores((ring.size - 1) * self.tiles.rows)

    def copy(self, tile: jax.Array, begin: jax.Array) -> jax.Array:
        step, row, column = self.tiles.at(tile)

        def of_mine() -> jax.Array:
            return copy_operands(self.stages, self.x, self.w, (row, column), begin)

        def of_landed() -> jax.Array:
            self.ring.wait(self.arrived, (step - 1) * self.tiles.rows + row, 1)
            landed = self.landed.at[step - 1]
            return copy_operands(self.stages, landed, self.w, (row, column), begin)

        return of_mine() if self.ring.size == 1 else lax.cond(step == 0, of_mine, of_landed)

    def consumes(self) -> None:
        self.tiles.walk(self._consume_tile, jnp.int32(0))

    def _consume_tile(self, tile: jax.Array, begin: jax.Array) -> jax.Array:
        step, row, column = self.tiles.at(tile)
        is_sender = (lax.axis_index("warpgroup") == 0) & (column == 0)
        is_sender &= step < self.ring.size - 1

        def when_passing(action: Callable):
            return pl.when(is_sender)(action) if self.ring.size > 1 else None

        def pass_on(k: jax.Array, slot: jax.Array) -> None:
            @when_passing
            def _() -> None:
                rows, _ = tile_slices(row, column, self.stages.tuning)
                remote = self.landed_before.at[step, rows, pl.ds(k * DEPTH, DEPTH)]
                plgpu.copy_smem_to_gmem(self.stages.a.at[slot], remote)
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)

        all_read = lambda: when_passing(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        chunks = multiply(self.stages, self.depths, begin, pass_on, all_read)
        self._store(chunks, step, row, column)

        @when_passing
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)  # all stores have arrived
            self.ring.signal(self.arrived, step * self.tiles.rows + row, self.before)

        return begin + self.depths

    def _store(self, chunks: tuple, step: jax.Array, row: jax.Array, column: jax.Array) -> None:
        rows, columns = tile_slices(row, column, self.stages.tuning)
        shard = rank_ahead(self.ring, step)
        first = rows.start + lax.axis_index("warpgroup") * HALF

        def store(chunk: RefSlice, column_offset: int) -> None:
            index = pl.ds(first, HALF), pl.ds(columns.start + column_offset, chunk.shape[1])
            plgpu.copy_smem_to_gmem(chunk, self.out.at[shard, *index])

        write_back(self.stages, chunks, store)
