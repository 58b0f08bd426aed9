"""Placement of layers: the order in which the stages of a pipeline store them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np

Homes = Sequence[tuple[int, int]]  # virtual stage -> (stage, chunk)


@dataclass(frozen=True, eq=False)
class Arrangement:
    """The number of the layer in each slot, [stages, chunks, units]; -1: an empty slot.

    Stored arrays have one entry per slot, stage by stage. With as many layers on each stage and
    one chunk these are the model's own arrays.
    """

    order: np.ndarray

    @cached_property
    def stored_order(self) -> np.ndarray:
        """The layer of each stored entry."""
        return self.order.reshape(-1)

    @cached_property
    def storage_index(self) -> np.ndarray:
        """The stored entry of each layer."""
        return np.argsort(
            np.where(self.stored_order < 0, self.stored_order.size, self.stored_order)
        )[: self.layers]

    @property
    def layers(self) -> int:
        """How many layers the model has."""
        return int((self.stored_order >= 0).sum())

    @cached_property
    def virtual(self) -> np.ndarray:
        """The virtual stage of each chunk, [stages, chunks], counted in the model's order."""
        first = self.order[:, :, 0]
        return np.argsort(np.argsort(first, axis=None)).reshape(first.shape)

    @property
    def homes(self) -> tuple[tuple[int, int], ...]:
        """The stage and chunk of each virtual stage."""
        indices = np.argsort(self.virtual, axis=None)
        return tuple(divmod(int(index), self.order.shape[1]) for index in indices)

    @property
    def stage_layers(self) -> list[list[int]]:
        """The numbers of the layers of each virtual stage.

        >>> arrange([2, 1], [(0, 0), (1, 0)]).stage_layers
        [[0, 1], [2]]
        """
        return [[int(n) for n in self.order[home] if n >= 0] for home in self.homes]

    def store(self, array: jax.Array, dim: int = 0) -> jax.Array:
        """Return stacked layers in stored order; empty slots hold zeros."""
        out = jnp.take(array, np.maximum(self.stored_order, 0), axis=dim)
        occupied = (self.stored_order >= 0).reshape(-1, *(1,) * (array.ndim - dim - 1))
        return out if occupied.all() else jnp.where(occupied, out, jnp.zeros((), array.dtype))

    def restore(self, array: jax.Array, dim: int = 0) -> jax.Array:
        """Return the layers in the model's order."""
        return jnp.take(array, self.storage_index, axis=dim)


def arrange(counts: Sequence[int], homes: Homes) -> Arrangement:
    """Return the arrangement with `counts[g]` layers on virtual stage g, in the model's order.

    >>> arrange([2, 1], [(0, 0), (1, 0)]).order.tolist()
    [[[0, 1]], [[2, -1]]]
    """
    stages = 1 + max(stage for stage, _ in homes)
    order = np.full((stages, len(homes) // stages, max(counts)), -1)
    first = 0
    for count, home in zip(counts, homes, strict=True):
        order[home][:count] = range(first, first + count)
        first += count
    return Arrangement(order)


def layer_counts(layers: int, virtual: int, balance: str | Sequence[int] = "even") -> list[int]:
    """Return how many layers each virtual stage has: as given, or even, the last ones fewer.

    >>> layer_counts(30, 4)
    [8, 8, 7, 7]
    """
    if layers < virtual:
        raise ValueError(
            f"{layers} layers for {virtual} parts (stages x chunks): each needs at least one. "
            "Use fewer stages (a smaller pipe axis) or fewer chunks."
        )
    even = [layers // virtual + (g < layers % virtual) for g in range(virtual)]
    sizes = even if isinstance(balance, str) else list(balance)
    if len(sizes) != virtual or sum(sizes) != layers or min(sizes) < 1:
        raise ValueError(
            f"balance={sizes} has {len(sizes)} parts of {sum(sizes)} layers, at least "
            f"{min(sizes)} each; the model has {layers} layers for {virtual} parts (stages x "
            f"chunks), at least one each. For instance balance={even}."
        )
    return sizes


def balance_layers(costs: Sequence[float], virtual: int) -> list[int]:
    """Return the layer counts that minimize the cost of the most expensive virtual stage.

    >>> balance_layers([1, 1, 1, 3, 3], 3)
    [3, 1, 1]
    """
    layer_counts(len(costs), virtual)  # refuses too few layers
    sums = np.concatenate([[0.0], np.cumsum(costs)])
    best = np.full((virtual + 1, len(costs) + 1), math.inf)
    boundaries = np.zeros((virtual + 1, len(costs) + 1), int)
    best[0, 0] = 0
    for stage in range(1, virtual + 1):
        for end in range(stage, len(costs) + 1):
            dearest = [max(best[stage - 1, at], sums[end] - sums[at]) for at in range(end)]
            boundaries[stage, end] = int(np.argmin(dearest))
            best[stage, end] = dearest[boundaries[stage, end]]
    ends = [len(costs)]
    for stage in range(virtual, 0, -1):
        ends.append(int(boundaries[stage, ends[-1]]))
    return [int(n) for n in -np.diff(ends)[::-1]]
