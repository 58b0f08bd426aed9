"""The backward kernels of attention: one computes dq, the other dk and dv, without atomics.

Weights are recomputed from the final lse, so a block of keys needs nothing of other blocks. Each
kernel recomputes its own: 7 matmuls a tile where 5 would do with sums in device memory, and the
same bits every time. Shapes as in `common`.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from hfjax.pallas_kernels import plgpu
from hfjax.pallas_kernels.attention.common import (
    LOG2E,
    ROWS,
    Plan,
    accumulator,
    constant,
    matmul_add,
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
from hfjax.pallas_kernels.mosaic import load, row_layout
from hfjax.utils.paths import Index


class Inputs(NamedTuple):
    """Operands in device memory. lse is in base 2; +inf for rows that see nothing."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    visits: Any
    query_documents: Any = None
    key_documents: Any = None


class SharedMemory(NamedTuple):
    """Shared memory and barriers of one thread block of the dq kernel."""

    keys: KeyBuffers
    q: Any
    do: Any
    rows_ready: Any


def query_gradient(plan: Plan, inputs: Inputs, dtype: DTypeLike) -> jax.Array:
    """Return dq."""
    buffers = row_buffers(plan)
    rows_ready = plgpu.Barrier(num_arrivals=2, num_barriers=plan.tiling.consumers)
    scratch = SharedMemory(key_buffers(plan), buffers, buffers, rows_ready)
    dq = (jax.ShapeDtypeStruct(inputs.q.shape, dtype),)
    return launch_over_queries(plan, "flash_backward_queries", _multiply, inputs, dq, scratch)[0]


def _multiply(rows: QueryRows, inputs: Inputs, outputs: tuple, smem: SharedMemory) -> None:
    thread = rows.thread
    ready = smem.rows_ready.at[thread]
    plgpu.copy_gmem_to_smem(rows.take(inputs.q), smem.q.at[thread], ready)
    plgpu.copy_gmem_to_smem(rows.take(inputs.do), smem.do.at[thread], ready)
    lse, delta = (load(rows.take_stats(x), row_layout()) for x in (inputs.lse, inputs.delta))
    plgpu.barrier_wait(ready)
    step = partial(_step, rows, smem, (lse, delta))
    dq = rows.fold_tiles(step, constant((ROWS, rows.plan.shape.width), 0.0))
    write_tile(rows.take(outputs[0]), dq * rows.plan.scale, smem.q.at[thread])
    plgpu.wait_smem_to_gmem(0)


def _step(
    rows: QueryRows,
    smem: SharedMemory,
    row_stats: tuple[Any, Any],
    step: Index,
    dq: jax.Array,
    is_partial: bool,
) -> jax.Array:
    """Return dq after one more tile of keys."""
    plan, keys, thread = rows.plan, smem.keys, rows.thread
    slot = slot_index(step, plan.tiling.stages)
    k, v = keys.k.at[slot], keys.v.at[slot]
    plgpu.barrier_wait(keys.k_ready.at[slot])
    plgpu.barrier_wait(keys.v_ready.at[slot])

    def multiply(s_ref: Any, dp_ref: Any) -> tuple[jax.Array, jax.Array]:
        plgpu.wgmma(s_ref, smem.q.at[thread], k.transpose((1, 0)))
        plgpu.wgmma(dp_ref, smem.do.at[thread], v.transpose((1, 0)))
        return s_ref[...], dp_ref[...]

    tile = accumulator((ROWS, plan.tiling.tile))
    s, dp = pl.run_scoped(multiply, tile, tile)
    plgpu.barrier_arrive(keys.v_free.at[slot])
    if is_partial:
        s = rows.mask_scores(s, step, keys)
        if plan.documents:  # the next copy writes through another proxy
            plgpu.commit_smem()
    lse, delta = (rows_to_matrix(x, s.shape) for x in row_stats)
    ds = jnp.exp2(s * (plan.scale * LOG2E) - lse) * (dp - delta)
    dq = matmul_add(dq, ds.astype(plan.dtype), k)
    plgpu.barrier_arrive(keys.k_free.at[slot])
    return dq
