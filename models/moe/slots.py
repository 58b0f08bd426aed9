"""Slots: which of a group's tokens each expert takes, with dispatch and combine.

[G]roups of [T]okens, [k] choices of each, [E]xperts of [C]apacity. A choice is a number below T k,
a slot a number below E C; T k and E C stand for none. Dispatch and combine are gathers in both
directions, with explicit adjoints, since the adjoint that JAX derives for a gather is a scatter,
which is slower.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hfjax.models.moe.router import is_chosen


class Slots(NamedTuple):
    """The pairs of choices and slots, in both directions."""

    choice_at: jax.Array  # [G, E, C]: the choice in a slot, T k if none
    slot_of: jax.Array  # [G, T, k]: the slot of a choice, E C if none
    weights: jax.Array  # [G, T, k]: the weight of a choice, 0 without a slot


def capacity(tokens: int, k: int, experts: int, factor: float, least: int) -> int:
    """Return an expert's capacity in tokens of a group: DeepSpeed's formula, in float32 as there.

    >>> capacity(tokens=64, k=2, experts=8, factor=1.25, least=4)
    20
    """
    scaled_mean = np.float32(tokens / experts) * np.float32(factor * k)
    return min(tokens, max(math.ceil(scaled_mean), least))


class SortedChoices(NamedTuple):
    """Choices sorted by expert, and by priority for each expert."""

    choices: jax.Array  # [G, T k]
    first: jax.Array  # [G, E]: the start of each expert's choices
    counts: jax.Array  # [G, E]


def sort_choices(experts_GTk: jax.Array, priority_GTk: jax.Array, count: int) -> SortedChoices:
    """Return the choices of each expert, lower priorities first; expert E stands for none.

    Integer priorities must be below k.
    """
    k, size = experts_GTk.shape[2], math.prod(experts_GTk.shape[1:])
    flat = lambda x: x.reshape(x.shape[0], -1)
    experts, priority = flat(experts_GTk), flat(priority_GTk)
    numbers = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), experts.shape)
    is_integer = jnp.issubdtype(priority.dtype, jnp.integer)
    if is_integer and (count + 1) * k * size < 2**31:  # one key: a fifth of the time of three
        choices = lax.sort((experts * k + priority) * size + numbers, dimension=1) % size
        choices = choices.astype(jnp.int32)  # 64 bits if the priorities are
    else:
        *_, choices = lax.sort((experts, priority, numbers), dimension=1, num_keys=3)
    counts = is_chosen(experts, count).sum(1, dtype=jnp.int32)
    return SortedChoices(choices, jnp.cumsum(counts, 1) - counts, counts)


def assign_slots(
    sort: SortedChoices, experts_GTk: jax.Array, weights_GTk: jax.Array, size: int
) -> Slots:
    """Return the slots if each expert takes `size` tokens of a group."""
    (groups, tokens, k), count = experts_GTk.shape, sort.counts.shape[1]
    rank = lax.broadcasted_iota("int32", (1, 1, size), 2)
    index = (sort.first[:, :, None] + rank).reshape(groups, -1)
    is_taken = (rank < sort.counts[:, :, None]).reshape(groups, -1)
    choice_at = jnp.where(
        is_taken, jnp.take_along_axis(sort.choices, index, 1, mode="clip"), tokens * k
    )
    slot_of = _invert(choice_at, tokens * k).reshape(groups, tokens, k)
    weights = jnp.where(slot_of < count * size, weights_GTk, 0)
    return Slots(choice_at.reshape(groups, count, size), slot_of, weights)


def choices_at_slots(slot_of_GTk: jax.Array, count: int) -> jax.Array:
    """Return the choice in each of `count` slots, [G, count]; slots beyond are ignored."""
    return _invert(slot_of_GTk.reshape(len(slot_of_GTk), -1), count)


def _invert(pairs_GN: jax.Array, count: int) -> jax.Array:
    """Return the index of each number below `count` in `pairs_GN`; N where it is absent."""
    size = pairs_GN.shape[1]
    numbers = jnp.arange(size, dtype=jnp.int32)
    none = jnp.full(count, size, jnp.int32)
    return jax.vmap(lambda at: none.at[at].set(numbers, mode="drop"))(pairs_GN)


def _take_rows(x: jax.Array, numbers: jax.Array) -> jax.Array:
    """Return rows of x [G, N, D] by number [G, ...], zeros for numbers out of range."""
    take = lambda x, at: x.at[at].get(mode="fill", fill_value=0)
    return jax.vmap(take)(x, numbers)


@jax.custom_vjp
def dispatch(x_GTD: jax.Array, slots: Slots) -> jax.Array:
    """Return the token in each slot, [G, E, C, D], or zeros."""
    return _dispatch(x_GTD, slots)


def _dispatch(x_GTD: jax.Array, slots: Slots) -> jax.Array:
    return _take_rows(x_GTD, slots.choice_at // _top_k(slots))


def _dispatch_forward(x_GTD: jax.Array, slots: Slots) -> tuple[jax.Array, Slots]:
    return _dispatch(x_GTD, slots), slots


def _dispatch_backward(slots: Slots, d_slots: jax.Array) -> tuple[jax.Array, None]:
    flat = d_slots.reshape(len(d_slots), -1, d_slots.shape[-1])
    return _sum_choices(lambda j: _take_rows(flat, slots.slot_of[..., j]), slots), None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@jax.custom_vjp
def combine(y_slots: jax.Array, slots: Slots) -> jax.Array:
    """Return each token's weighted sum of expert outputs, [G, T, D]."""
    return _combine(y_slots, slots)


def _combine(y_slots: jax.Array, slots: Slots) -> jax.Array:
    choice_output = _choice_outputs(y_slots, slots)
    weighted = lambda j: slots.weights[..., j, None] * choice_output(j)
    return _sum_choices(weighted, slots).astype(y_slots.dtype)


def _combine_forward(y_slots: jax.Array, slots: Slots) -> tuple[jax.Array, tuple[jax.Array, Slots]]:
    return _combine(y_slots, slots), (y_slots, slots)


def _combine_backward(saved: tuple[jax.Array, Slots], dy_GTD: jax.Array) -> tuple:
    y_slots, slots = saved
    flat = slots.weights.reshape(len(slots.weights), -1, 1)
    d_slots = _take_rows(flat, slots.choice_at) * _take_rows(
        dy_GTD, slots.choice_at // _top_k(slots)
    )
    choice_output, wide = _choice_outputs(y_slots, slots), dy_GTD.astype(slots.weights.dtype)
    d_weights = jnp.stack([(wide * choice_output(j)).sum(-1) for j in range(_top_k(slots))], -1)
    return d_slots.astype(y_slots.dtype), Slots(None, None, d_weights)  # type: ignore[arg-type]


combine.defvjp(_combine_forward, _combine_backward)


def _top_k(slots: Slots) -> int:
    return slots.slot_of.shape[2]


def _choice_outputs(y_slots: jax.Array, slots: Slots) -> Callable[[int], jax.Array]:
    """Return choice number -> the expert output of that choice for each token, [G, T, D]."""
    flat = y_slots.reshape(len(y_slots), -1, y_slots.shape[-1])
    return lambda j: _take_rows(flat, slots.slot_of[..., j])


def _sum_choices(choice_term: Callable[[int], jax.Array], slots: Slots) -> jax.Array:
    """Return the sum over the choices of each token."""
    out = choice_term(0)
    for j in range(1, _top_k(slots)):
        out = out + choice_term(j)
    return out
