"""A pass over a batch through a list of layers: each is updated right after its backward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.by_layer import Own, heads_pass
from hfjax.parallel.dissect import arrays_of, cotangents
from hfjax.parallel.pipeline import Model


@dataclass(frozen=True)
class ByItem:
    """One pass over the rows of a device, without a loop: layers may be unlike."""

    model: Model  # of which first, last and ends are used
    layers: Sequence[Callable]  # (own, slots, x) -> y
    slots: Sequence[Any]  # of each layer
    update: Callable  # (own, i, gradients, told) -> own
    mark: Callable  # marks a tree as differing between devices

    def run(self, own: Own, told: Callable) -> tuple[Own, Any, Any]:
        """Return what was updated, the gradients of the ends, and what `told(aux)` returns."""
        number = self.mark(jnp.int32(0))
        x, leave = jax.vjp(lambda ends: self.mark(self.model.first(ends, number)), self.model.ends)
        pullbacks = []
        for layer, slots in zip(self.layers, self.slots, strict=True):
            inside, run = x, lambda slots, x, layer=layer: self.mark(layer(own, slots, x))
            x, pullback = jax.vjp(run, slots, x)
            pullbacks.append((pullback, inside))
        dx, of_head, aux = heads_pass(self.model, x, number, self.mark)
        aux = told(aux)
        for i, (pullback, inside) in reversed(list(enumerate(pullbacks))):
            gradients, dx = pullback(cotangents(dx))
            own = self.update(own, i, gradients, aux)
            dx, _ = lax.optimization_barrier((arrays_of(dx, inside), own))  # updated before
        (of_embed,) = leave(cotangents(dx))
        return own, jax.tree.map(jnp.add, of_head, of_embed), aux
