"""The bodies of `collectives.py`: every rank writes its cast pieces straight into peers' memory.

A tile is loaded, cast in registers, laid in shared memory once, and copied from there to one peer
(scatter) or to all of them (gather). Block b of one rank and block b of another take the same
tiles, so a block waits only for its likes: one semaphore a block, one signal a peer.

Shapes: S ranks, R rows of C elements to a piece. Before them stand `ring.ranks`: nothing on a
mesh, and a virtual ring's ranks.
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
from hfjax.pallas_kernels.ring.peers import Ring, ahead
from hfjax.utils.paths import Index


def load(ref: Ref, dtype: DTypeLike) -> jax.Array:
    """Return a tile in shared memory, cast; spread over the threads alike for every dtype."""
    layout = plgpu.Layout.WG_STRIDED(ref.shape, vec_size=4)
    return plgpu.layout_cast(ref[...], layout).astype(dtype)


def slot_of(sender: Index, owner: Index) -> jax.Array:
    """Return where an owner keeps what a sender gave: others in the order of their ranks."""
    return sender - jnp.int32(sender > owner)


def tell(ring: Ring, arrived: Any) -> None:
    """Wait for all that this block sent, tell the peers, and wait until they have told."""
    block = lax.axis_index("block")
    plgpu.wait_smem_to_gmem(0)
    for steps in range(1, ring.size):
        ring.signal(arrived, block, ahead(ring, steps))
    if ring.size > 1:
        ring.wait(arrived, block, ring.size - 1)


def launch(body: Callable, ring: Ring, tiles: Tiles, out: list, scratch: list) -> Callable:
    """Return a function of the arrays that runs `body` on every rank and block of the ring."""
    return mosaic.kernel(
        body,
        [jax.ShapeDtypeStruct((*ring.ranks, *shape), dtype) for shape, dtype in out],
        [plgpu.SMEM((SLOTS, *shape), dtype) for shape, dtype in scratch],
        grid=(*ring.ranks, tiles.blocks),
        grid_names=(*ring.rank_names, "block"),
        compiler_params=mosaic.by_hand(),
    )


def _send_to_all(
    x_RC: Ref, whole_SRC: Ref, sent: Ref, *, ring: Ring, tiles: Tiles, stages: int
) -> None:
    arrived, rank = ring.semaphores(tiles.blocks), ring.rank()

    def step(each: jax.Array, turn: jax.Array, slot: jax.Array, x_TC: Ref) -> None:
        plgpu.wait_smem_to_gmem(ring.size * (SLOTS - 1), wait_read_only=True)
        sent[slot] = load(x_TC, sent.dtype)
        plgpu.commit_smem()
        for steps in range(ring.size):
            there = ring.peer(whole_SRC, ahead(ring, steps))
            plgpu.copy_smem_to_gmem(sent.at[slot], there.at[rank, tiles.rows_of(each)])

    tile = (tiles.tile, x_RC.shape[-1])
    stream.stream(step, tiles, [(ring.mine(x_RC), tile, lambda at, turn: (at, 0))], 1, stages)
    tell(ring, arrived)


def gather(ring: Ring, x: jax.Array, wire: DTypeLike, tuning: Any) -> jax.Array:
    """Return (…, S, n) in `wire`, where each rank has x (…, n)."""
    rows, columns = stream.folded(x.shape[-1])
    tiles = stream.tiles(rows, tuning.elements // columns, tuning.blocks)
    body = partial(_send_to_all, ring=ring, tiles=tiles, stages=tuning.stages)
    out = [((ring.size, tiles.whole, columns), wire)]
    scratch = [((tiles.tile, columns), wire)]
    (whole,) = launch(body, ring, tiles, out, scratch)(x.reshape(*ring.ranks, rows, columns))
    return whole[..., :rows, :].reshape(*ring.ranks, ring.size, x.shape[-1])


def _send_to_owners(
    x_SRC: Ref, parts: Ref, sent: Ref, *, ring: Ring, tiles: Tiles, stages: int
) -> None:
    rank = ring.rank()

    def give(owner: jax.Array, slot: jax.Array, each: jax.Array) -> None:
        there = ring.peer(parts, owner).at[slot_of(rank, owner), tiles.rows_of(each)]
        plgpu.copy_smem_to_gmem(sent.at[slot], there)

    def step(each: jax.Array, turn: jax.Array, slot: jax.Array, x_1TC: Ref) -> None:
        plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
        sent[slot] = load(x_1TC.at[0], sent.dtype)
        plgpu.commit_smem()
        for steps in range(1, ring.size):
            pl.when(turn == steps - 1)(partial(give, ahead(ring, steps), slot, each))

    tile = (1, tiles.tile, x_SRC.shape[-1])
    place = lambda at, turn: (ahead(ring, turn + 1), at, 0)
    stream.stream(step, tiles, [(ring.mine(x_SRC), tile, place)], ring.size - 1, stages)


def _add(
    x_SRC: Ref, parts: Ref, total: Ref, sums: Ref, *, ring: Ring, tiles: Tiles, stages: int
) -> None:
    def step(each: jax.Array, turn: jax.Array, slot: jax.Array, x_1TC: Ref, *others: Ref) -> None:
        plgpu.wait_smem_to_gmem(SLOTS - 1, wait_read_only=True)
        found = load(x_1TC.at[0], jnp.float32)
        for other in range(ring.size - 1):
            found += load(others[0].at[other], jnp.float32)
        sums[slot] = found
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(sums.at[slot], ring.mine(total).at[tiles.rows_of(each)])

    columns = x_SRC.shape[-1]
    own = (ring.mine(x_SRC), (1, tiles.tile, columns), lambda at, turn: (ring.rank(), at, 0))
    shape = (ring.size - 1, tiles.tile, columns)
    others = (ring.mine(parts), shape, lambda at, turn: (0, at, 0))
    stream.stream(step, tiles, [own, others][: ring.size], 1, stages)
    plgpu.wait_smem_to_gmem(0)


def _send_and_add(
    x_SRC: Ref, total_RC: Ref, parts: Ref, sent: Ref, sums: Ref, *, ring: Ring, **how: Any
) -> None:
    arrived = ring.semaphores(how["tiles"].blocks)
    if ring.size > 1:
        _send_to_owners(x_SRC, parts, sent, ring=ring, **how)
        tell(ring, arrived)
    _add(x_SRC, parts, total_RC, sums, ring=ring, **how)


def scatter(ring: Ring, x: jax.Array, wire: DTypeLike, tuning: Any) -> jax.Array:
    """Return this rank's part (…, n) of the sum over the ranks, where each has x (…, S, n)."""
    size, n = ring.size, x.shape[-1]
    rows, columns = stream.folded(n)
    a_stage = x.dtype.itemsize + (size - 1) * jnp.dtype(wire).itemsize
    elements = stream.fitting(tuning.elements, a_stage * tuning.stages + SLOTS * 8)
    tiles = stream.tiles(rows, elements // columns, tuning.blocks)
    body = partial(_send_and_add, ring=ring, tiles=tiles, stages=tuning.stages)
    tile = (tiles.tile, columns)
    parts = (max(size - 1, 1), tiles.whole, columns)
    out = [((tiles.whole, columns), jnp.float32), (parts, wire)]
    scratch = [(tile, wire), (tile, jnp.float32)]
    total, _ = launch(body, ring, tiles, out, scratch)(x.reshape(*ring.ranks, size, rows, columns))
    return total[..., :rows, :].reshape(*ring.ranks, n)
