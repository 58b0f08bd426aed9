"""Tiles of keys and values on their way to the warpgroups that multiply them with queries."""

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
    Visit,
    across,
    by_column,
    by_roles,
    down,
    drain,
    launch,
    numbers,
    read_visit,
    seen,
    slot_of,
)
from hfjax.pallas_kernels.mosaic import Part, Ref, by_row, load
from hfjax.utils.paths import Index


class Keys(NamedTuple):
    """Shared memory for `stages` tiles of keys and values, and who may touch them."""

    k: Any
    v: Any
    documents: Any
    k_here: Any
    v_here: Any
    k_free: Any
    v_free: Any


def shared_keys(plan: Plan) -> Keys:
    """Return what a block of threads allocates."""
    cut, width = plan.cut, plan.shape.width
    tiles = plgpu.SMEM(
        (cut.stages, cut.tile, width), plan.dtype, transforms=mosaic.tiled(plan.dtype)
    )
    documents = plgpu.SMEM((cut.stages, cut.tile), jnp.int32) if plan.documents else None
    k_here = plgpu.Barrier(num_arrivals=1 + plan.documents, num_barriers=cut.stages)
    v_here = plgpu.Barrier(num_barriers=cut.stages)
    free = plgpu.Barrier(num_arrivals=cut.consumers, num_barriers=cut.stages)
    return Keys(tiles, tiles, documents, k_here, v_here, free, free)


def shared_rows(plan: Plan) -> Any:
    """Return shared memory for every warpgroup's own rows."""
    shape = (plan.cut.consumers, ROWS, plan.shape.width)
    return plgpu.SMEM(shape, plan.dtype, transforms=mosaic.tiled(plan.dtype))


def feed_keys(plan: Plan, inputs: Any, keys: Keys, visit: Visit, place: tuple[Any, Any]) -> None:
    """Bring the tiles of a visit; `place` is (batch, head of keys)."""
    batch, group = place

    @pl.loop(0, visit.steps)
    def _tile(step: jax.Array) -> None:
        slot = slot_of(step, plan.cut.stages)
        rows = pl.ds(visit.tile(step) * plan.cut.tile, plan.cut.tile)
        again = step >= plan.cut.stages
        pl.when(again)(lambda: plgpu.barrier_wait(keys.k_free.at[slot]))
        here = keys.k_here.at[slot]
        plgpu.copy_gmem_to_smem(inputs.k.at[batch, rows, group], keys.k.at[slot], here)
        if plan.documents:
            documents = inputs.key_documents.at[batch, rows]
            plgpu.copy_gmem_to_smem(documents, keys.documents.at[slot], here)
        pl.when(again)(lambda: plgpu.barrier_wait(keys.v_free.at[slot]))
        here = keys.v_here.at[slot]
        plgpu.copy_gmem_to_smem(inputs.v.at[batch, rows, group], keys.v.at[slot], here)

    drain(visit.steps, plan.cut.stages, keys.k_free, keys.v_free)


def documents_of(plan: Plan, documents_BS: Ref, batch: Index, first: Index) -> jax.Array | None:
    """Return the documents of a warpgroup's rows, in registers, where there are any."""
    if not plan.documents:
        return None
    return load(documents_BS.at[batch, pl.ds(first, ROWS)], by_row())


def same_document(
    documents: jax.Array | None, others: Ref, slot: Callable, shape: tuple[int, ...]
) -> jax.Array | None:
    """Return which rows lie in the same document as which of the others, those in a slot."""
    if documents is None:
        return None
    columns = load(others.at[slot()], by_column())
    return across(documents, shape) == down(columns, shape)


class Rows(NamedTuple):
    """One warpgroup's rows of queries, and what they visit."""

    plan: Plan
    visit: Visit
    thread: Any
    first: Any  # row's number
    batch: Any
    head: Any
    documents: Any  # of the rows, in registers

    def of(self, x_BSHD: Ref) -> Part:
        """Return these rows of an operand."""
        return x_BSHD.at[self.batch, pl.ds(self.first, ROWS), self.head]

    def per_row(self, x_BHS: Ref) -> Part:
        """Return these rows of an operand with one number per row."""
        return x_BHS.at[self.batch, self.head, pl.ds(self.first, ROWS)]

    def masked(self, s: jax.Array, step: Index, keys: Keys) -> jax.Array:
        """Return scores, -inf where the query does not see the key."""
        key = numbers(s.shape, 1, self.visit.part(step) * self.plan.cut.tile)
        slot = lambda: slot_of(step, self.plan.cut.stages)
        same = same_document(self.documents, keys.documents, slot, s.shape)
        query = numbers(s.shape, 0, self.first)
        return jnp.where(seen(self.plan, self.visit, query, key, same), s, -jnp.inf)

    def visited(self, step: Callable, state: Any) -> Any:
        """Return the state after all tiles: `step(number, state, seen in part)`, whole ones first.

        Only tiles seen in part are masked.
        """
        once = lambda partly: lambda i, x: step(i, x, partly)
        state = lax.fori_loop(0, self.visit.whole, once(False), state)
        if self.plan.partly:
            state = lax.fori_loop(self.visit.whole, self.visit.steps, once(True), state)
        return state


def launch_over_queries(
    plan: Plan, name: str, multiply: Callable, inputs: Any, outputs: tuple, scratch: Any
) -> Any:
    """Run `multiply(rows, inputs, outputs, scratch)` on each consumer's rows of queries, fed."""
    shape = plan.shape
    grid = {"batch": shape.batch, "head": shape.heads, "tile": inputs.visits.shape[1]}

    def body(inputs: Any, outputs: tuple, shared: Any) -> None:
        batch, head, tile = (lax.axis_index(x) for x in ("batch", "head", "tile"))
        if plan.mask.causal:  # the longest first: what is left at the end is short
            tile = inputs.visits.shape[1] - 1 - tile
        visit = read_visit(inputs.visits, batch, tile)

        def consume(thread: jax.Array) -> None:
            first = tile * plan.cut.rows + thread * ROWS
            documents = documents_of(plan, inputs.query_documents, batch, first)
            rows = Rows(plan, visit, thread, first, batch, head, documents)
            multiply(rows, inputs, outputs, shared)

        group = lax.div(head, jnp.int32(shape.shared))
        feed = lambda: feed_keys(plan, inputs, shared.keys, visit, (batch, group))
        by_roles(plan, consume, feed)

    return launch(plan, name, body, grid, inputs, outputs, scratch)
