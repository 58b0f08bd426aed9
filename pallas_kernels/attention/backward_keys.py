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
from jax.typing import DTypeLike

from hfjax.pallas_kernels import mosaic, plgpu
from hfjax.pallas_kernels.attention.backward import Inputs
from hfjax.pallas_kernels.attention.common import (
    LOG2E,
    ROWS,
    Plan,
    Visit,
    again,
    both_added,
    by_column,
    by_roles,
    down,
    drain,
    filled,
    launch,
    numbers,
    read_visit,
    seen,
    slot_of,
    write,
)
from hfjax.pallas_kernels.attention.keys import (
    documents_of,
    same_document,
    shared_rows,
)
from hfjax.pallas_kernels.mosaic import load
from hfjax.utils.paths import Index


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


def keys(plan: Plan, inputs: Inputs, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return (dk, dv)."""
    shape = plan.shape
    grid = {"batch": shape.batch, "group": shape.groups, "tile": inputs.visits.shape[1]}
    outputs = (jax.ShapeDtypeStruct(inputs.k.shape, dtype),) * 2

    def body(inputs: Inputs, outputs: tuple, shared: Shared) -> None:
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
    visit = read_visit(inputs.visits, batch, tile)

    def multiply(thread: jax.Array) -> None:
        first = tile * plan.cut.rows + thread * ROWS
        documents = documents_of(plan, inputs.key_documents, batch, first)
        mine = _Mine(plan, visit, shared, thread, first, documents)
        _multiply(mine, inputs, outputs, (batch, pl.ds(first, ROWS), group))

    by_roles(plan, multiply, lambda: _feed(plan, inputs, shared, visit, (batch, group)))


def _feed(plan: Plan, inputs: Inputs, shared: Shared, visit: Visit, place: tuple) -> None:
    """Bring the tiles of a visit, head after head of those that share these keys."""
    batch, group = place
    count, stages, heads = visit.steps, plan.cut.stages, plan.shape.shared

    @pl.loop(0, heads)
    def _head(among: jax.Array) -> None:
        @pl.loop(0, count)
        def _tile(step: jax.Array) -> None:
            turn = among * count + step
            slot, head = slot_of(turn, stages), group * heads + among
            rows = pl.ds(visit.tile(step) * plan.cut.tile, plan.cut.tile)
            free, here = shared.free.at[slot], shared.here.at[slot]
            pl.when(turn >= stages)(lambda: plgpu.barrier_wait(free))
            bring = lambda source, target: plgpu.copy_gmem_to_smem(source, target.at[slot], here)
            bring(inputs.q.at[batch, rows, head], shared.q)
            bring(inputs.do.at[batch, rows, head], shared.do)
            bring(inputs.lse.at[batch, head, rows], shared.lse)
            bring(inputs.delta.at[batch, head, rows], shared.delta)
            if plan.documents:
                bring(inputs.query_documents.at[batch, rows], shared.documents)

    drain(count * heads, stages, shared.free)


class _Mine(NamedTuple):
    """One warpgroup's rows of keys, and what visits them."""

    plan: Plan
    visit: Visit
    shared: Shared
    thread: Any
    first: Any
    documents: Any

    def masked(self, s: jax.Array, step: Index, slot: Index) -> jax.Array:
        """Return what scores begin with, -inf where the query (column) does not see the key."""
        query = numbers(s.shape, 1, self.visit.part(step) * self.plan.cut.tile)
        same = same_document(self.documents, self.shared.documents, lambda: slot, s.shape)
        key = numbers(s.shape, 0, self.first)
        return jnp.where(seen(self.plan, self.visit, query, key, same), s, -jnp.inf)

    def visited(self, sums: tuple) -> tuple:
        """Return (dk, dv) after all heads' tiles; only those seen in part are masked."""
        whole, count = self.visit.whole, self.visit.steps

        def head(among: Index, sums: tuple) -> tuple:
            once = lambda partly: lambda i, x: _step(self, (among * count + i, i), x, partly)
            sums = lax.fori_loop(0, whole, once(False), sums)
            return lax.fori_loop(whole, count, once(True), sums) if self.plan.partly else sums

        heads = self.plan.shape.shared
        return head(0, sums) if heads == 1 else lax.fori_loop(0, heads, head, sums)


def _multiply(mine: _Mine, inputs: Inputs, outputs: tuple, rows: tuple) -> None:
    plan, shared, thread = mine.plan, mine.shared, mine.thread
    here = shared.rows_here.at[thread]
    k, v = shared.k.at[thread], shared.v.at[thread]
    plgpu.copy_gmem_to_smem(inputs.k.at[rows], k, here)
    plgpu.copy_gmem_to_smem(inputs.v.at[rows], v, here)
    plgpu.barrier_wait(here)
    zeros = filled((ROWS, plan.shape.width), 0.0)
    dk, dv = mine.visited((zeros, zeros))
    write(outputs[0].at[rows], dk * plan.scale, k)
    write(outputs[1].at[rows], dv, v)
    plgpu.wait_smem_to_gmem(0)


def _step(mine: _Mine, turn: tuple[Any, Any], sums: tuple, partly: bool) -> tuple:
    """Return (dk, dv) after one more tile of queries; a turn counts all, and this head's."""
    plan, shared, thread = mine.plan, mine.shared, again(mine.thread)
    slot = slot_of(turn[0], plan.cut.stages)
    q, do = shared.q.at[slot], shared.do.at[slot]
    plgpu.barrier_wait(shared.here.at[slot])
    shape, unit = (ROWS, plan.cut.tile), plan.scale * LOG2E
    lse = down(load(shared.lse.at[slot], by_column()) * (-1 / unit), shape)
    if partly:
        lse = mine.masked(lse, turn[1], slot)
    delta = down(-load(shared.delta.at[slot], by_column()), shape)
    s, dp = both_added(  # sums begin with what would be subtracted: no registers for it later
        (lse, shared.k.at[thread], q.transpose((1, 0))),
        (delta, shared.v.at[thread], do.transpose((1, 0))),
    )
    p = jnp.exp2(s * unit)
    ds = p * dp
    dk, dv = sums
    half = lambda x: x.astype(plan.dtype)
    dk, dv = both_added((dk, half(ds), q), (dv, half(p), do))
    plgpu.commit_smem()  # numbers per column were read by other means than the next are written
    plgpu.barrier_arrive(shared.free.at[slot])
    return dk, dv
