"""The backward kernel of attention for dk and dv: see `backward`.

A thread block has 64 rows of keys and values per warpgroup and is visited by the tiles of queries
that see them, of every head that shares these keys. Everything is transposed: rows are keys,
columns are queries. Shapes as in `common`.
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
    TileVisits,
    column_layout,
    columns_to_matrix,
    constant,
    drain,
    indices,
    launch,
    matmul_add_all,
    opaque_index,
    read_visits,
    run_roles,
    slot_index,
    visible_mask,
    write_tile,
)
from hfjax.pallas_kernels.attention.keys import (
    load_documents,
    row_buffers,
    same_document,
)
from hfjax.pallas_kernels.mosaic import load
from hfjax.utils.paths import Index


class SharedMemory(NamedTuple):
    """Shared memory and barriers of one thread block: its own rows, then visiting tiles."""

    k: Any
    v: Any
    rows_ready: Any
    q: Any
    do: Any
    lse: Any
    delta: Any
    documents: Any
    ready: Any
    free: Any


def key_gradients(plan: Plan, inputs: Inputs, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return (dk, dv)."""
    shape = plan.shape
    grid = {"batch": shape.batch, "group": shape.groups, "tile": inputs.visits.shape[1]}
    outputs = (jax.ShapeDtypeStruct(inputs.k.shape, dtype),) * 2

    def body(inputs: Inputs, outputs: tuple, smem: SharedMemory) -> None:
        _body(plan, inputs, outputs, smem)

    scratch = _shared_memory(plan)
    dk, dv = launch(plan, "flash_backward_keys", body, grid, inputs, outputs, scratch)
    return dk, dv


def _shared_memory(plan: Plan) -> SharedMemory:
    tiling, width = plan.tiling, plan.shape.width
    tiles = plgpu.SMEM(
        (tiling.stages, tiling.tile, width),
        plan.dtype,
        transforms=mosaic.tile_transforms(plan.dtype),
    )
    numbers = plgpu.SMEM((tiling.stages, tiling.tile), jnp.float32)
    documents = plgpu.SMEM((tiling.stages, tiling.tile), jnp.int32) if plan.documents else None
    buffers, rows_ready = (
        row_buffers(plan),
        plgpu.Barrier(num_arrivals=2, num_barriers=tiling.consumers),
    )
    ready = plgpu.Barrier(num_arrivals=4 + plan.documents, num_barriers=tiling.stages)
    free = plgpu.Barrier(num_arrivals=tiling.consumers, num_barriers=tiling.stages)
    return SharedMemory(
        buffers, buffers, rows_ready, tiles, tiles, numbers, numbers, documents, ready, free
    )


def _body(plan: Plan, inputs: Inputs, outputs: tuple, smem: SharedMemory) -> None:
    batch, group, tile = (lax.axis_index(x) for x in ("batch", "group", "tile"))
    visits = read_visits(inputs.visits, batch, tile)

    def multiply(thread: jax.Array) -> None:
        first = tile * plan.tiling.rows + thread * ROWS
        documents = load_documents(plan, inputs.key_documents, batch, first)
        key_rows = _KeyRows(plan, visits, smem, thread, first, documents)
        _multiply(key_rows, inputs, outputs, (batch, pl.ds(first, ROWS), group))

    run_roles(plan, multiply, lambda: _copy_tiles(plan, inputs, smem, visits, (batch, group)))


def _copy_tiles(
    plan: Plan, inputs: Inputs, smem: SharedMemory, visits: TileVisits, coords: tuple
) -> None:
    """Copy the visiting tiles, for each head that shares these keys."""
    batch, group = coords
    count, stages, heads = visits.steps, plan.tiling.stages, plan.shape.group_size

    @pl.loop(0, heads)
    def _head(head_in_group: jax.Array) -> None:
        @pl.loop(0, count)
        def _tile(step: jax.Array) -> None:
            index = head_in_group * count + step
            slot, head = slot_index(index, stages), group * heads + head_in_group
            rows = pl.ds(visits.tile(step) * plan.tiling.tile, plan.tiling.tile)
            free, ready = smem.free.at[slot], smem.ready.at[slot]
            pl.when(index >= stages)(lambda: plgpu.barrier_wait(free))
            copy = lambda source, target: plgpu.copy_gmem_to_smem(source, target.at[slot], ready)
            copy(inputs.q.at[batch, rows, head], smem.q)
            copy(inputs.do.at[batch, rows, head], smem.do)
            copy(inputs.lse.at[batch, head, rows], smem.lse)
            copy(inputs.delta.at[batch, head, rows], smem.delta)
            if plan.documents:
                copy(inputs.query_documents.at[batch, rows], smem.documents)

    drain(count * heads, stages, smem.free)


