"""The bodies of `collectives.py`: a piece is quantised in registers on its way to its owner.

As in `collectives/kernel.py`, with a scale beside every row of a tile: a row is a block of
quantisation. Shapes: S ranks, R blocks of B elements to a piece. Before them stand
`ring.ranks`: nothing on a mesh, and a virtual ring's ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from hfjax.base.paths import Index
from hfjax.pallas_kernels import plgpu
from hfjax.pallas_kernels.collectives import stream
from hfjax.pallas_kernels.collectives.kernel import axes, launch, slot_of, tell
from hfjax.pallas_kernels.collectives.stream import SLOTS, Tiles
from hfjax.pallas_kernels.compressed.quantize import Code, code, decode, encode, load, load_scales
from hfjax.pallas_kernels.mosaic import Ref
from hfjax.pallas_kernels.ring.peers import Ring, ahead

GROUP = 32  # rows whose scales are loaded by one copy: 128 bytes are the least of one


@dataclass(frozen=True)
class Run:
    """What the parts of a body share."""

    ring: Ring
    tiles: Tiles  # of GROUP rows, whose scales are loaded at once
    tile: int  # rows that are worked on at once: part of a group
    kind: Code
    stages: int

    @property
    def parts(self) -> int:
        return self.tiles.tile // self.tile

    def part(self, at: Index, turn: Index) -> Index:
        """Return the number of the tile that a turn with a group is about."""
        return at * self.parts + lax.rem(turn, jnp.int32(self.parts))

    def rows(self, each: Index, turn: Index) -> slice | pl.Slice:
        return pl.ds(self.part(self.tiles.at(each), turn) * self.tile, self.tile)

    def rank_of(self, turn: Index) -> jax.Array:
        """Return which of the ranks, in some order, a turn with a group is about."""
        return lax.div(turn, jnp.int32(self.parts))

    def scales(self, ref: Ref, turn: Index) -> jax.Array:
        """Return the scales of a turn's rows, of those of the group in shared memory."""
        first = lax.rem(turn, jnp.int32(self.parts)) * self.tile
        return load_scales(ref.at[pl.ds(first, self.tile)])

    def leave(self, slot: Index, refs: tuple, tiles: tuple, pending: int) -> None:
        """Put tiles into their slots, once the `pending` last copies may still be under way."""
        plgpu.wait_smem_to_gmem(pending, wait_read_only=True)
        for ref, tile in zip(refs, tiles, strict=True):
            ref[slot] = tile
        plgpu.commit_smem()

    def stream(self, step: Callable, inputs: list, ranks: int) -> None:
        stream.stream(step, self.tiles, inputs, ranks * self.parts, self.stages)


def _lossy(meant: jax.Array, kind: Code) -> tuple[jax.Array, jax.Array, jax.Array]:
    values, scales = encode(meant, kind)
    return values, scales, meant - decode(values, scales)


def _copy(slot: Index, refs: tuple, places: tuple) -> None:
    for ref, place in zip(refs, places, strict=True):
        plgpu.copy_smem_to_gmem(ref.at[slot], place)


def _pieces(run: Run, given: tuple, owner: Callable) -> list:
    """Return the tiles of the pieces of `given` that belong to `owner(turn)`."""
    tile = (1, run.tile, given[0].shape[-1])
    place = lambda at, turn: (owner(turn), run.part(at, turn), 0)
    return [(run.ring.mine(ref), tile, place) for ref in given]


def _send_to_owners(run: Run, given: tuple, lost: Ref, parts: tuple, slots: tuple) -> None:
    ring, rank = run.ring, run.ring.rank()
    owner_of = lambda turn: ahead(ring, run.rank_of(turn) + 1)

    def give(owner: jax.Array, slot: jax.Array, rows: slice | pl.Slice) -> None:
        at = slot_of(rank, owner)
        _copy(slot, slots[:2], tuple(ring.peer(ref, owner).at[at, rows] for ref in parts))

    def step(each: jax.Array, turn: jax.Array, slot: jax.Array, x: Ref, error: Ref) -> None:
        found = _lossy(load(x.at[0]) + load(error.at[0]), run.kind)
        run.leave(slot, slots, found, 3 * (SLOTS - 1))
        rows = run.rows(each, turn)
        _copy(slot, slots[2:], (ring.mine(lost).at[owner_of(turn), rows],))
        for steps in range(1, ring.size):
            to_this = run.rank_of(turn) == steps - 1
            pl.when(to_this)(partial(give, ahead(ring, steps), slot, rows))

    run.stream(step, _pieces(run, given, owner_of), ring.size - 1)


def _add(run: Run, given: tuple, left: tuple, parts: tuple, slots: tuple) -> None:
    ring, rank = run.ring, run.ring.rank()
    total, lost = map(ring.mine, left)

    def step(
        each: jax.Array, turn: jax.Array, slot: jax.Array, x: Ref, error: Ref, *others: Ref
    ) -> None:
        found = load(x.at[0]) + load(error.at[0])
        for other in range(ring.size - 1):
            values, scales = (ref.at[other] for ref in others)
            found += decode(load(values), run.scales(scales, turn))
        run.leave(slot, slots, (found, jnp.zeros_like(found)), 2 * (SLOTS - 1))
        rows = run.rows(each, turn)
        _copy(slot, slots, (total.at[rows], lost.at[rank, rows]))

    inputs = _pieces(run, given, lambda turn: rank)
    if ring.size > 1:
        values, scales = map(ring.mine, parts)
        others, width = ring.size - 1, values.shape[-1]
        place = lambda at, turn: (0, run.part(at, turn), 0)
        inputs.append((values, (others, run.tile, width), place))
        inputs.append((scales, (others, GROUP), lambda at, turn: (0, at)))
    run.stream(step, inputs, 1)
    plgpu.wait_smem_to_gmem(0)


