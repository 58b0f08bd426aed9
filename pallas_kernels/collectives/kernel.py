"""The kernel bodies of `casting.py`: every rank writes its cast pieces directly to peers' memory.

A tile is loaded, cast in registers, stored in shared memory once, and copied from there to one peer
(scatter) or to all of them (gather). Block b of every rank takes the same tiles, so a block waits
only for its counterparts: one semaphore per block, one signal per peer.

Shapes: S ranks, R rows of C elements per piece, after the leading dimensions `ring.ranks`: none on
a mesh, the ranks of a virtual ring.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from hfjax.pallas_kernels import mosaic, plgpu
from hfjax.pallas_kernels.collectives import stream
from hfjax.pallas_kernels.collectives.stream import SLOTS, Tiles
from hfjax.pallas_kernels.mosaic import Ref
from hfjax.pallas_kernels.ring.peers import Ring, rank_ahead
from hfjax.utils.paths import Index


def load_cast(ref: Ref, dtype: DTypeLike) -> jax.Array:
    """Return a tile of shared memory, cast, with the same thread layout for every dtype."""
    layout = plgpu.Layout.WG_STRIDED(ref.shape, vec_size=4)
    return plgpu.layout_cast(ref[...], layout).astype(dtype)


def inbox_slot(sender: Index, owner: Index) -> jax.Array:
    """Return the owner's slot for a sender's data: senders in the order of their ranks."""
    return sender - jnp.int32(sender > owner)


def signal_and_wait(ring: Ring, arrived: Any) -> None:
    """Wait for all stores of this block, signal the peers, and wait for their signals."""
    block = lax.axis_index("block")
    plgpu.wait_smem_to_gmem(0)
    for steps in range(1, ring.size):
        ring.signal(arrived, block, rank_ahead(ring, steps))
    if ring.size > 1:
        ring.wait(arrived, block, ring.size - 1)


def launch(body: Callable, ring: Ring, tiles: Tiles, out: list, scratch: list) -> Callable:
    """Return a function of arrays that runs `body` on every rank and block of the ring."""
    return mosaic.kernel(
        body,
        [jax.ShapeDtypeStruct((*ring.ranks, *shape), dtype) for shape, dtype in out],
        [plgpu.SMEM((SLOTS, *shape), dtype) for shape, dtype in scratch],
        grid=(*ring.ranks, tiles.blocks),
        grid_names=(*ring.rank_names, "block"),
        compiler_params=mosaic.lane_params(),
    )


def _send_to_all(
    x_RC: Ref, out_SRC: Ref, sent: Ref, *, ring: Ring, tiles: Tiles, stages: int
) -> None:
    arrived, rank = ring.semaphores(tiles.blocks), ring.rank()

    def step(tile_step: jax.Array, round_number: jax.Array, slot: jax.Array, x_TC: Ref) -> None:
        plgpu.wait_smem_to_gmem(ring.size * (SLOTS - 1), wait_read_only=True)
        sent[slot] = load_cast(x_TC, sent.dtype)
        plgpu.commit_smem()
        for steps in range(ring.size):
            remote = ring.peer(out_SRC, rank_ahead(ring, steps))
            plgpu.copy_smem_to_gmem(sent.at[slot], remote.at[rank, tiles.rows_of(tile_step)])

    tile = (tiles.tile, x_RC.shape[-1])
    stream.stream(
        step, tiles, [(ring.local(x_RC), tile, lambda at, round_number: (at, 0))], 1, stages
    )
    signal_and_wait(ring, arrived)


def gather(ring: Ring, x: jax.Array, wire: DTypeLike, tuning: Any) -> jax.Array:
    """Return (…, S, n) in `wire`, where each rank has x (…, n)."""
    rows, columns = stream.matrix_shape(x.shape[-1])
    tiles = stream.make_tiles(rows, tuning.elements // columns, tuning.blocks)
    body = partial(_send_to_all, ring=ring, tiles=tiles, stages=tuning.stages)
    out = [((ring.size, tiles.padded_rows, columns), wire)]
    scratch = [((tiles.tile, columns), wire)]
    (gathered,) = launch(body, ring, tiles, out, scratch)(x.reshape(*ring.ranks, rows, columns))
    return gathered[..., :rows, :].reshape(*ring.ranks, ring.size, x.shape[-1])


def _send_to_owners(
    x_SRC: Ref, received: Ref, sent: Ref, *, ring: Ring, tiles: Tiles, stages: int
) -> None:
    rank = ring.rank()

    def send(owner: jax.Array, slot: jax.Array, tile_step: jax.Array) -> None:
        remote = ring.peer(received, owner).at[inbox_slot(rank, owner), tiles.rows_of(tile_step)]
        plgpu.copy_smem_to_gmem(sent.at[slot], remote)

    def step(tile_step: jax.Array, round_number: jax.Array, slot: jax.Array, x_1TC: Ref) -> None:
        plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
        sent[slot] = load_cast(x_1TC.at[0], sent.dtype)
        plgpu.commit_smem()
        for steps in range(1, ring.size):
            pl.when(round_number == steps - 1)(
                partial(send, rank_ahead(ring, steps), slot, tile_step)
            )

    tile = (1, tiles.tile, x_SRC.shape[-1])
    tile_index = lambda at, round_number: (rank_ahead(ring, round_number + 1), at, 0)
    stream.stream(step, tiles, [(ring.local(x_SRC), tile, tile_index)], ring.size - 1, stages)


def _add(
    x_SRC: Ref, received: Ref, out: Ref, sums: Ref, *, ring: Ring, tiles: Tiles, stages: int
) -> None:
    def step(
        tile_step: jax.Array, round_number: jax.Array, slot: jax.Array, x_1TC: Ref, *others: Ref
    ) -> None:
        plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
        acc = load_cast(x_1TC.at[0], jnp.float32)
        for other in range(ring.size - 1):
            acc += load_cast(others[0].at[other], jnp.float32)
        sums[slot] = acc
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums.at[slot], ring.local(out).at[tiles.rows_of(tile_step)])

    columns = x_SRC.shape[-1]
    own = (
        ring.local(x_SRC),
        (1, tiles.tile, columns),
        lambda at, round_number: (ring.rank(), at, 0),
    )
    shape = (ring.size - 1, tiles.tile, columns)
    others = (ring.local(received), shape, lambda at, round_number: (0, at, 0))
    stream.stream(step, tiles, [own, others][: ring.size], 1, stages)
    plgpu.wait_smem_to_gmem(0)


def _send_and_add(
    x_SRC: Ref, out_RC: Ref, received: Ref, sent: Ref, sums: Ref, *, ring: Ring, **options: Any
) -> None:
    arrived = ring.semaphores(options["tiles"].blocks)
    if ring.size > 1:
        _send_to_owners(x_SRC, received, sent, ring=ring, **options)
        signal_and_wait(ring, arrived)
    _add(x_SRC, received, out_RC, sums, ring=ring, **options)


def scatter(ring: Ring, x: jax.Array, wire: DTypeLike, tuning: Any) -> jax.Array:
    """Return this rank's shard (…, n) of the sum over the ranks, where each has x (…, S, n)."""
    size, n = ring.size, x.shape[-1]
    rows, columns = stream.matrix_shape(n)
    stage_bytes = x.dtype.itemsize + (size - 1) * jnp.dtype(wire).itemsize
    elements = stream.max_elements(tuning.elements, stage_bytes * tuning.stages + SLOTS * 8)
    tiles = stream.make_tiles(rows, elements // columns, tuning.blocks)
    body = partial(_send_and_add, ring=ring, tiles=tiles, stages=tuning.stages)
    tile = (tiles.tile, columns)
    received_shape = (max(size - 1, 1), tiles.padded_rows, columns)
    out = [((tiles.padded_rows, columns), jnp.float32), (received_shape, wire)]
    scratch = [(tile, wire), (tile, jnp.float32)]
    summed, _ = launch(body, ring, tiles, out, scratch)(x.reshape(*ring.ranks, size, rows, columns))
    return summed[..., :rows, :].reshape(*ring.ranks, n)