class _KeyRows(NamedTuple):
    """One warpgroup's rows of keys, and their visits."""

    plan: Plan
    visits: TileVisits
    smem: SharedMemory
    thread: Any
    first: Any
    documents: Any

    def mask_scores(self, s: jax.Array, step: Index, slot: Index) -> jax.Array:
        """Return initial scores, -inf where the query (column) does not see the key."""
        query = indices(s.shape, 1, self.visits.partial_tile(step) * self.plan.tiling.tile)
        same = same_document(self.documents, self.smem.documents, lambda: slot, s.shape)
        key = indices(s.shape, 0, self.first)
        return jnp.where(visible_mask(self.plan, self.visits, query, key, same), s, -jnp.inf)

    def fold_tiles(self, sums: tuple) -> tuple:
        """Return (dk, dv) after all heads' tiles; only partially visible ones are masked."""
        num_full, count = self.visits.num_full, self.visits.steps

        def head(head_in_group: Index, sums: tuple) -> tuple:
            tile_step = lambda is_partial: (
                lambda i, x: _step(self, (head_in_group * count + i, i), x, is_partial)
            )
            sums = lax.fori_loop(0, num_full, tile_step(False), sums)
            return (
                lax.fori_loop(num_full, count, tile_step(True), sums)
                if self.plan.has_partial_tiles
                else sums
            )

        heads = self.plan.shape.group_size
        return head(0, sums) if heads == 1 else lax.fori_loop(0, heads, head, sums)


def _multiply(key_rows: _KeyRows, inputs: Inputs, outputs: tuple, index: tuple) -> None:
    plan, smem, thread = key_rows.plan, key_rows.smem, key_rows.thread
    ready = smem.rows_ready.at[thread]
    k, v = smem.k.at[thread], smem.v.at[thread]
    plgpu.copy_gmem_to_smem(inputs.k.at[index], k, ready)
    plgpu.copy_gmem_to_smem(inputs.v.at[index], v, ready)
    plgpu.barrier_wait(ready)
    zeros = constant((ROWS, plan.shape.width), 0.0)
    dk, dv = key_rows.fold_tiles((zeros, zeros))
    write_tile(outputs[0].at[index], dk * plan.scale, k)
    write_tile(outputs[1].at[index], dv, v)
    plgpu.wait_smem_to_gmem(0)


def _step(key_rows: _KeyRows, steps: tuple[Any, Any], sums: tuple, is_partial: bool) -> tuple:
    """Return (dk, dv) after one more tile of queries; `steps`: over all heads, in this head."""
    plan, smem, thread = key_rows.plan, key_rows.smem, opaque_index(key_rows.thread)
    slot = slot_index(steps[0], plan.tiling.stages)
    q, do = smem.q.at[slot], smem.do.at[slot]
    plgpu.barrier_wait(smem.ready.at[slot])
    shape, unit = (ROWS, plan.tiling.tile), plan.scale * LOG2E
    lse = columns_to_matrix(load(smem.lse.at[slot], column_layout()) * (-1 / unit), shape)
    if is_partial:
        lse = key_rows.mask_scores(lse, steps[1], slot)
    delta = columns_to_matrix(-load(smem.delta.at[slot], column_layout()), shape)
    s, dp = matmul_add_all(  # accumulators start with the subtrahend: it needs no registers later
        (lse, smem.k.at[thread], q.transpose((1, 0))),
        (delta, smem.v.at[thread], do.transpose((1, 0))),
    )
    p = jnp.exp2(s * unit)
    ds = p * dp
    dk, dv = sums
    narrow = lambda x: x.astype(plan.dtype)
    dk, dv = matmul_add_all((dk, narrow(ds), q), (dv, narrow(p), do))
    plgpu.commit_smem()  # the next copy of per-column numbers writes through another proxy
    plgpu.barrier_arrive(smem.free.at[slot])
    return dk, dv
