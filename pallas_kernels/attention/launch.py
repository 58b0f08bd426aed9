"""From operands to the kernels of attention: what they refuse, whole tiles, tables of visits.

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
from hfjax.pallas_kernels.attention.common import LOG2E, Plan, Shape, Tile
from hfjax.pallas_kernels.attention.mask import (
    Mask,
    Places,
    Tiles,
    visits_of_keys,
    visits_of_queries,
)
from hfjax.pallas_kernels.attention.reference import Final, State
from hfjax.pallas_kernels.mosaic import padded
from hfjax.utils.paths import Shaped

HALF = (jnp.bfloat16, jnp.float16)
WIDTHS = (64, 128)


@dataclass(frozen=True)
class Tuning:
    """How each kernel cuts its work; the defaults compile for Hopper without spills."""

    forward: Tile = field(default_factory=lambda: Tile(2, 128, 2))
    queries: Tile = field(default_factory=lambda: Tile(2, 64, 4))  # makes dq
    keys: Tile = field(default_factory=lambda: Tile(2, 64, 2))  # makes dk and dv
    # Forward, where heads of 128 and the documents of a tile's keys want the same registers.
    documents: Tile = field(default_factory=lambda: Tile(2, 64, 3))

    def forward_of(self, q: Shaped, places: Places) -> Tile:
        """Return the cut of a forward kernel."""
        crowded = q.shape[-1] == max(WIDTHS) and places.query_documents is not None
        return self.documents if crowded else self.forward


TUNING, HERE = Tuning(), Places()


def refuses(
    q_BSHD: Shaped, k_BTGD: Shaped, v_BTGD: Shaped, places: Places = HERE, tuning: Tuning = TUNING
) -> str | None:
    """Return why the kernels cannot take these operands; None where they can."""
    named = {"q_BSHD": q_BSHD, "k_BTGD": k_BTGD, "v_BTGD": v_BTGD}
    given = ", ".join(f"{name} {x.dtype}{list(x.shape)}" for name, x in named.items())
    reasons = (_shapes(q_BSHD, k_BTGD, v_BTGD), _documents(q_BSHD, k_BTGD, places), _cut(tuning))
    if reasons[0] is None and q_BSHD.shape[3] not in WIDTHS:
        return f"{given}: head dimensions 64 and 128 only. Use `reference`, which takes any."
    for reason in reasons:
        if reason is not None:
            return f"{given}: {reason}"
    if q_BSHD.dtype not in HALF:
        return f"{given}: the kernels take bfloat16 or float16. Cast, or use `reference`."
    return None


def _shapes(q: Shaped, k: Shaped, v: Shaped) -> str | None:
    if not q.ndim == k.ndim == v.ndim == 4:
        return "each has four dimensions: batch, sequence, heads, head dimension."
    if k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        return "keys and values have one shape; batch and head dimension are those of the queries."
    if not q.dtype == k.dtype == v.dtype:
        return "all have one dtype. Cast what differs."
    if min(*q.shape, *k.shape) < 1 or q.shape[2] % k.shape[2]:
        return "no dimension is empty, and heads of queries are a multiple of heads of keys."
    return None


def _documents(q: Shaped, k: Shaped, places: Places) -> str | None:
    of_queries, of_keys = places.query_documents, places.key_documents
    if of_queries is None and of_keys is None:
        return None
    if of_queries is None or of_keys is None:
        return "documents are given for queries and keys, or for none. Give both."
    if of_queries.shape != q.shape[:2] or of_keys.shape != k.shape[:2]:
        found = f"{list(of_queries.shape)} and {list(of_keys.shape)}"
        return f"documents {found}: one number per token is needed, [B, S] and [B, T]."
    if of_queries.dtype != jnp.int32 or of_keys.dtype != jnp.int32:
        return f"documents {of_queries.dtype} and {of_keys.dtype}: int32 only. Cast them."
    return None


def _cut(tuning: Tuning) -> str | None:
    for cut in (tuning.forward, tuning.queries, tuning.keys, tuning.documents):
        if cut.consumers not in (1, 2, 3) or cut.tile not in (64, 128, 192, 256) or cut.stages < 1:
            return f"{cut}: 1 to 3 consumers, tiles of 64, 128, 192 or 256, at least one stage."
    return None


def whole(
    operands: tuple, mask: Mask, places: Places, tuning: Tuning
) -> tuple[jax.Array, jax.Array]:
    """Return (attention in the dtype of the queries, lse) over one block of keys."""
    out, lse = _forward(operands, None, mask, places, tuning, operands[0].dtype)
    return out, lse


def block(
    operands: tuple, state: State | None, mask: Mask, places: Places, tuning: Tuning
) -> State:
    """Return the state after one more block of keys."""
    return State(*_forward(operands, state, mask, places, tuning, None))


def _forward(
    operands: tuple,
    state: State | None,
    mask: Mask,
    places: Places,
    tuning: Tuning,
    dtype: DTypeLike | None,
) -> list[jax.Array]:
    """Return the attention in a dtype and its lse; without a dtype the state: o, m and l."""
    (q, k, v), cut = operands, tuning.forward_of(operands[0], places)
    visits = visits_of_queries(mask, places, Tiles(q.shape[1], k.shape[1], cut.rows, cut.tile))
    queries, keys = cut.rows, cut.tile
    documents = _padded_documents(places, queries, keys)
    grown = padded(q, 1, queries), padded(k, 1, keys), padded(v, 1, keys)
    past = (None,) * 3
    if state is not None:
        o, m, l = (x.astype(jnp.float32) for x in state)
        m = padded(m, 2, queries, constant_values=-jnp.inf)
        past = padded(o, 1, queries), m, padded(l, 2, queries)
    inputs = flash_forward.Inputs(*grown, visits, *documents, *past)
    plan = _plan(mask, operands, inputs, cut)
    out = jax.ShapeDtypeStruct(inputs.q.shape, dtype or jnp.float32)
    rows = jax.ShapeDtypeStruct((*q.shape[::2], plan.shape.queries), jnp.float32)
    o, *rows = flash_forward.run(plan, inputs, (out, *[rows] * (1 if dtype else 2)))
    return [o[:, : q.shape[1]], *(x[:, :, : q.shape[1]] for x in rows)]


def _padded_documents(places: Places, queries: int, keys: int) -> tuple[Any, Any]:
    if places.query_documents is None or places.key_documents is None:
        return None, None
    of_queries = padded(places.query_documents, 1, queries, mode="edge")
    return of_queries, padded(places.key_documents, 1, keys, mode="edge")


def _plan(
    mask: Mask, operands: tuple, inputs: flash_forward.Inputs | backward.Inputs, cut: Tile
) -> Plan:
    batch, queries, heads, width = inputs.q.shape
    shape = Shape(batch, queries, inputs.k.shape[1], heads, inputs.k.shape[2], width)
    documents = inputs.query_documents is not None
    return Plan(mask, shape, operands[1].shape[1], cut, documents, inputs.q.dtype)


def block_backward(
    operands: tuple, final: Final, mask: Mask, places: Places, tuning: Tuning, dtype: DTypeLike
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return (dq, dk, dv) of one block of keys in a dtype: float32, or that of the operands."""
    q, k, v = operands
    of_queries, of_keys = tuning.queries, tuning.keys
    queries = math.lcm(of_queries.rows, of_keys.tile)
    keys = math.lcm(of_keys.rows, of_queries.tile)
    lse = jnp.where(final.lse > -jnp.inf, final.lse * LOG2E, jnp.inf)
    inputs = backward.Inputs(
        padded(q, 1, queries),
        padded(k, 1, keys),
        padded(v, 1, keys),
        padded(final.do.astype(q.dtype), 1, queries),
        padded(lse.astype(jnp.float32), 2, queries, constant_values=jnp.inf),
        padded(final.delta.astype(jnp.float32), 2, queries),
        None,
        *_padded_documents(places, queries, keys),
    )
    lengths = (q.shape[1], k.shape[1])
    seen = visits_of_queries(mask, places, Tiles(*lengths, of_queries.rows, of_queries.tile))
    plan = _plan(mask, operands, inputs, of_queries)
    dq = backward.queries(plan, inputs._replace(visits=seen), dtype)
    seen = visits_of_keys(mask, places, Tiles(*lengths, of_keys.tile, of_keys.rows))
    plan = _plan(mask, operands, inputs, of_keys)
    dk, dv = backward_keys.keys(plan, inputs._replace(visits=seen), dtype)
    return dq[:, : lengths[0]], dk[:, : lengths[1]], dv[:, : lengths[1]]