def _send_and_add(*refs: Ref, run: Run) -> None:
    given, left, parts, slots = refs[:2], refs[2:4], refs[4:6], refs[6:]
    arrived = run.ring.semaphores(run.tiles.blocks)
    if run.ring.size > 1:
        _send_to_owners(run, given, left[1], parts, slots[:3])
        tell(run.ring, arrived)
    _add(run, given, left, parts, (slots[3], slots[2]))


def _run(ring: Ring, x: jax.Array, how: str, tuning: Any, others: int) -> Run:
    """Return what a body needs whose tiles are joined by those of `others` ranks."""
    block, kind = x.shape[-1], code(how)
    each = tuning.stages * (x.dtype.itemsize + 4 + others) + SLOTS * (1 + 4 + 4)
    tile = min(stream.fitting(tuning.elements, each) // block, GROUP)
    tiles = stream.tiles(x.shape[-2], GROUP, tuning.blocks)
    return Run(ring, tiles, tile, kind, tuning.stages)


def scatter(ring: Ring, x: jax.Array, error: jax.Array, how: str, tuning: Any) -> tuple:
    """Return this rank's part (…, R, B) of the sum, and what was lost (…, S, R, B) of x."""
    size, rows, block = x.shape[-3:]
    run, others = _run(ring, x, how, tuning, ring.size - 1), max(size - 1, 1)
    wide, kind, float32 = (run.tile, block), run.kind.dtype, jnp.float32
    whole = run.tiles.whole
    parts = [((others, whole, block), kind), ((others, whole), float32)]
    out = [((whole, block), float32), ((size, whole, block), float32), *parts]
    scratch = [(wide, kind), (wide[:1], float32), (wide, float32), (wide, float32)]
    body = partial(_send_and_add, run=run)
    total, lost, *_ = launch(body, ring, run.tiles, out, scratch)(x, error)
    return total[..., :rows, :], lost[..., :rows, :]


def _send_to_all(run: Run, given: tuple, lost: Ref, parts: tuple, slots: tuple) -> None:
    ring, rank = run.ring, run.ring.rank()

    def step(each: jax.Array, turn: jax.Array, slot: jax.Array, x: Ref, error: Ref) -> None:
        found = _lossy(load(x) + load(error), run.kind)
        run.leave(slot, slots, found, (1 + 2 * ring.size) * (SLOTS - 1))
        rows = run.rows(each, turn)
        _copy(slot, slots[2:], (ring.mine(lost).at[rows],))
        for steps in range(ring.size):
            there = (ring.peer(ref, ahead(ring, steps)).at[rank, rows] for ref in parts)
            _copy(slot, slots[:2], tuple(there))

    tile = (run.tile, given[0].shape[-1])
    place = lambda at, turn: (run.part(at, turn), 0)
    run.stream(step, [(ring.mine(ref), tile, place) for ref in given], 1)


def _decode(run: Run, parts: tuple, whole: Ref, slots: tuple) -> None:
    ring = run.ring

    def step(each: jax.Array, turn: jax.Array, slot: jax.Array, values: Ref, scales: Ref) -> None:
        found = decode(load(values.at[0]), run.scales(scales.at[0], turn))
        run.leave(slot, slots, (found,), SLOTS - 1)
        there = ring.mine(whole).at[run.rank_of(turn), run.rows(each, turn)]
        _copy(slot, slots, (there,))

    values, scales = map(ring.mine, parts)
    tile = (1, run.tile, values.shape[-1])
    inputs = [
        (values, tile, lambda at, turn: (run.rank_of(turn), run.part(at, turn), 0)),
        (scales, (1, GROUP), lambda at, turn: (run.rank_of(turn), at)),
    ]
    run.stream(step, inputs, ring.size)
    plgpu.wait_smem_to_gmem(0)


def _send_and_decode(*refs: Ref, run: Run) -> None:
    given, (whole, lost), parts, slots = refs[:2], refs[2:4], refs[4:6], refs[6:]
    arrived = run.ring.semaphores(run.tiles.blocks)
    _send_to_all(run, given, lost, parts, slots)
    tell(run.ring, arrived)
    _decode(run, parts, whole, slots[2:])


def gather(ring: Ring, x: jax.Array, error: jax.Array, how: str, tuning: Any) -> tuple:
    """Return the whole (…, S, R, B) of which each rank has x (…, R, B), and what was lost of x."""
    rows, block = x.shape[-2:]
    run, size = _run(ring, x, how, tuning, 0), ring.size
    wide, kind, float32 = (run.tile, block), run.kind.dtype, jnp.float32
    room = run.tiles.whole
    parts = [((size, room, block), kind), ((size, room), float32)]
    out = [((size, room, block), float32), ((room, block), float32), *parts]
    scratch = [(wide, kind), (wide[:1], float32), (wide, float32)]
    body = partial(_send_and_decode, run=run)
    whole, lost, *_ = launch(body, ring, run.tiles, out, scratch, axes(ring))(x, error)
    return whole[..., :rows, :], lost[..., :rows, :]
