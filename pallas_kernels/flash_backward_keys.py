"""The backward kernel of attention that makes dk and dv: see `flash_backward`.

A block of threads has 64 rows of keys and values per warpgroup and is visited by the tiles of
queries that see them, of every head that shares these keys. Everything is transposed: rows are
keys, columns are queries. Shapes as in `flash_parts`.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hfjax.pallas_kernels import mosaic
from hfjax.pallas_kernels.flash_backward import Inputs
from hfjax.pallas_kernels.flash_keys import shared_rows
from hfjax.pallas_kernels.flash_parts import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    ROWS,
    Plan,
    Visit,
    across,
    both_added,
    by_roles,
    down,
    drain,
    filled,
    launch,
    loaded,
    numbers,
    read_visit,
    seen,
    slot_of,
    write,
)


class Shared(NamedTuple):
    """Shared memory and barriers of one block of threads: own rows, then tiles that visit."""

    k: Any
    v: Any
    rows_here: Any
    q: Any
    do: Any
    lse: Any
    delta: Any
    documents: Any
    here: Any
    free: Any


class Turns(NamedTuple):
    """The order in which tiles of queries come: whole ones of all heads, then the others."""

    visit: Visit
    heads: int

    @property
    def whole(self) -> Any:
        return self.visit.whole * self.heads

    @property
    def count(self) -> Any:
        return self.visit.count * self.heads

    def at(self, turn: Any) -> tuple[Any, Any]:
        """Return (head among those that share these keys, number of the tile)."""
        whole, rest = self.visit.whole, self.visit.count - self.visit.whole
        late = turn - self.whole
        among, base, size = (
            jnp.where(turn < self.whole, a, b) for a, b in ((turn, late), (0, whole), (whole, rest))
        )
        size = jnp.maximum(size, 1)
        return lax.div(among, size), self.visit.tile(base + lax.rem(among, size))


def keys(plan: Plan, inputs: Inputs, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Return (dk, dv)."""
    shape = plan.shape
    grid = {"batch": shape.batch, "group": shape.groups, "tile": inputs.visits.shape[1]}
    outputs = (jax.ShapeDtypeStruct(inputs.k_BTGD.shape, dtype),) * 2

    def body(inputs, outputs, shared):
        _body(plan, inputs, outputs, shared)

    scratch = _shared(plan)
    dk, dv = launch(plan, "flash_backward_keys", body, grid, inputs, outputs, scratch)
    return dk, dv


def _shared(plan: Plan) -> Shared:
    cut, width = plan.cut, plan.shape.width
    tiles = plgpu.SMEM(
        (cut.stages, cut.tile, width), plan.dtype, transforms=mosaic.tiled(plan.dtype)
    )
    numbers = plgpu.SMEM((cut.stages, cut.tile), jnp.float32)
    documents = plgpu.SMEM((cut.stages, cut.tile), jnp.int32) if plan.documents else None
    rows, rows_here = shared_rows(plan), plgpu.Barrier(num_arrivals=2, num_barriers=cut.consumers)
    here = plgpu.Barrier(num_arrivals=4 + plan.documents, num_barriers=cut.stages)
    free = plgpu.Barrier(num_arrivals=cut.consumers, num_barriers=cut.stages)
    return Shared(rows, rows, rows_here, tiles, tiles, numbers, numbers, documents, here, free)


def _body(plan: Plan, inputs: Inputs, outputs: tuple, shared: Shared) -> None:
    batch, group, tile = (lax.axis_index(x) for x in ("batch", "group", "tile"))
    turns = Turns(read_visit(inputs.visits, batch, tile), plan.shape.shared)

    def multiply(thread):
        first = tile * plan.cut.rows + thread * ROWS
        rows = (batch, pl.ds(first, ROWS))
        documents = None
        if plan.documents:
            documents = loaded(inputs.key_documents_BT.at[rows], BY_ROW)
        mine = _Mine(plan, turns, shared, thread, first, documents)
        _multiply(mine, inputs, outputs, (*rows, group))

    by_roles(plan, multiply, lambda: _feed(plan, inputs, shared, turns, (batch, group)))


