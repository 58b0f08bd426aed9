"""One block of attention in plain JAX, in blocks of queries and keys: for CPUs and tests.

Scores exist only within their block of `BLOCK` x `BLOCK`; blocks that see nothing are skipped at
run time. Computed in float32 or wider. Shapes as in `flash_block`, query heads as [G, R].
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hfjax.pallas_kernels.attention.mask import Mask, Positions, Tiles, tile_visibility, visible
from hfjax.pallas_kernels.mosaic import pad_axis
from hfjax.utils.vma import unify_varying, zeros

BLOCK = 512  # queries and keys


class State(NamedTuple):
    """Attention over the keys seen so far, float32 or wider; values are weighted by exp(score - m).

    o is the weighted sum of values, l the sum of weights, m the greatest score: 0, 0 and -inf
    where nothing was seen. m is treated as a constant: its gradients cancel in `finish`.
    """

    o: jax.Array
    m: jax.Array
    l: jax.Array


class Final(NamedTuple):
    """The inputs of any key block's backward pass for the queries, after all keys were seen.

    The gradient of the attention, the log of the sum of weights (-inf: nothing seen), and `delta`:
    sum(out * do) over D, minus the gradient of lse where there is one.
    """

    do: jax.Array
    lse: jax.Array
    delta: jax.Array


class _Blocks(NamedTuple):
    """Queries or keys in blocks, [n, B, block, ...], and their numbers, [n, block]."""

    arrays: tuple[jax.Array, ...]
    number: jax.Array


def _split_blocks(length: int, *arrays: jax.Array) -> _Blocks:
    size = min(BLOCK, length)
    blocked_arrays = []
    for x in arrays:
        padded_x = pad_axis(x, 1, size)
        blocks = padded_x.reshape(x.shape[0], -1, size, *x.shape[2:])
        blocked_arrays.append(jnp.moveaxis(blocks, 1, 0))
    count = -(-length // size)
    return _Blocks(
        tuple(blocked_arrays), jnp.arange(count * size, dtype=jnp.int32).reshape(count, size)
    )


def _merge_blocks(blocks: jax.Array, length: int) -> jax.Array:
    """Return blocks [n, B, block, ...] merged to [B, length, ...]."""
    merged = jnp.moveaxis(blocks, 0, 1)
    return merged.reshape(merged.shape[0], -1, *merged.shape[3:])[:, :length]


class _Visibility(NamedTuple):
    """Which keys are visible, by numbers of queries and keys."""

    mask: Mask
    positions: Positions
    keys: int
    some: Any  # [query blocks, key blocks]: whether anything is visible

    @property
    def sees_all(self) -> bool:
        """Whether every block of queries statically sees something of every block of keys."""
        return isinstance(self.some, np.ndarray) and bool(self.some.all())

    @classmethod
    def build(cls, mask: Mask, positions: Positions, queries: int, keys: int) -> "_Visibility":
        tiles = Tiles(queries, keys, min(BLOCK, queries), min(BLOCK, keys))
        return cls(mask, positions, keys, tile_visibility(mask, positions, tiles)[0].any(0))

    def mask_scores(self, s: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
        """Return scores [B, G, R, Q, K], -inf where the query does not see the key."""
        near, same = visible(self.mask, self.positions, query, key)
        near &= (key < self.keys)[None, :]
        is_visible = near[None] if same is None else near[None] & same
        return jnp.where(is_visible[:, None, None], s, -jnp.inf)


def _tie_together(
    q: _Blocks, k: _Blocks, visibility: _Visibility
) -> tuple[_Blocks, _Blocks, jax.Array]:
    """Return the same, with numbers made data-dependent on the arrays that they index.

    Otherwise, in a rematerialised layer, JAX would compute all masks ahead, for all pairs of blocks
    and all heads, and save them: as large as the scores.
    """
    return lax.optimization_barrier((q, k, jnp.asarray(visibility.some)))


def _sum_dtype(x: jax.Array) -> np.dtype:
    return jnp.promote_types(x.dtype, jnp.float32)


def _scores(q: jax.Array, k: jax.Array) -> jax.Array:
    s = jnp.einsum("bsgrd,btgd->bgrst", q, k, preferred_element_type=_sum_dtype(q))
    return s * q.shape[-1] ** -0.5


def _group_heads(x_BSHD: jax.Array, groups: int) -> jax.Array:
    batch, length, heads, width = x_BSHD.shape
    return x_BSHD.reshape(batch, length, groups, heads // groups, width)


def _heads_last(x_BHS: jax.Array, groups: int) -> jax.Array:
    """Return x as [B, S, G, R]."""
    batch, heads, length = x_BHS.shape
    return jnp.moveaxis(x_BHS.reshape(batch, groups, heads // groups, length), 3, 1)


def _heads_first(x_BSGR: jax.Array) -> jax.Array:
    batch, length, groups, group_size = x_BSGR.shape
    return x_BSGR.reshape(batch, length, groups * group_size).swapaxes(1, 2)


def initial_state(q_BSHD: jax.Array) -> State:
    """Return the state of queries before their first key."""
    batch, length, heads, _ = q_BSHD.shape
    stats_shape, wide = (batch, heads, length), _sum_dtype(q_BSHD)
    none = zeros(stats_shape, q_BSHD, wide)
    return State(zeros(q_BSHD.shape, q_BSHD, wide), none - jnp.inf, none)


def block(
    q_BSHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    state: State | None,
    mask: Mask,
    positions: Positions,
) -> State:
    """Return the state after one more block of keys."""
    queries, keys, groups = q_BSHD.shape[1], *k_BTGD.shape[1:3]
    q_BSHD, k_BTGD, v_BTGD, state, positions = unify_varying(
        (q_BSHD, k_BTGD, v_BTGD, state, positions)
    )
    visibility = _Visibility.build(mask, positions, queries, keys)
    o, m, l = initial_state(q_BSHD) if state is None else state
    q = _split_blocks(
        queries,
        _group_heads(q_BSHD, groups),
        _group_heads(o, groups),
        _heads_last(m, groups),
        _heads_last(l, groups),
    )
    k = _split_blocks(keys, k_BTGD, v_BTGD)
    q, k, some_seen = _tie_together(q, k, visibility)

    def attend_block(block: tuple) -> tuple[jax.Array, ...]:
        (q, *state), query, some = block
        step = lambda state, other: (_attend_keys(visibility, q, query, state, other), None)
        return lax.scan(jax.checkpoint(step), tuple(state), (k.arrays, k.number, some))[0]

    o, m, l = (
        _merge_blocks(x, queries) for x in lax.map(attend_block, (q.arrays, q.number, some_seen))
    )
    return State(o.reshape(q_BSHD.shape), _heads_first(m), _heads_first(l))


def _attend_keys(
    visibility: _Visibility, q: jax.Array, query: jax.Array, state: tuple, key_block: tuple
) -> tuple:
    """Return (o, m, l) of a block of queries after a block of keys; it may see none of them."""
    (k, v), key, some = key_block

    def attend(state: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
        o, m, l = state
        s = visibility.mask_scores(_scores(q, k), query, key)
        before = jnp.moveaxis(m, 1, 3)  # [B, G, R, Q]
        new_max = lax.stop_gradient(jnp.maximum(before, s.max(-1)))
        base = jnp.where(new_max > -jnp.inf, new_max, 0.0)
        rescale = jnp.exp(lax.stop_gradient(before) - base)
        p = jnp.exp(s - base[..., None])
        new = jnp.einsum("bgrst,btgd->bsgrd", p.astype(v.dtype), v, preferred_element_type=o.dtype)
        l = l * jnp.moveaxis(rescale, 3, 1) + jnp.moveaxis(p.sum(-1), 3, 1)
        return o * jnp.moveaxis(rescale, 3, 1)[..., None] + new, jnp.moveaxis(new_max, 3, 1), l

    return (
        attend(state) if visibility.sees_all else lax.cond(some, attend, lambda state: state, state)
    )


def block_backward(
    q_BSHD: jax.Array,
    k_BTGD: jax.Array,
    v_BTGD: jax.Array,
    final: Final,
    mask: Mask,
    positions: Positions,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return one block of keys' partial sum of dq, and its dk and dv: float32 or wider."""
    queries, keys, groups = q_BSHD.shape[1], *k_BTGD.shape[1:3]
    q_BSHD, k_BTGD, v_BTGD, final, positions = unify_varying(
        (q_BSHD, k_BTGD, v_BTGD, final, positions)
    )
    visibility = _Visibility.build(mask, positions, queries, keys)
    lse, delta = (_heads_last(x, groups) for x in (final.lse, final.delta))
    do = _group_heads(final.do, groups)
    q = _split_blocks(queries, _group_heads(q_BSHD, groups), do, lse, delta)
    k = _split_blocks(keys, k_BTGD, v_BTGD)
    q, k, some_seen = _tie_together(q, k, visibility)
    wide = _sum_dtype(q_BSHD)

    def block_step(sums: tuple, block: tuple) -> tuple[tuple, jax.Array]:
        operands, query, some = block
        start = zeros(operands[0].shape, q_BSHD, wide)
        step = lambda dq, other: _block_gradients(visibility, operands, query, dq, other)
        dq, more = lax.scan(step, start, (k.arrays, k.number, some))
        return jax.tree.map(jnp.add, sums, more), dq

    none = tuple(zeros(x.shape, x, wide) for x in k.arrays)
    (dk, dv), dq = lax.scan(block_step, none, (q.arrays, q.number, some_seen))
    return (
        _merge_blocks(dq, queries).reshape(q_BSHD.shape),
        _merge_blocks(dk, keys),
        _merge_blocks(dv, keys),
    )


