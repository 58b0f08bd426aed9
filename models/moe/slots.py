"""Places: which of a group's tokens an expert takes, and the way there and back.

[G]roups of [T]okens, [k] choices of each, [E]xperts of [C]apacity. A choice is a number below
T k, a place one below E C; the number one beyond stands for none. The ways there and back are
gathers in both directions: their adjoints are written here, since the adjoint that JAX derives of a
gather is a scatter, which is slower.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hfjax.models.moe.router import is_chosen


class Places(NamedTuple):
    """Who goes where: both directions of the same pairs."""

    choice_at: jax.Array  # [G, E, C]: the choice that has a place, T k if none
    place_of: jax.Array  # [G, T, k]: the place of a choice, E C if it has none
    weights: jax.Array  # [G, T, k]: what each choice weighs, 0 if it has no place


def capacity(tokens: int, k: int, experts: int, factor: float, least: int) -> int:
    """Return how many tokens of a group an expert takes: DeepSpeed's formula, in float32 as there.

    >>> capacity(tokens=64, k=2, experts=8, factor=1.25, least=4)
    20
    """
    wanted = np.float32(tokens / experts) * np.float32(factor * k)
    return min(tokens, max(math.ceil(wanted), least))


class Sorted(NamedTuple):
    """Choices in the order of experts, and of priority for each expert."""

    choices: jax.Array  # [G, T k]
    first: jax.Array  # [G, E]: where an expert's choices begin
    counts: jax.Array  # [G, E]


def in_order(experts_GTk: jax.Array, priority_GTk: jax.Array, count: int) -> Sorted:
    """Return the choices of each expert, lower priorities first; an expert E is none.

    Priorities that are whole numbers are below k.
    """
    k, size = experts_GTk.shape[2], math.prod(experts_GTk.shape[1:])
    flat = lambda x: x.reshape(x.shape[0], -1)
    experts, priority = flat(experts_GTk), flat(priority_GTk)
    numbers = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), experts.shape)
    whole = jnp.issubdtype(priority.dtype, jnp.integer)
    if whole and (count + 1) * k * size < 2**31:  # one key: a fifth of the time of three
        choices = lax.sort((experts * k + priority) * size + numbers, dimension=1) % size
        choices = choices.astype(jnp.int32)  # of 64 bits, if the priorities are
    else:
        *_, choices = lax.sort((experts, priority, numbers), dimension=1, num_keys=3)
    counts = is_chosen(experts, count).sum(1, dtype=jnp.int32)
    return Sorted(choices, jnp.cumsum(counts, 1) - counts, counts)


def places(sort: Sorted, experts_GTk: jax.Array, weights_GTk: jax.Array, size: int) -> Places:
    """Return who goes where if each expert takes `size` tokens of a group."""
    (groups, tokens, k), count = experts_GTk.shape, sort.counts.shape[1]
    rank = lax.broadcasted_iota("int32", (1, 1, size), 2)
    at = (sort.first[:, :, None] + rank).reshape(groups, -1)
    taken = (rank < sort.counts[:, :, None]).reshape(groups, -1)
    choice_at = jnp.where(taken, jnp.take_along_axis(sort.choices, at, 1, mode="clip"), tokens * k)
    place_of = _inverse(choice_at, tokens * k).reshape(groups, tokens, k)
    weights = jnp.where(place_of < count * size, weights_GTk, 0)
    return Places(choice_at.reshape(groups, count, size), place_of, weights)


def choices_at(place_of_GTk: jax.Array, count: int) -> jax.Array:
    """Return the choice at each of `count` places, [G, count]; a place beyond is none."""
    return _inverse(place_of_GTk.reshape(len(place_of_GTk), -1), count)


def _inverse(pairs_GN: jax.Array, count: int) -> jax.Array:
    """Return, for each number below `count`, where in `pairs` it is; N where it is not."""
    size = pairs_GN.shape[1]
    numbers = jnp.arange(size, dtype=jnp.int32)
    none = jnp.full(count, size, jnp.int32)
    return jax.vmap(lambda at: none.at[at].set(numbers, mode="drop"))(pairs_GN)


def _rows(x: jax.Array, numbers: jax.Array) -> jax.Array:
    """Return rows of x [G, N, D] by number [G, ...], zeros for numbers beyond."""
    take = lambda x, at: x.at[at].get(mode="fill", fill_value=0)
    return jax.vmap(take)(x, numbers)


@jax.custom_vjp
def to_places(x_GTD: jax.Array, where: Places) -> jax.Array:
    """Return what lies at each place, [G, E, C, D]: a token, or zeros."""
    return _to_places(x_GTD, where)


def _to_places(x_GTD: jax.Array, where: Places) -> jax.Array:
    return _rows(x_GTD, where.choice_at // _k(where))


def _to_places_forward(x_GTD: jax.Array, where: Places) -> tuple[jax.Array, Places]:
    return _to_places(x_GTD, where), where


def _to_places_backward(where: Places, d_places: jax.Array) -> tuple[jax.Array, None]:
    flat = d_places.reshape(len(d_places), -1, d_places.shape[-1])
    return _sum_of(lambda j: _rows(flat, where.place_of[..., j]), where), None


to_places.defvjp(_to_places_forward, _to_places_backward)


@jax.custom_vjp
def from_places(y_places: jax.Array, where: Places) -> jax.Array:
    """Return the weighted sum of what each token's experts made of it, [G, T, D]."""
    return _from_places(y_places, where)


def _from_places(y_places: jax.Array, where: Places) -> jax.Array:
    rows = _made(y_places, where)
    weighed = lambda j: where.weights[..., j, None] * rows(j)
    return _sum_of(weighed, where).astype(y_places.dtype)


def _from_places_forward(
    y_places: jax.Array, where: Places
) -> tuple[jax.Array, tuple[jax.Array, Places]]:
    return _from_places(y_places, where), (y_places, where)


def _from_places_backward(saved: tuple[jax.Array, Places], dy_GTD: jax.Array) -> tuple:
    y_places, where = saved
    flat = where.weights.reshape(len(where.weights), -1, 1)
    d_places = _rows(flat, where.choice_at) * _rows(dy_GTD, where.choice_at // _k(where))
    rows, wide = _made(y_places, where), dy_GTD.astype(where.weights.dtype)
    d_weights = jnp.stack([(wide * rows(j)).sum(-1) for j in range(_k(where))], -1)
    return d_places.astype(y_places.dtype), Places(None, None, d_weights)  # type: ignore[arg-type]


from_places.defvjp(_from_places_forward, _from_places_backward)


def _k(where: Places) -> int:
    return where.place_of.shape[2]


def _made(y_places: jax.Array, where: Places) -> Callable[[int], jax.Array]:
    """Return number of a choice -> what its expert made of each token, [G, T, D]."""
    flat = y_places.reshape(len(y_places), -1, y_places.shape[-1])
    return lambda j: _rows(flat, where.place_of[..., j])


def _sum_of(of_choice: Callable[[int], jax.Array], where: Places) -> jax.Array:
    """Return the sum over the choices of a token."""
    total = of_choice(0)
    for j in range(1, _k(where)):
        total = total + of_choice(j)
    return total
