"""What experts make of tokens: the whole, or the part of some experts. [G]roups, [E]xperts.

A `Mixture` is what a layer hands to the step's kernels, which may spread it over devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hfjax.models.moe.grouped import in_blocks
from hfjax.models.moe.slots import Places, choices_at, from_places, to_places


class Choices(NamedTuple):
    """What each token chose, where an expert takes all that come."""

    experts: jax.Array  # [G, T, k]; a number of no expert is none
    weights: jax.Array  # [G, T, k]


@dataclass(frozen=True, eq=False)
class Mixture:
    """The experts of a layer.

    Attributes:
        experts: How many there are.
        arrays: Those of the experts that are here, stacked.
        apply: (arrays of one expert, [N, D]) -> [N, D].
        block: Rows of a product, where there is no capacity.
        tells: Whether the loss has to take part in what the router tells.
    """

    experts: int
    arrays: Any
    apply: Callable
    block: int
    tells: bool = False

    @property
    def here(self) -> int:
        """How many experts are here."""
        return len(jax.tree.leaves(self.arrays)[0])

    def whole(self, x_GTD: jax.Array, routed: Places | Choices) -> jax.Array:
        """Return what all experts make of these tokens; all of them are here."""
        if isinstance(routed, Choices):
            return self._in_blocks(x_GTD, routed)
        return self.from_experts(self.run(self.to_experts(x_GTD, routed)), routed)

    def to_experts(self, x_GTD: jax.Array, routed: Places) -> jax.Array:
        """Return what lies at the places of each expert, [E, G C, D]."""
        places_GECD = to_places(x_GTD, routed)
        experts, width = places_GECD.shape[1], places_GECD.shape[3]
        return places_GECD.swapaxes(0, 1).reshape(experts, -1, width)

    def from_experts(self, y_END: jax.Array, routed: Places) -> jax.Array:
        """Return what the tokens of each group get back."""
        groups, experts, size = routed.choice_at.shape
        made = y_END.reshape(experts, groups, size, -1)
        return from_places(made.swapaxes(0, 1), routed)

    def part(
        self, x_GTD: jax.Array, routed: Places | Choices, every: Callable, first: jax.Array
    ) -> jax.Array:
        """Return what the experts that are here, from number `first` on, add to all tokens.

        Args:
            x_GTD: The tokens of all devices.
            routed: Where those of this device go.
            every: What makes an array of this device one of all devices.
            first: The number of the first expert that is here.
        """
        numbers, weights = map(every, routed[-2:])
        if isinstance(routed, Choices):
            return self._in_blocks(x_GTD, Choices(numbers - first, weights))
        size = routed.choice_at.shape[2]
        place, count = numbers - first * size, self.here * size
        inside = (place >= 0) & (place < count)
        place = jnp.where(inside, place, count)
        choice_at = choices_at(place, count).reshape(len(place), self.here, size)
        return self.whole(x_GTD, Places(choice_at, place, jnp.where(inside, weights, 0)))

    def run(self, x_END: jax.Array) -> jax.Array:
        """Return what each expert that is here makes of its rows."""
        return jax.vmap(self.apply)(self.arrays, x_END)

    def _in_blocks(self, x_GTD: jax.Array, routed: Choices) -> jax.Array:
        flat = lambda x: x.reshape(-1, x.shape[-1])
        size, given = self.block, (self.arrays, flat(x_GTD), *map(flat, routed))
        made: Any = in_blocks(self.apply, size, *given)
        return made.reshape(x_GTD.shape)