def _block_gradients(
    visibility: _Visibility, operands: tuple, query: jax.Array, dq: jax.Array, key_block: tuple
) -> tuple:
    """Return dq of a block of queries after a block of keys, and (dk, dv) of these keys."""
    (q, do, lse, delta), ((k, v), key, some) = operands, key_block
    wide = dq.dtype

    def gradients(dq: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        s = visibility.mask_scores(_scores(q, k), query, key)
        row_lse = jnp.moveaxis(jnp.where(lse > -jnp.inf, lse, jnp.inf), 1, 3)[..., None]
        p = jnp.exp(s - row_lse)
        dp = jnp.einsum("bsgrd,btgd->bgrst", do, v, preferred_element_type=wide)
        ds = (p * (dp - jnp.moveaxis(delta, 1, 3)[..., None]) * q.shape[-1] ** -0.5).astype(q.dtype)
        more = jnp.einsum("bgrst,btgd->bsgrd", ds, k, preferred_element_type=wide)
        dk = jnp.einsum("bgrst,bsgrd->btgd", ds, q, preferred_element_type=wide)
        dv = jnp.einsum("bgrst,bsgrd->btgd", p.astype(do.dtype), do, preferred_element_type=wide)
        return dq + more, (dk, dv)

    nothing = tuple(zeros(x.shape, x, wide) for x in (k, v))
    return (
        gradients(dq)
        if visibility.sees_all
        else lax.cond(some, gradients, lambda dq: (dq, nothing), dq)
    )
