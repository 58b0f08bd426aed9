"""The forward kernel of attention, after FlashAttention-3 on Hopper (Shah et al., 2024).

A block of threads has 64 rows of queries per warpgroup and visits the tiles of keys that they
see, whole ones first. With two warpgroups one multiplies while the other takes exponentials.
Shapes as in `flash_parts`.
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
    across,
    added,
    again,
    filled,
    matrix,
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
from hfjax.pallas_kernels.mosaic import Part, by_row, load
from hfjax.utils.paths import Index

FLOOR = -1e30  # a maximum below every score: exponentials of what is masked are then plain zeros


class Inputs(NamedTuple):
    """Operands in device memory; a state is there for later blocks, documents where given."""

    q: Any
    k: Any
    v: Any
    visits: Any
    query_documents: Any = None
    key_documents: Any = None
    o: Any = None
    m: Any = None
    l: Any = None


class Shared(NamedTuple):
    """Shared memory and barriers of one block of threads."""

    keys: Keys
    q: Any
    q_here: Any
    turn: Any


def run(plan: Plan, inputs: Inputs, outputs: tuple) -> tuple[jax.Array, ...]:
    """Return (out, lse) or, where three outputs are asked for, the new state (o, m, l)."""
    q_here = plgpu.Barrier(num_barriers=plan.cut.consumers)
    turn = plgpu.Barrier(num_arrivals=plan.cut.consumers)
    scratch = Shared(shared_keys(plan), shared_rows(plan), q_here, turn)
    return launch_over_queries(plan, "flash_forward", _multiply, inputs, outputs, scratch)


def _multiply(mine: Rows, inputs: Inputs, outputs: tuple, shared: Shared) -> None:
    thread = mine.thread
    here = shared.q_here.at[thread]
    plgpu.copy_gmem_to_smem(mine.of(inputs.q), shared.q.at[thread], here)
    state = _initial(mine, inputs)
    plgpu.barrier_wait(here)
    turns = mine.plan.cut.consumers == 2
    if turns:  # the second warpgroup is half a step behind
        pl.when(thread == 1)(lambda: _take_turns(shared))
    state = mine.visited(partial(_step, mine, shared), state)
    if turns:
        pl.when(thread == 0)(lambda: _take_turns(shared))
    if len(outputs) == 3:
        _write_state(mine, outputs, *state)
    else:
        _write_attention(mine, outputs, shared.q.at[thread], state)


def _initial(mine: Rows, inputs: Inputs) -> tuple:
    """Return (o, m, l) before the first key: m counts powers of two."""
    if inputs.o is None:
        o = filled((ROWS, mine.plan.shape.width), 0.0)
        return o, filled((ROWS,), FLOOR, by_row()), filled((ROWS,), 0.0, by_row())
    o = load(mine.of(inputs.o), matrix())
    m, l = (load(mine.per_row(x), by_row()) for x in (inputs.m, inputs.l))
    return o, jnp.maximum(m * LOG2E, FLOOR), l


def _take_turns(shared: Shared) -> None:
    plgpu.barrier_arrive(shared.turn)
    plgpu.barrier_wait(shared.turn)


def _scores(mine: Rows, shared: Shared, slot: Index) -> jax.Array:
    """Return q @ k.T; the other warpgroup goes on as soon as this product is issued."""

    def multiply(s_ref: Any) -> jax.Array:
        plgpu.wgmma(
            s_ref, shared.q.at[again(mine.thread)], shared.keys.k.at[slot].transpose((1, 0))
        )
        if mine.plan.cut.consumers == 2:
            _take_turns(shared)
        return s_ref[...]

    return pl.run_scoped(multiply, sums((ROWS, mine.plan.cut.tile)))


def _step(mine: Rows, shared: Shared, step: Index, state: tuple, partly: bool) -> tuple:
    """Return (o, m, l) after one more tile of keys."""
    plan, keys = mine.plan, shared.keys
    turns = plan.cut.consumers == 2
    (o, m, l), slot = state, slot_of(step, plan.cut.stages)
    plgpu.barrier_wait(keys.k_here.at[slot])
    s = _scores(mine, shared, slot)
    if partly:
        s = mine.masked(s, step, keys)
        if plan.documents:  # read by other means than the next are written
            plgpu.commit_smem()
    plgpu.barrier_arrive(keys.k_free.at[slot])
    unit = plan.scale * LOG2E
    highest = jnp.maximum(m, s.max(axis=1) * unit)
    shrink = jnp.exp2(m - highest)
    p = jnp.exp2(s * unit - across(highest, s.shape))
    o, l = o * across(shrink, o.shape), l * shrink + p.sum(axis=1)
    weights = p.astype(plan.dtype)
    o, highest, l, weights = lax.optimization_barrier((o, highest, l, weights))
    if turns:
        plgpu.barrier_arrive(shared.turn)
    plgpu.barrier_wait(keys.v_here.at[slot])
    if turns:
        plgpu.barrier_wait(shared.turn)
    o = added(o, weights, keys.v.at[slot])
    plgpu.barrier_arrive(keys.v_free.at[slot])
    return o, highest, l


def _write_state(mine: Rows, outputs: tuple, o: jax.Array, m: Index, l: jax.Array) -> None:
    mine.of(outputs[0])[...] = o
    mine.per_row(outputs[1])[...] = jnp.where(m > FLOOR, m * LN2, -jnp.inf)
    mine.per_row(outputs[2])[...] = l


def _write_attention(mine: Rows, outputs: tuple, shared_rows: Part, state: tuple) -> None:
    """Write what is attended to and its lse: 0 and -inf for rows that see nothing."""
    o, m, l = state
    some = l > 0.0
    lse = jnp.where(some, m * LN2 + jnp.log(l), -jnp.inf)
    mine.per_row(outputs[1])[...] = lse
    inverse = jnp.where(some, 1.0 / l, 0.0)
    write(mine.of(outputs[0]), o * across(inverse, o.shape), shared_rows)
    plgpu.wait_smem_to_gmem(0)
