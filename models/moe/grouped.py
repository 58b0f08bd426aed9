"""Experts without a capacity: block-wise matmuls, as many as the choices of each expert need.

The choices of each expert are padded to whole blocks of rows: at most ceil(T k / block) + E blocks.
A loop runs only the existing ones, however unbalanced the choices; its adjoint recomputes each
block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.models.moe.slots import SortedChoices, sort_choices

Apply = Callable[[Any, jax.Array], jax.Array]  # (arrays of one expert, [N, D]) -> [N, D]


class Block(NamedTuple):
    """The choices of one block of rows."""

    expert: jax.Array
    choices: jax.Array  # numbers below T k; T k for padding
    tokens: jax.Array  # rows of x; T for padding


class BlockPlan(NamedTuple):
    """The assignment of choices to blocks."""

    sort: SortedChoices  # of one group
    ends: jax.Array  # [E]: the cumulative number of blocks, up to each expert
    num_blocks: jax.Array  # the total number of blocks

    def block(self, number: jax.Array, size: int, k: int) -> Block:
        """Return a block of the plan."""
        choices, first, counts = (x[0] for x in self.sort)
        expert = jnp.searchsorted(self.ends, number, side="right").astype(jnp.int32)
        before = self.ends[expert] - -(-counts[expert] // size)
        rank = (number - before) * size + jnp.arange(size, dtype=jnp.int32)
        block_choices = choices.at[first[expert] + rank].get(mode="clip")
        block_choices = jnp.where(rank < counts[expert], block_choices, len(choices))
        return Block(expert, block_choices, block_choices // k)


def plan_blocks(experts_Tk: jax.Array, count: int, size: int) -> BlockPlan:
    """Return the plan for choices of experts 0 to count - 1; other numbers are ignored."""
    known = jnp.where((experts_Tk >= 0) & (experts_Tk < count), experts_Tk, count)[None]
    sort = sort_choices(known, jnp.zeros(known.shape, jnp.int32), count)
    ends = jnp.cumsum(-(-sort.counts[0] // size))
    return BlockPlan(sort, ends, ends[-1])


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def run_grouped(
    apply: Apply, size: int, arrays: Any, x_TD: jax.Array, experts_Tk: jax.Array, weights: jax.Array
) -> jax.Array:
    """Return each token's weighted sum of expert outputs; `arrays` are the local experts."""
    k, plan = experts_Tk.shape[1], _plan_for(size, arrays, experts_Tk)
    wide = jnp.promote_types(x_TD.dtype, jnp.float32)

    def body(number: jax.Array, y: jax.Array) -> jax.Array:
        block = plan.block(number, size, k)
        expert_out = apply(_select_expert(arrays, block.expert), _take(x_TD, block.tokens))
        weighted = _take(weights.reshape(-1), block.choices)[:, None] * expert_out.astype(wide)
        return y.at[block.tokens].add(weighted.astype(wide), mode="drop")

    zeros = jnp.zeros(x_TD.shape, wide)
    return lax.fori_loop(0, plan.num_blocks, body, zeros).astype(x_TD.dtype)


def _forward(
    apply: Apply, size: int, arrays: Any, x: jax.Array, experts: jax.Array, weights: jax.Array
) -> tuple[jax.Array, tuple]:
    return run_grouped(apply, size, arrays, x, experts, weights), (arrays, x, experts, weights)


def _backward(apply: Apply, size: int, saved: tuple, dy_TD: jax.Array) -> tuple:
    arrays, x_TD, experts_Tk, weights = saved
    k, plan = experts_Tk.shape[1], _plan_for(size, arrays, experts_Tk)
    flat = weights.reshape(-1)
    zeros_like = lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32))

    def body(number: jax.Array, sums: tuple) -> tuple:
        d_arrays, dx, d_weights = sums
        block = plan.block(number, size, k)
        expert_arrays = _select_expert(arrays, block.expert)
        expert_out, vjp = jax.vjp(apply, expert_arrays, _take(x_TD, block.tokens))
        dy = _take(dy_TD, block.tokens)
        d_out = (_take(flat, block.choices)[:, None] * dy).astype(expert_out.dtype)
        d_expert, d_rows = vjp(d_out)
        d_arrays = jax.tree.map(lambda s, d: s.at[block.expert].add(d), d_arrays, d_expert)
        dx = dx.at[block.tokens].add(d_rows.astype(dx.dtype), mode="drop")
        d_weight = (expert_out.astype(d_weights.dtype) * dy).sum(-1).astype(d_weights.dtype)
        return d_arrays, dx, d_weights.at[block.choices].add(d_weight, mode="drop")

    zeros = jax.tree.map(zeros_like, arrays), zeros_like(x_TD), zeros_like(flat)
    d_arrays, dx, d_weights = lax.fori_loop(0, plan.num_blocks, body, zeros)
    d_arrays = jax.tree.map(lambda d, x: d.astype(x.dtype), d_arrays, arrays)
    d_weights = d_weights.reshape(weights.shape).astype(weights.dtype)
    return d_arrays, dx.astype(x_TD.dtype), None, d_weights


run_grouped.defvjp(_forward, _backward)


def _plan_for(size: int, arrays: Any, experts_Tk: jax.Array) -> BlockPlan:
    return plan_blocks(experts_Tk, len(jax.tree.leaves(arrays)[0]), size)


def _select_expert(arrays: Any, expert: jax.Array) -> Any:
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, expert, 0, False), arrays)


def _take(x: jax.Array, at: jax.Array) -> jax.Array:
    return x.at[at].get(mode="fill", fill_value=0)
