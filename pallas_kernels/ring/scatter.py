"""The kernel of `matmul_reduce_scatter`: partial sums are sent while others are computed.

At step s a rank multiplies the rows of the rank s + 1 places ahead, so that no two ranks send to
the same one at a time, and its own rows last. Tiles of another rank are cast and stored directly
into a buffer of that rank which only this rank writes; a semaphore per tile counts the halves that
have arrived. For its own tiles a block copies received tiles, through the same stages as operands,
and adds them in fp32: each partial sum is rounded once, however many ranks there are.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from hfjax.pallas_kernels import plgpu
from hfjax.pallas_kernels.mosaic import Ref, RefSlice
from hfjax.pallas_kernels.ring.peers import Ring, rank_ahead
from hfjax.pallas_kernels.ring.tiles import (
    CHUNK,
    CONSUMERS,
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


def matmul_scatter(ring: Ring, x: jax.Array, w: jax.Array, tuning: Tuning) -> jax.Array:
    """Return this rank's rows of the sum over ranks of x times w, [M, N].

    x: [S, M, K], the columns of this rank for the rows of each rank. w: [K, N].
    """
    rows, columns = x.shape[-2], w.shape[-1]
    shapes = (rows, columns), (ring.size - 1, rows, columns)
    return launch("matmul_reduce_scatter", _Scatter, ring, shapes, x, w, tuning)


class _Scatter:
    """The roles of one block's warpgroups."""

    def __init__(
        self, ring: Ring, stages: Stages, x: Any, w: Any, out: Ref, landed: Sequence[Ref]
    ) -> None:
        self.ring, self.stages, self.x, self.w, self.out = ring, stages, x, w, out
        self.depths = pl.cdiv(w.shape[0], DEPTH)
        self.tiles = make_tiles(stages.tuning, ring.size, x.shape[1], w.shape[1])
        self.last = ring.size - 1  # the step of this rank's own rows
        self.peer_refs = []
        if landed:
            self.landed = ring.local(landed[0])
            self.peer_refs = [
                ring.peer(landed[0], rank_ahead(ring, s + 1)) for s in range(self.last)
            ]
            self.arrived = ring.semaphores(self.tiles.each_step)

    def copy(self, tile: jax.Array, begin: jax.Array) -> jax.Array:
        step, row, column = self.tiles.at(tile)
        rows_of_owner = self.x.at[rank_ahead(self.ring, step + 1)]
        end = copy_operands(self.stages, rows_of_owner, self.w, (row, column), begin)
        if not self.last:
            return end

        def copy_landed() -> jax.Array:
            index = row * self.tiles.columns + column
            self.ring.wait(self.arrived, index, CONSUMERS * self.last)
            return lax.fori_loop(
                0, self.last, lambda source, n: self._copy_landed(source, row, column, n), end
            )

        return lax.cond(step == self.last, copy_landed, lambda: end)

    def _copy_landed(
        self, source: jax.Array, row: jax.Array, column: jax.Array, begin: jax.Array
    ) -> jax.Array:
        """Copy a tile from another rank, a half for each consumer, to the stages of B."""
        rows, columns = tile_slices(row, column, self.stages.tuning)
        height = HALF // 2  # in two copies: as many as a stage of operands has

        def copy(half: jax.Array, number: jax.Array) -> jax.Array:
            slot = self.stages.claim(number)
            for first in (0, height):
                half_rows = pl.ds(rows.start + half * HALF + first, height)
                plgpu.copy_gmem_to_smem(
                    self.landed.at[source, half_rows, columns],
                    self.stages.b.at[slot, pl.ds(first, height)],
                    self.stages.full.at[slot],
                )
            return number + 1

        return lax.fori_loop(0, CONSUMERS, copy, begin)

    def consumes(self) -> None:
        self.tiles.walk(self._consume_tile, jnp.int32(0))
        if self.last:
            self._signal_sent(self.tiles.last())

    def _consume_tile(self, tile: jax.Array, begin: jax.Array) -> jax.Array:
        step, row, column = self.tiles.at(tile)
        chunks = multiply(self.stages, self.depths, begin)
        end = begin + self.depths
        if self.last:
            self._signal_sent(tile - self.tiles.blocks)
            landed = jnp.where(step == self.last, self.last, 0)
            chunks, end = lax.fori_loop(0, landed, self._add_landed, (chunks, end))
        self._store(chunks, step, row, column)
        return end

    def _signal_sent(self, tile: jax.Array) -> None:
        """Signal the arrival of this block's previous tile to its owner; by now it has arrived."""
        step, row, column = self.tiles.at(tile)

        @pl.when((tile >= 0) & (step < self.last))
        def _() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=False)
            index = row * self.tiles.columns + column
            self.ring.signal(self.arrived, index, rank_ahead(self.ring, step + 1))

    def _add_landed(self, _: jax.Array, carry: tuple) -> tuple:
        """Add this consumer's half of a tile, and release both."""
        chunks, number = carry
        slots = [self.stages.wait_full(number + half) for half in range(CONSUMERS)]
        slot = lax.select(lax.axis_index("warpgroup") == 0, *slots)
        chunks = tuple(
            chunk + self._load_landed(slot, c * CHUNK).astype(jnp.float32)
            for c, chunk in enumerate(chunks)
        )
        plgpu.commit_smem()  # reads are done before a copy may write there
        for half in range(CONSUMERS):
            self.stages.release(number + half)
        return chunks, number + CONSUMERS

    def _load_landed(self, slot: jax.Array, column: int) -> jax.Array:
        chunk = self.stages.b.at[slot, :, pl.ds(column, CHUNK)]
        return plgpu.layout_cast(chunk[...], plgpu.Layout.WGMMA)

    def _store(self, chunks: tuple, step: jax.Array, row: jax.Array, column: jax.Array) -> None:
        rows, columns = tile_slices(row, column, self.stages.tuning)
        first = rows.start + lax.axis_index("warpgroup") * HALF

        def store(chunk: RefSlice, column_offset: int) -> None:
            index = pl.ds(first, HALF), pl.ds(columns.start + column_offset, chunk.shape[1])
            # The local one comes first: jax lowers the first branch once more, to inspect its
            # type, and a copy to a peer in that discarded lowering would be recorded.
            refs = [self.out.at[index]]
            refs += [ref.at[s, *index] for s, ref in enumerate(self.peer_refs)]
            which = lax.rem(step + 1, jnp.int32(self.ring.size))
            lax.switch(which, [partial(plgpu.copy_smem_to_gmem, chunk, ref) for ref in refs])

        write_back(self.stages, chunks, store)
