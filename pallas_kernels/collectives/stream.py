"""Stream arrays through shared memory tile by tile, for elementwise kernels.

An array of n elements is viewed as a matrix with up to 256 columns, the limit of one TMA copy; a
tile is some rows. The blocks of the grid axis "block" take tiles round-robin, and each keeps
several copies in flight. The last tile may extend beyond the end: reads there return zero, and a
kernel's output must have room for it (`Tiles.padded_rows` rows), since a copy from shared memory
stops neither at the end of a dimension nor at a number of bytes that is no multiple of 16.
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

COLUMNS = 256  # the maximum side of one copy, in elements
SLOTS = 2  # output tiles in flight
SHARED_BYTES = 200 * 1024  # bytes of shared memory that tiles may take


@dataclass(frozen=True)
class Tiles:
    """Tiles of `tile` of the `rows` rows, assigned round-robin to `blocks` blocks."""

    rows: int
    tile: int
    blocks: int

    @property
    def count(self) -> int:
        return pl.cdiv(self.rows, self.tile)

    @property
    def padded_rows(self) -> int:
        """The rows of all tiles, which the output must have."""
        return self.count * self.tile

    def steps(self) -> jax.Array:
        """Return the number of tiles of this block."""
        return lax.div(self.count - lax.axis_index("block") + self.blocks - 1, self.blocks)

    def at(self, step: Index) -> jax.Array:
        """Return the number of this block's tile in a step."""
        return lax.axis_index("block") + step * self.blocks

    def rows_of(self, step: Index) -> slice | pl.Slice:
        return pl.ds(self.at(step) * self.tile, self.tile)


def matrix_shape(n: int) -> tuple[int, int]:
    """Return the rows and columns of the matrix view of n elements.

    >>> matrix_shape(1024), matrix_shape(24)
    ((4, 256), (3, 8))
    """
    columns = gcd(n, COLUMNS)
    return n // columns, columns


def max_elements(elements: int, bytes_each: int) -> int:
    """Return the maximum elements per tile, if each takes `bytes_each` of shared memory."""
    while elements * bytes_each > SHARED_BYTES:
        elements //= 2
    return elements


def make_tiles(rows: int, tile: int, blocks: int) -> Tiles:
    """Return tiles of at most `tile` rows for at most `blocks` blocks, none of them idle."""
    tile = min(tile, COLUMNS)
    return Tiles(rows, tile, min(blocks, pl.cdiv(rows, tile)))


def stream(step: Callable, tiles: Tiles, inputs: Sequence[tuple], rounds: int, stages: int) -> None:
    """Run `step(step, round, slot, *tiles in shared memory)` for each tile, `rounds` times each.

    An input is a ref, the shape of its tiles, and their index, in tiles: a function of the tile's
    number and the round. `slot` is the next of `SLOTS` output slots: wait for its previous copy
    before writing.
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
