"""Copy tiles of keys and values to the warpgroups that multiply them with queries."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from hfjax.pallas_kernels import mosaic, plgpu
from hfjax.pallas_kernels.attention.common import (
    ROWS,
    Plan,
    TileVisits,
    column_layout,
    columns_to_matrix,
    drain,
    indices,
    launch,
    read_visits,
    rows_to_matrix,
    run_roles,
    slot_index,
    visible_mask,
)
from hfjax.pallas_kernels.mosaic import Ref, RefSlice, load, row_layout
from hfjax.utils.paths import Index


class KeyBuffers(NamedTuple):
    """Shared memory for `stages` tiles of keys and values, and their barriers."""

    k: Any
    v: Any
    documents: Any
    k_ready: Any
    v_ready: Any
    k_free: Any
    v_free: Any


def key_buffers(plan: Plan) -> KeyBuffers:
    """Return the allocations of a thread block."""
    tiling, width = plan.tiling, plan.shape.width
    tiles = plgpu.SMEM(
        (tiling.stages, tiling.tile, width),
        plan.dtype,
        transforms=mosaic.tile_transforms(plan.dtype),
    )
    documents = plgpu.SMEM((tiling.stages, tiling.tile), jnp.int32) if plan.documents else None
    k_ready = plgpu.Barrier(num_arrivals=1 + plan.documents, num_barriers=tiling.stages)
    v_ready = plgpu.Barrier(num_barriers=tiling.stages)
    free = plgpu.Barrier(num_arrivals=tiling.consumers, num_barriers=tiling.stages)
    return KeyBuffers(tiles, tiles, documents, k_ready, v_ready, free, free)


def row_buffers(plan: Plan) -> Any:
    """Return shared memory for each warpgroup's own rows."""
    shape = (plan.tiling.consumers, ROWS, plan.shape.width)
    return plgpu.SMEM(shape, plan.dtype, transforms=mosaic.tile_transforms(plan.dtype))


def feed_keys(
    plan: Plan, inputs: Any, keys: KeyBuffers, visits: TileVisits, coords: tuple[Any, Any]
) -> None:
    """Copy the tiles of a visit; `coords` is (batch, key head)."""
    batch, group = coords

    @pl.loop(0, visits.steps)
    def _tile(step: jax.Array) -> None:
        slot = slot_index(step, plan.tiling.stages)
        rows = pl.ds(visits.tile(step) * plan.tiling.tile, plan.tiling.tile)
        is_reused = step >= plan.tiling.stages
        pl.when(is_reused)(lambda: plgpu.barrier_wait(keys.k_free.at[slot]))
        ready = keys.k_ready.at[slot]
        plgpu.copy_gmem_to_smem(inputs.k.at[batch, rows, group], keys.k.at[slot], ready)
        if plan.documents:
            documents = inputs.key_documents.at[batch, rows]
            plgpu.copy_gmem_to_smem(documents, keys.documents.at[slot], ready)
        pl.when(is_reused)(lambda: plgpu.barrier_wait(keys.v_free.at[slot]))
        ready = keys.v_ready.at[slot]
        plgpu.copy_gmem_to_smem(inputs.v.at[batch, rows, group], keys.v.at[slot], ready)

    drain(visits.steps, plan.tiling.stages, keys.k_free, keys.v_free)


def load_documents(plan: Plan, documents_BS: Ref, batch: Index, first: Index) -> jax.Array | None:
    """Return the documents of a warpgroup's rows, in registers, or None."""
    if not plan.documents:
        return None
    return load(documents_BS.at[batch, pl.ds(first, ROWS)], row_layout())


def same_document(
    documents: jax.Array | None, others: Ref, slot: Callable, shape: tuple[int, ...]
) -> jax.Array | None:
    """Return which rows share a document with which of the others, those in a slot."""
    if documents is None:
        return None
    columns = load(others.at[slot()], column_layout())
    return rows_to_matrix(documents, shape) == columns_to_matrix(columns, shape)


class QueryRows(NamedTuple):
    """One warpgroup's rows of queries, and their visits."""

    plan: Plan
    visits: TileVisits
    thread: Any
    first: Any  # number of the first row
    batch: Any
    head: Any
    documents: Any  # of the rows, in registers

    def take(self, x_BSHD: Ref) -> RefSlice:
        """Return these rows of an operand."""
        return x_BSHD.at[self.batch, pl.ds(self.first, ROWS), self.head]

    def take_stats(self, x_BHS: Ref) -> RefSlice:
        """Return these rows of an operand with one number per row."""
        return x_BHS.at[self.batch, self.head, pl.ds(self.first, ROWS)]

    def mask_scores(self, s: jax.Array, step: Index, keys: KeyBuffers) -> jax.Array:
        """Return scores, -inf where the query does not see the key."""
        key = indices(s.shape, 1, self.visits.partial_tile(step) * self.plan.tiling.tile)
        slot = lambda: slot_index(step, self.plan.tiling.stages)
        same = same_document(self.documents, keys.documents, slot, s.shape)
        query = indices(s.shape, 0, self.first)
        return jnp.where(visible_mask(self.plan, self.visits, query, key, same), s, -jnp.inf)

    def fold_tiles(self, step: Callable, state: Any) -> Any:
        """Return the state after `step(number, state, is_partial)` for all tiles, full ones first.

        Only partially visible tiles are masked.
        """
        tile_step = lambda is_partial: lambda i, x: step(i, x, is_partial)
        state = lax.fori_loop(0, self.visits.num_full, tile_step(False), state)
        if self.plan.has_partial_tiles:
            state = lax.fori_loop(self.visits.num_full, self.visits.steps, tile_step(True), state)
        return state


def launch_over_queries(
    plan: Plan, name: str, multiply: Callable, inputs: Any, outputs: tuple, scratch: Any
) -> Any:
    """Run `multiply(rows, inputs, outputs, scratch)` on each consumer's queries, and feed keys."""
    shape = plan.shape
    grid = {"batch": shape.batch, "head": shape.heads, "tile": inputs.visits.shape[1]}

    def body(inputs: Any, outputs: tuple, smem: Any) -> None:
        batch, head, tile = (lax.axis_index(x) for x in ("batch", "head", "tile"))
        if plan.mask.causal:  # the longest first, so that the tail is short
            tile = inputs.visits.shape[1] - 1 - tile
        visits = read_visits(inputs.visits, batch, tile)

        def consume(thread: jax.Array) -> None:
            first = tile * plan.tiling.rows + thread * ROWS
            documents = load_documents(plan, inputs.query_documents, batch, first)
            query_rows = QueryRows(plan, visits, thread, first, batch, head, documents)
            multiply(query_rows, inputs, outputs, smem)

        group = lax.div(head, jnp.int32(shape.group_size))
        feed = lambda: feed_keys(plan, inputs, smem.keys, visits, (batch, group))
        run_roles(plan, consume, feed)

    return launch(plan, name, body, grid, inputs, outputs, scratch)
