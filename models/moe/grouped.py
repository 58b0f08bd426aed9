"""Experts without a capacity: products in blocks, as many as the choices of each expert need.

The choices of each expert are padded to whole blocks of rows: at most ceil(T k / block) + E blocks.
A loop runs those that there are, however unevenly tokens chose; its adjoint computes each block
again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.models.moe.slots import Sorted, in_order

Apply = Callable[[Any, jax.Array], jax.Array]  # (arrays of one expert, [N, D]) -> [N, D]


class Block(NamedTuple):
    """The choices that one product is for."""

    expert: jax.Array
    choices: jax.Array  # numbers below T k; T k where there is none
    tokens: jax.Array  # the rows of x, T where there is none


class Plan(NamedTuple):
    """Which choices go to which block."""

    sort: Sorted  # of one group
    ends: jax.Array  # [E]: how many blocks there are up to the last of each expert
    total: jax.Array  # how many there are

    def block(self, number: jax.Array, size: int, k: int) -> Block:
        """Return a block of the plan."""
        choices, first, counts = (x[0] for x in self.sort)
        expert = jnp.searchsorted(self.ends, number, side="right").astype(jnp.int32)
        before = self.ends[expert] - -(-counts[expert] // size)
        rank = (number - before) * size + jnp.arange(size, dtype=jnp.int32)
        found = choices.at[first[expert] + rank].get(mode="clip")
        found = jnp.where(rank < counts[expert], found, len(choices))
        return Block(expert, found, found // k)


def planned(experts_Tk: jax.Array, count: int, size: int) -> Plan:
    """Return the blocks for choices among experts 0 to count - 1; other numbers are of none."""
    known = jnp.where((experts_Tk >= 0) & (experts_Tk < count), experts_Tk, count)[None]
    sort = in_order(known, jnp.zeros(known.shape, jnp.int32), count)
    ends = jnp.cumsum(-(-sort.counts[0] // size))
    return Plan(sort, ends, ends[-1])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def in_blocks(
    apply: Apply, size: int, arrays: Any, x_TD: jax.Array, experts_Tk: jax.Array, weights: jax.Array
) -> jax.Array:
    """Return the weighted sum of what each token's experts make of it; those here are `arrays`."""
    k, plan = experts_Tk.shape[1], _plan(size, arrays, experts_Tk)
    wide = jnp.promote_types(x_TD.dtype, jnp.float32)

    def body(number: jax.Array, y: jax.Array) -> jax.Array:
        block = plan.block(number, size, k)
        made = apply(_of(arrays, block.expert), _take(x_TD, block.tokens))
        weighed = _take(weights.reshape(-1), block.choices)[:, None] * made.astype(wide)
        return y.at[block.tokens].add(weighed.astype(wide), mode="drop")

    zeros = jnp.zeros(x_TD.shape, wide)
    return lax.fori_loop(0, plan.total, body, zeros).astype(x_TD.dtype)


def _forward(
    apply: Apply, size: int, arrays: Any, x: jax.Array, experts: jax.Array, weights: jax.Array
) -> tuple[jax.Array, tuple]:
    return in_blocks(apply, size, arrays, x, experts, weights), (arrays, x, experts, weights)


def _backward(apply: Apply, size: int, saved: tuple, dy_TD: jax.Array) -> tuple:
    arrays, x_TD, experts_Tk, weights = saved
    k, plan = experts_Tk.shape[1], _plan(size, arrays, experts_Tk)
    flat = weights.reshape(-1)
    wide = lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    def body(number: jax.Array, sums: tuple) -> tuple:
        d_arrays, dx, d_weights = sums
        block = plan.block(number, size, k)
        of_one = _of(arrays, block.expert)
        made, adjoint = jax.vjp(apply, of_one, _take(x_TD, block.tokens))
        dy = _take(dy_TD, block.tokens)
        d_made = (_take(flat, block.choices)[:, None] * dy).astype(made.dtype)
        d_one, d_rows = adjoint(d_made)
        d_arrays = jax.tree.map(lambda s, d: s.at[block.expert].add(d), d_arrays, d_one)
        dx = dx.at[block.tokens].add(d_rows.astype(dx.dtype), mode="drop")
        along = (made.astype(d_weights.dtype) * dy).sum(-1).astype(d_weights.dtype)
        return d_arrays, dx, d_weights.at[block.choices].add(along, mode="drop")

    zeros = jax.tree.map(wide, arrays), wide(x_TD), wide(flat)
    d_arrays, dx, d_weights = lax.fori_loop(0, plan.total, body, zeros)
    d_arrays = jax.tree.map(lambda d, x: d.astype(x.dtype), d_arrays, arrays)
    d_weights = d_weights.reshape(weights.shape).astype(weights.dtype)
    return d_arrays, dx.astype(x_TD.dtype), None, d_weights


in_blocks.defvjp(_forward, _backward)


def _plan(size: int, arrays: Any, experts_Tk: jax.Array) -> Plan:
    return planned(experts_Tk, len(jax.tree.leaves(arrays)[0]), size)


def _of(arrays: Any, expert: jax.Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, expert, 0, False), arrays)


def _take(x: jax.Array, at: jax.Array) -> jax.Array:
    return x.at[at].get(mode="fill", fill_value=0)
