"""Launch the attention kernels: check operands, pad to whole tiles, build tables of visits.

Shapes as in `flash_block`.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from hfjax.pallas_kernels.attention import (
    backward,
    backward_keys,
    forward as flash_forward,
)
from hfjax.pallas_kernels.attention.common import LOG2E, Plan, Shape, Tiling
from hfjax.pallas_kernels.attention.mask import (
    Mask,
    Positions,
    Tiles,
    key_visits,
    query_visits,
)
from hfjax.pallas_kernels.attention.reference import Final, State
from hfjax.pallas_kernels.mosaic import pad_axis
from hfjax.utils.paths import Shaped

HALF = (jnp.bfloat16, jnp.float16)
WIDTHS = (64, 128)


@dataclass(frozen=True)
class Tuning:
    """The tiling of each kernel; the defaults compile for Hopper without spills."""

    forward: Tiling = field(default_factory=lambda: Tiling(2, 128, 2))
    queries: Tiling = field(default_factory=lambda: Tiling(2, 64, 4))  # of dq
    keys: Tiling = field(default_factory=lambda: Tiling(2, 64, 2))  # of dk and dv
    # Forward, where heads of 128 and the documents of a tile's keys compete for registers.
    documents: Tiling = field(default_factory=lambda: Tiling(2, 64, 3))

    def forward_tiling(self, q: Shaped, positions: Positions) -> Tiling:
        """Return the tiling of a forward kernel."""
        is_crowded = q.shape[-1] == max(WIDTHS) and positions.query_documents is not None
        return self.documents if is_crowded else self.forward


TUNING, FROM_ZERO = Tuning(), Positions()


def refuses(
    q_BSHD: Shaped,
    k_BTGD: Shaped,
    v_BTGD: Shaped,
    positions: Positions = FROM_ZERO,
    tuning: Tuning = TUNING,
) -> str | None:
    """Return why the kernels cannot take these operands, or None if they can."""
    named = {"q_BSHD": q_BSHD, "k_BTGD": k_BTGD, "v_BTGD": v_BTGD}
    operands = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in named.items())
    reasons = (
        _check_shapes(q_BSHD, k_BTGD, v_BTGD),
        _check_documents(q_BSHD, k_BTGD, positions),
        _check_tiling(tuning),
    )
    if reasons[0] is None and q_BSHD.shape[3] not in WIDTHS:
        return f"{operands}: head dimensions 64 and 128 only. Use `reference`, which takes any."
    for reason in reasons:
        if reason is not None:
            return f"{operands}: {reason}"
    if q_BSHD.dtype not in HALF:
        return f"{operands}: the kernels take bfloat16 or float16. Cast, or use `reference`."
    return None


def _check_shapes(q: Shaped, k: Shaped, v: Shaped) -> str | None:
    if not q.ndim == k.ndim == v.ndim == 4:
        return "each has four dimensions: batch, sequence, heads, head dimension."
    if k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        return "keys and values have one shape; batch and head dimension are those of the queries."
    if not q.dtype == k.dtype == v.dtype:
        return "all have one dtype. Cast what differs."
    if min(*q.shape, *k.shape) < 1 or q.shape[2] % k.shape[2]:
        return "no dimension is empty, and heads of queries are a multiple of heads of keys."
    return None


def _check_documents(q: Shaped, k: Shaped, positions: Positions) -> str | None:
    of_queries, of_keys = positions.query_documents, positions.key_documents
    if of_queries is None and of_keys is None:
        return None
    if of_queries is None or of_keys is None:
        return "documents are given for queries and keys, or for none. Give both."
    if of_queries.shape != q.shape[:2] or of_keys.shape != k.shape[:2]:
        shapes = f"{list(of_queries.shape)} and {list(of_keys.shape)}"
        return f"documents {shapes}: one number per token is needed, [B, S] and [B, T]."
    if of_queries.dtype != jnp.int32 or of_keys.dtype != jnp.int32:
        return f"documents {of_queries.dtype} and {of_keys.dtype}: int32 only. Cast them."
    return None


def _check_tiling(tuning: Tuning) -> str | None:
    for tiling in (tuning.forward, tuning.queries, tuning.keys, tuning.documents):
        if (
            tiling.consumers not in (1, 2, 3)
            or tiling.tile not in (64, 128, 192, 256)
            or tiling.stages < 1
        ):
            return f"{tiling}: 1 to 3 consumers, tiles of 64, 128, 192 or 256, at least one stage."
    return None


def forward(
    operands: tuple, mask: Mask, positions: Positions, tuning: Tuning
) -> tuple[jax.Array, jax.Array]:
    """Return (attention in the dtype of the queries, lse) over one block of keys."""
    out, lse = _forward(operands, None, mask, positions, tuning, operands[0].dtype)
    return out, lse


def block(
    operands: tuple, state: State | None, mask: Mask, positions: Positions, tuning: Tuning
) -> State:
    """Return the state after one more block of keys."""
    return State(*_forward(operands, state, mask, positions, tuning, None))


def _forward(
    operands: tuple,
    state: State | None,
    mask: Mask,
    positions: Positions,
    tuning: Tuning,
    dtype: DTypeLike | None,
) -> list[jax.Array]:
    """Return the attention in `dtype` and its lse; without a dtype the state: o, m and l."""
    (q, k, v), tiling = operands, tuning.forward_tiling(operands[0], positions)
    visits = query_visits(mask, positions, Tiles(q.shape[1], k.shape[1], tiling.rows, tiling.tile))
    queries, keys = tiling.rows, tiling.tile
    documents = _padded_documents(positions, queries, keys)
    padded_qkv = pad_axis(q, 1, queries), pad_axis(k, 1, keys), pad_axis(v, 1, keys)
    state_inputs = (None,) * 3
    if state is not None:
        o, m, l = (x.astype(jnp.float32) for x in state)
        m = pad_axis(m, 2, queries, constant_values=-jnp.inf)
        state_inputs = pad_axis(o, 1, queries), m, pad_axis(l, 2, queries)
    inputs = flash_forward.Inputs(*padded_qkv, visits, *documents, *state_inputs)
    plan = _plan(mask, operands, inputs, tiling)
    out = jax.ShapeDtypeStruct(inputs.q.shape, dtype or jnp.float32)
    stats = jax.ShapeDtypeStruct((*q.shape[::2], plan.shape.queries), jnp.float32)
    o, *stats = flash_forward.run(plan, inputs, (out, *[stats] * (1 if dtype else 2)))
    return [o[:, : q.shape[1]], *(x[:, :, : q.shape[1]] for x in stats)]


def _padded_documents(positions: Positions, queries: int, keys: int) -> tuple[Any, Any]:
    if positions.query_documents is None or positions.key_documents is None:
        return None, None
    of_queries = pad_axis(positions.query_documents, 1, queries, mode="edge")
    return of_queries, pad_axis(positions.key_documents, 1, keys, mode="edge")


def _plan(
    mask: Mask, operands: tuple, inputs: flash_forward.Inputs | backward.Inputs, tiling: Tiling
) -> Plan:
    batch, queries, heads, width = inputs.q.shape
    shape = Shape(batch, queries, inputs.k.shape[1], heads, inputs.k.shape[2], width)
    documents = inputs.query_documents is not None
    return Plan(mask, shape, operands[1].shape[1], tiling, documents, inputs.q.dtype)


def block_backward(
    operands: tuple,
    final: Final,
    mask: Mask,
    positions: Positions,
    tuning: Tuning,
    dtype: DTypeLike,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (dq, dk, dv) of one block of keys in `dtype`: float32, or that of the operands."""
    q, k, v = operands
    of_queries, of_keys = tuning.queries, tuning.keys
    queries = math.lcm(of_queries.rows, of_keys.tile)
    keys = math.lcm(of_keys.rows, of_queries.tile)
    lse = jnp.where(final.lse > -jnp.inf, final.lse * LOG2E, jnp.inf)
    inputs = backward.Inputs(
        pad_axis(q, 1, queries),
        pad_axis(k, 1, keys),
        pad_axis(v, 1, keys),
        pad_axis(final.do.astype(q.dtype), 1, queries),
        pad_axis(lse.astype(jnp.float32), 2, queries, constant_values=jnp.inf),
        pad_axis(final.delta.astype(jnp.float32), 2, queries),
        None,
        *_padded_documents(positions, queries, keys),
    )
    lengths = (q.shape[1], k.shape[1])
    visits = query_visits(mask, positions, Tiles(*lengths, of_queries.rows, of_queries.tile))
    plan = _plan(mask, operands, inputs, of_queries)
    dq = backward.query_gradient(plan, inputs._replace(visits=visits), dtype)
    visits = key_visits(mask, positions, Tiles(*lengths, of_keys.tile, of_keys.rows))
    plan = _plan(mask, operands, inputs, of_keys)
    dk, dv = backward_keys.key_gradients(plan, inputs._replace(visits=visits), dtype)
    return dq[:, : lengths[0]], dk[:, : lengths[1]], dv[:, : lengths[1]]
