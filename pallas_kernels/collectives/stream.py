"""Arrays that stream through shared memory tile by tile: what elementwise kernels share.

An array of n elements is seen as `columns` (up to 256, the most that one copy of the TMA takes)
by as many rows; a tile is some rows. The blocks of the grid's axis "block" take tiles in turn, and
each keeps several copies in flight. A last tile may reach over the end: what is read there is
zero, and what a kernel writes must have room for it (`Tiles.whole` rows), since a copy from shared
memory stops neither at the end of a dimension nor at any number of bytes that 16 does not divide.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from hfjax.pallas_kernels import plgpu
from hfjax.pallas_kernels.mosaic import Ref
from hfjax.utils.paths import Index

COLUMNS = 256  # the most elements of a side of one copy
SLOTS = 2  # tiles on their way out
SHARED_BYTES = 200 * 1024  # bytes of shared memory that tiles may take


@dataclass(frozen=True)
class Tiles:
    """The tiles of `rows` rows, `tile` to each, that `blocks` blocks take in turn."""

    rows: int
    tile: int
    blocks: int

    @property
    def count(self) -> int:
        return pl.cdiv(self.rows, self.tile)

    @property
    def padded_rows(self) -> int:
        """The rows of all tiles: what is written has so many."""
        return self.count * self.tile

    def steps(self) -> jax.Array:
        """Return how many tiles this block takes."""
        return lax.div(self.count - lax.axis_index("block") + self.blocks - 1, self.blocks)

    def at(self, step: Index) -> jax.Array:
        """Return the number of the tile that this block takes in a step."""
        return lax.axis_index("block") + step * self.blocks

    def rows_of(self, step: Index) -> slice | pl.Slice:
        return pl.ds(self.at(step) * self.tile, self.tile)


def matrix_shape(n: int) -> tuple[int, int]:
    """Return rows and columns that n elements are seen as.

    >>> matrix_shape(1024), matrix_shape(24)
    ((4, 256), (3, 8))
    """
    columns = gcd(n, COLUMNS)
    return n // columns, columns


def max_elements(elements: int, bytes_each: int) -> int:
    """Return how many elements a tile has, at most, that takes `bytes_each` of shared memory."""
    while elements * bytes_each > SHARED_BYTES:
        elements //= 2
    return elements


def make_tiles(rows: int, tile: int, blocks: int) -> Tiles:
    """Return tiles of at most `tile` rows for at most `blocks` blocks, none of them idle."""
    tile = min(tile, COLUMNS)
    return Tiles(rows, tile, min(blocks, pl.cdiv(rows, tile)))


def stream(step: Callable, tiles: Tiles, inputs: Sequence[tuple], rounds: int, stages: int) -> None:
    """Run `step(step, round, slot, *tiles in shared memory)` for each tile, `rounds` times each.

    An input is a ref, the shape of a tile of it, and where that tile is, in tiles: a function of
    the tile's number and the round. Of `SLOTS` slots for what leaves, the one given is written
    next: wait for what left it before.
    """

    def run(index: tuple, *smem: Ref) -> None:
        tile_step, round_number = index
        step(
            tile_step,
            round_number,
            lax.rem(tile_step * rounds + round_number, jnp.int32(SLOTS)),
            *smem,
        )

    specs = [
        plgpu.BlockSpec(
            shape,
            lambda tile_step, round_number, tile_index=tile_index: tile_index(
                tiles.at(tile_step), round_number
            ),
        )
        for _, shape, tile_index in inputs
    ]
    grid = (tiles.steps(), rounds)
    plgpu.emit_pipeline(run, grid=grid, in_specs=specs, max_concurrent_steps=stages)(
        *(ref for ref, _, _ in inputs)
    )
