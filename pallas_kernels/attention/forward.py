"""The forward kernel of attention, after FlashAttention-3 on Hopper (Shah et al., 2024).

A thread block has 64 rows of queries per warpgroup and visits the tiles of keys that they see,
fully visible ones first. With two warpgroups one multiplies while the other computes exponentials.
Shapes as in `common`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from hfjax.pallas_kernels import plgpu
from hfjax.pallas_kernels.attention.common import (
    LN2,
    LOG2E,
    ROWS,
    Plan,
    accumulator,
    constant,
    matmul_add,
    matrix_layout,
    opaque_index,
    rows_to_matrix,
    slot_index,
    write_tile,
)
from hfjax.pallas_kernels.attention.keys import (
    KeyBuffers,
    QueryRows,
    key_buffers,
    launch_over_queries,
    row_buffers,
)
from hfjax.pallas_kernels.mosaic import RefSlice, load, row_layout
from hfjax.utils.paths import Index

FLOOR = -1e30  # a maximum below every score: exponentials of masked scores are then plain zeros


class Inputs(NamedTuple):
    """Operands in device memory; o, m and l only for later blocks, documents only if given."""

    q: Any
    k: Any
    v: Any
    visits: Any
    query_documents: Any = None
    key_documents: Any = None
    o: Any = None
    m: Any = None
    l: Any = None


class SharedMemory(NamedTuple):
    """Shared memory and barriers of one thread block."""

    keys: KeyBuffers
    q: Any
    q_ready: Any
    pingpong: Any


def run(plan: Plan, inputs: Inputs, outputs: tuple) -> tuple[jax.Array, ...]:
    """Return (out, lse) or, if three outputs are requested, the new state (o, m, l)."""
    q_ready = plgpu.Barrier(num_barriers=plan.tiling.consumers)
    pingpong = plgpu.Barrier(num_arrivals=plan.tiling.consumers)
    scratch = SharedMemory(key_buffers(plan), row_buffers(plan), q_ready, pingpong)
    return launch_over_queries(plan, "flash_forward", _multiply, inputs, outputs, scratch)


def _multiply(rows: QueryRows, inputs: Inputs, outputs: tuple, smem: SharedMemory) -> None:
    thread = rows.thread
    ready = smem.q_ready.at[thread]
    plgpu.copy_gmem_to_smem(rows.take(inputs.q), smem.q.at[thread], ready)
    state = _initial_state(rows, inputs)
    plgpu.barrier_wait(ready)
    is_pingpong = rows.plan.tiling.consumers == 2
    if is_pingpong:  # the second warpgroup runs half a step behind
        pl.when(thread == 1)(lambda: _swap_warpgroups(smem))
    state = rows.fold_tiles(partial(_step, rows, smem), state)
    if is_pingpong:
        pl.when(thread == 0)(lambda: _swap_warpgroups(smem))
    if len(outputs) == 3:
        _write_state(rows, outputs, *state)
    else:
        _write_attention(rows, outputs, smem.q.at[thread], state)


def _initial_state(rows: QueryRows, inputs: Inputs) -> tuple:
    """Return (o, m, l) before the first key: m is in base 2."""
    if inputs.o is None:
        o = constant((ROWS, rows.plan.shape.width), 0.0)
        return o, constant((ROWS,), FLOOR, row_layout()), constant((ROWS,), 0.0, row_layout())
    o = load(rows.take(inputs.o), matrix_layout())
    m, l = (load(rows.take_stats(x), row_layout()) for x in (inputs.m, inputs.l))
    return o, jnp.maximum(m * LOG2E, FLOOR), l


def _swap_warpgroups(smem: SharedMemory) -> None:
    plgpu.barrier_arrive(smem.pingpong)
    plgpu.barrier_wait(smem.pingpong)


def _scores(rows: QueryRows, smem: SharedMemory, slot: Index) -> jax.Array:
    """Return q @ k.T; the other warpgroup continues as soon as this matmul is issued."""

    def multiply(s_ref: Any) -> jax.Array:
        plgpu.wgmma(
            s_ref, smem.q.at[opaque_index(rows.thread)], smem.keys.k.at[slot].transpose((1, 0))
        )
        if rows.plan.tiling.consumers == 2:
            _swap_warpgroups(smem)
        return s_ref[...]

    return pl.run_scoped(multiply, accumulator((ROWS, rows.plan.tiling.tile)))


def _step(
    rows: QueryRows, smem: SharedMemory, step: Index, state: tuple, is_partial: bool
) -> tuple:
    """Return (o, m, l) after one more tile of keys."""
    plan, keys = rows.plan, smem.keys
    is_pingpong = plan.tiling.consumers == 2
    (o, m, l), slot = state, slot_index(step, plan.tiling.stages)
    plgpu.barrier_wait(keys.k_ready.at[slot])
    s = _scores(rows, smem, slot)
    if is_partial:
        s = rows.mask_scores(s, step, keys)
        if plan.documents:  # the next copy writes through another proxy
            plgpu.commit_smem()
    plgpu.barrier_arrive(keys.k_free.at[slot])
    unit = plan.scale * LOG2E
    new_max = jnp.maximum(m, s.max(axis=1) * unit)
    rescale = jnp.exp2(m - new_max)
    p = jnp.exp2(s * unit - rows_to_matrix(new_max, s.shape))
    o, l = o * rows_to_matrix(rescale, o.shape), l * rescale + p.sum(axis=1)
    weights = p.astype(plan.dtype)
    o, new_max, l, weights = lax.optimization_barrier((o, new_max, l, weights))
    if is_pingpong:
        plgpu.barrier_arrive(smem.pingpong)
    plgpu.barrier_wait(keys.v_ready.at[slot])
    if is_pingpong:
        plgpu.barrier_wait(smem.pingpong)
    o = matmul_add(o, weights, keys.v.at[slot])
    plgpu.barrier_arrive(keys.v_free.at[slot])
    return o, new_max, l


def _write_state(rows: QueryRows, outputs: tuple, o: jax.Array, m: Index, l: jax.Array) -> None:
    rows.take(outputs[0])[...] = o
    rows.take_stats(outputs[1])[...] = jnp.where(m > FLOOR, m * LN2, -jnp.inf)
    rows.take_stats(outputs[2])[...] = l


def _write_attention(rows: QueryRows, outputs: tuple, smem: RefSlice, state: tuple) -> None:
    """Write the attention and its lse: 0 and -inf for rows that see nothing."""
    o, m, l = state
    sees_any = l > 0.0
    lse = jnp.where(sees_any, m * LN2 + jnp.log(l), -jnp.inf)
    rows.take_stats(outputs[1])[...] = lse
    inverse = jnp.where(sees_any, 1.0 / l, 0.0)
    write_tile(rows.take(outputs[0]), o * rows_to_matrix(inverse, o.shape), smem)
    plgpu.wait_smem_to_gmem(0)