def _feed(plan: Plan, inputs: Inputs, shared: Shared, turns: Turns, place: tuple) -> None:
    batch, group = place

    @pl.loop(0, turns.count)
    def _tile(turn):
        slot = slot_of(turn, plan.cut.stages)
        among, tile = turns.at(turn)
        head = group * plan.shape.shared + among
        rows = pl.ds(tile * plan.cut.tile, plan.cut.tile)
        free, here = shared.free.at[slot], shared.here.at[slot]
        pl.when(turn >= plan.cut.stages)(lambda: plgpu.barrier_wait(free))
        bring = lambda source, target: plgpu.copy_gmem_to_smem(source, target.at[slot], here)
        bring(inputs.q_BSHD.at[batch, rows, head], shared.q)
        bring(inputs.do_BSHD.at[batch, rows, head], shared.do)
        bring(inputs.lse_BHS.at[batch, head, rows], shared.lse)
        bring(inputs.delta_BHS.at[batch, head, rows], shared.delta)
        if plan.documents:
            bring(inputs.query_documents_BS.at[batch, rows], shared.documents)

    drain(turns.count, plan.cut.stages, shared.free)


class _Mine(NamedTuple):
    """One warpgroup's rows of keys."""

    plan: Plan
    turns: Turns
    shared: Shared
    thread: Any
    first: Any
    documents: Any

    def masked(self, s: Any, turn: Any, slot: Any) -> Any:
        """Return scores, -inf where the query (column) does not see the key (row)."""
        query = numbers(s.shape, 1, self.turns.at(turn)[1] * self.plan.cut.tile)
        same = None
        if self.plan.documents:
            of_queries = loaded(self.shared.documents.at[slot], BY_COLUMN)
            same = across(self.documents, s.shape) == down(of_queries, s.shape)
        key = numbers(s.shape, 0, self.first)
        return jnp.where(seen(self.plan, self.turns.visit, query, key, same), s, -jnp.inf)


def _multiply(mine: _Mine, inputs: Inputs, outputs: tuple, rows: tuple) -> None:
    plan, shared, thread = mine.plan, mine.shared, mine.thread
    here = shared.rows_here.at[thread]
    k, v = shared.k.at[thread], shared.v.at[thread]
    plgpu.copy_gmem_to_smem(inputs.k_BTGD.at[rows], k, here)
    plgpu.copy_gmem_to_smem(inputs.v_BTGD.at[rows], v, here)
    plgpu.barrier_wait(here)
    zeros = filled((ROWS, plan.shape.width), 0.0)
    once = lambda partly: lambda i, x: _step(mine, i, x, partly)
    sums = lax.fori_loop(0, mine.turns.whole, once(False), (zeros, zeros))
    if plan.partly:
        sums = lax.fori_loop(mine.turns.whole, mine.turns.count, once(True), sums)
    write(outputs[0].at[rows], sums[0] * plan.scale, k)
    write(outputs[1].at[rows], sums[1], v)
    plgpu.wait_smem_to_gmem(0)


def _step(mine: _Mine, turn: Any, sums: tuple, partly: bool) -> tuple:
    """Return (dk, dv) after one more tile of queries."""
    plan, shared, thread = mine.plan, mine.shared, mine.thread
    slot = slot_of(turn, plan.cut.stages)
    q, do = shared.q.at[slot], shared.do.at[slot]
    plgpu.barrier_wait(shared.here.at[slot])

    shape, unit = (ROWS, plan.cut.tile), plan.scale * LOG2E
    lse = down(loaded(shared.lse.at[slot], BY_COLUMN) * (-1 / unit), shape)
    delta = down(-loaded(shared.delta.at[slot], BY_COLUMN), shape)
    s, dp = both_added(  # sums begin with what would be subtracted: no registers for it later
        (lse, shared.k.at[thread], q.transpose((1, 0))),
        (delta, shared.v.at[thread], do.transpose((1, 0))),
    )
    if partly:
        s = mine.masked(s, turn, slot)
    p = jnp.exp2(s * unit)
    ds = p * dp
    dk, dv = sums
    half = lambda x: x.astype(plan.dtype)
    dk, dv = both_added((dk, half(ds), q), (dv, half(p), do))
    plgpu.commit_smem()  # numbers per column were read by other means than the next are written
    plgpu.barrier_arrive(shared.free.at[slot])
    return dk, dv
