"""Run the experts on tokens: all of them, or a local subset. [G]roups, [E]xperts.

A layer passes a `Mixture` to the step's kernels, which may shard it over devices.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hfjax.models.moe.grouped import run_grouped
from hfjax.models.moe.slots import Slots, choices_at_slots, combine, dispatch


class DroplessRouting(NamedTuple):
    """The choices of each token, without a capacity."""

    experts: jax.Array  # [G, T, k]; a number beyond the experts means none
    weights: jax.Array  # [G, T, k]


@dataclass(frozen=True, eq=False)
class Mixture:
    """The experts of a layer.

    Attributes:
        experts: The number of experts.
        arrays: The stacked arrays of the local experts.
        apply: (arrays of one expert, [N, D]) -> [N, D].
        block: The number of rows of a matmul, without a capacity.
        tells: Whether the loss must use the router metrics.
    """

    experts: int
    arrays: Any
    apply: Callable
    block: int
    tells: bool = False

    @property
    def num_local(self) -> int:
        """The number of local experts."""
        return len(jax.tree.leaves(self.arrays)[0])

    def run_all(self, x_GTD: jax.Array, routing: Slots | DroplessRouting) -> jax.Array:
        """Return the combined output of all experts for these tokens; all experts are local."""
        if isinstance(routing, DroplessRouting):
            return self._run_grouped(x_GTD, routing)
        return self.from_experts(self.run(self.to_experts(x_GTD, routing)), routing)

    def to_experts(self, x_GTD: jax.Array, routing: Slots) -> jax.Array:
        """Return the tokens in the slots of each expert, [E, G C, D]."""
        slots_GECD = dispatch(x_GTD, routing)
        experts, width = slots_GECD.shape[1], slots_GECD.shape[3]
        return slots_GECD.swapaxes(0, 1).reshape(experts, -1, width)

    def from_experts(self, y_END: jax.Array, routing: Slots) -> jax.Array:
        """Return the combined expert outputs of the tokens of each group."""
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
        """Return the partial sum of the local experts, from number `first` on, for all tokens.

        Args:
            x_GTD: The tokens of all devices.
            routing: The routing of this device's tokens.
            all_gather: Function that all-gathers an array over the devices.
            first: The number of the first local expert.
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
        """Return the output of each local expert for its rows."""
        return jax.vmap(self.apply)(self.arrays, x_END)

    def _run_grouped(self, x_GTD: jax.Array, routing: DroplessRouting) -> jax.Array:
        flat = lambda x: x.reshape(-1, x.shape[-1])
        size, operands = self.block, (self.arrays, flat(x_GTD), *map(flat, routing))
        y: Any = run_grouped(self.apply, size, *operands)
        return y.reshape(x_GTD.shape)
