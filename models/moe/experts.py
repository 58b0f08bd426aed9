"""What experts make of tokens: the whole, or the part of some experts. [G]roups, [E]xperts.

A `Mixture` is what a layer hands to the step's kernels, which may spread it over devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hfjax.models.moe.grouped import run_grouped
from hfjax.models.moe.slots import Slots, choices_at_slots, combine, dispatch


class DroplessRouting(NamedTuple):
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
    def num_local(self) -> int:
        """How many experts are here."""
        return len(jax.tree.leaves(self.arrays)[0])

    def run_all(self, x_GTD: jax.Array, routing: Slots | DroplessRouting) -> jax.Array:
        """Return what all experts make of these tokens; all of them are here."""
        if isinstance(routing, DroplessRouting):
            return self._run_grouped(x_GTD, routing)
        return self.from_experts(self.run(self.to_experts(x_GTD, routing)), routing)

    def to_experts(self, x_GTD: jax.Array, routing: Slots) -> jax.Array:
        """Return what lies at the places of each expert, [E, G C, D]."""
        slots_GECD = dispatch(x_GTD, routing)
        experts, width = slots_GECD.shape[1], slots_GECD.shape[3]
        return slots_GECD.swapaxes(0, 1).reshape(experts, -1, width)

    def from_experts(self, y_END: jax.Array, routing: Slots) -> jax.Array:
        """Return what the tokens of each group get back."""
        groups, experts, size = routing.choice_at.shape
        y_EGCD = y_END.reshape(experts, groups, size, -1)
        return combine(y_EGCD.swapaxes(0, 1), routing)

    def partial_output(
        self,
        x_GTD: jax.Array,
        routing: Slots | DroplessRouting,
        all_gather: Callable,
        first: jax.Array,
    ) -> jax.Array:
        """Return what the experts that are here, from number `first` on, add to all tokens.

        Args:
            x_GTD: The tokens of all devices.
            routing: Where those of this device go.
            all_gather: What makes an array of this device one of all devices.
            first: The number of the first expert that is here.
        """
        numbers, weights = map(all_gather, routing[-2:])
        if isinstance(routing, DroplessRouting):
            return self._run_grouped(x_GTD, DroplessRouting(numbers - first, weights))
        size = routing.choice_at.shape[2]
        slot, count = numbers - first * size, self.num_local * size
        inside = (slot >= 0) & (slot < count)
        slot = jnp.where(inside, slot, count)
        choice_at = choices_at_slots(slot, count).reshape(len(slot), self.num_local, size)
        return self.run_all(x_GTD, Slots(choice_at, slot, jnp.where(inside, weights, 0)))

    def run(self, x_END: jax.Array) -> jax.Array:
        """Return what each expert that is here makes of its rows."""
        return jax.vmap(self.apply)(self.arrays, x_END)

    def _run_grouped(self, x_GTD: jax.Array, routing: DroplessRouting) -> jax.Array:
        flat = lambda x: x.reshape(-1, x.shape[-1])
        size, operands = self.block, (self.arrays, flat(x_GTD), *map(flat, routing))
        y: Any = run_grouped(self.apply, size, *operands)
        return y.reshape(x_GTD.shape)
