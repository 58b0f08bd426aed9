"""The backward kernels of attention: one makes dq, the other dk and dv, neither with atomics.

Weights are made again from the final lse, so a block of keys needs nothing of other blocks. Each
kernel makes its own: 7 products a tile where 5 would do with sums in device memory, and the same
bits every time. Shapes as in `flash_parts`.
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
    across,
    added,
    filled,
    slot_of,
    sums,
    write,
)
from hfjax.pallas_kernels.attention.keys import (
    Keys,
    Rows,
    launch_over_queries,
    shared_keys,
    shared_rows,
)
from hfjax.pallas_kernels.mosaic import by_row, load
from hfjax.utils.paths import Index


class Inputs(NamedTuple):
    """Operands in device memory. lse in powers of two; +inf for rows that see nothing."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    visits: Any
    query_documents: Any = None
    key_documents: Any = None


class Shared(NamedTuple):
    """Shared memory and barriers of one block of threads of the kernel that makes dq."""

    keys: Keys
    q: Any
    do: Any
    rows_here: Any


def queries(plan: Plan, inputs: Inputs, dtype: DTypeLike) -> jax.Array:
    """Return dq."""
    rows = shared_rows(plan)
    rows_here = plgpu.Barrier(num_arrivals=2, num_barriers=plan.cut.consumers)
    scratch = Shared(shared_keys(plan), rows, rows, rows_here)
    dq = (jax.ShapeDtypeStruct(inputs.q.shape, dtype),)
    return launch_over_queries(plan, "flash_backward_queries", _multiply, inputs, dq, scratch)[0]


def _multiply(mine: Rows, inputs: Inputs, outputs: tuple, shared: Shared) -> None:
    thread = mine.thread
    here = shared.rows_here.at[thread]
    plgpu.copy_gmem_to_smem(mine.of(inputs.q), shared.q.at[thread], here)
    plgpu.copy_gmem_to_smem(mine.of(inputs.do), shared.do.at[thread], here)
    lse, delta = (load(mine.per_row(x), by_row()) for x in (inputs.lse, inputs.delta))
    plgpu.barrier_wait(here)
    step = partial(_step, mine, shared, (lse, delta))
    dq = mine.visited(step, filled((ROWS, mine.plan.shape.width), 0.0))
    write(mine.of(outputs[0]), dq * mine.plan.scale, shared.q.at[thread])
    plgpu.wait_smem_to_gmem(0)


def _step(
    mine: Rows, shared: Shared, per_row: tuple[Any, Any], step: Index, dq: jax.Array, partly: bool
) -> jax.Array:
    """Return dq after one more tile of keys."""
    plan, keys, thread = mine.plan, shared.keys, mine.thread
    slot = slot_of(step, plan.cut.stages)
    k, v = keys.k.at[slot], keys.v.at[slot]
    plgpu.barrier_wait(keys.k_here.at[slot])
    plgpu.barrier_wait(keys.v_here.at[slot])

    def multiply(s_ref: Any, dp_ref: Any) -> tuple[jax.Array, jax.Array]:
        plgpu.wgmma(s_ref, shared.q.at[thread], k.transpose((1, 0)))
        plgpu.wgmma(dp_ref, shared.do.at[thread], v.transpose((1, 0)))
        return s_ref[...], dp_ref[...]

    tile = sums((ROWS, plan.cut.tile))
    s, dp = pl.run_scoped(multiply, tile, tile)
    plgpu.barrier_arrive(keys.v_free.at[slot])
    if partly:
        s = mine.masked(s, step, keys)
        if plan.documents:  # read by other means than the next are written
            plgpu.commit_smem()
    lse, delta = (across(x, s.shape) for x in per_row)
    ds = jnp.exp2(s * (plan.scale * LOG2E) - lse) * (dp - delta)
    dq = added(dq, ds.astype(plan.dtype), k)
    plgpu.barrier_arrive(keys.k_free.at[slot])
    return dq
