"""What a model gives a loss in place of logits, where the logits are never made.

[B]atch, [S]equence, [D] embed, [V]ocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import jax

Loss = TypeVar("Loss", bound=Callable)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["x", "kernel"],
    meta_fields=["losses_of"],
)
@dataclass(frozen=True)
class Projection:
    """The two factors of the logits, and the function that makes losses of them."""

    x: jax.Array  # [B, S, D]
    kernel: jax.Array  # [V, D]
    losses_of: Callable

    def losses(self, targets_BS: jax.Array) -> jax.Array:
        """Return the cross entropy of each target."""
        return self.losses_of(self.x, self.kernel, targets_BS)


def takes_projection(loss: Loss) -> Loss:
    """Mark a loss(outputs, batch) that takes a `Projection` as well as logits."""
    marked: Any = loss
    marked.takes_projection = True
    return loss
