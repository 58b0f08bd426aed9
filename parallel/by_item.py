"""A pass over a batch through a list of layers: each is updated right after its backward pass."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.by_layer import Own, heads_pass
from hfjax.parallel.dissect import arrays_of, cotangents
from hfjax.parallel.memory import is_on_host
from hfjax.parallel.model import Model


@dataclass(frozen=True)
class ByItem:
    """One pass over the rows of a device, without a loop: layers may be unlike."""

    model: Model  # of which first, last and ends are used
    layers: Sequence[Callable]  # (stored parameters, slots, x) -> y
    stored: Callable  # (own, i) -> the stored parameters of a layer
    slots: Sequence[Any]  # of each layer
    after: Callable  # (own, i, stored parameters, gradients, told) -> own, after a backward pass

    def run(self, own: Own, told: Callable) -> tuple[Own, Any, Any]:
        """Return what has changed, the gradients of the ends, and what `told(aux)` returns."""
        number = jnp.int32(0)
        x, leave = jax.vjp(lambda ends: self.model.first(ends, number), self.model.ends)
        pullbacks = []
        for i, slots in enumerate(self.slots):
            inside, run = x, lambda slots, x, i=i: self._layer(i, own, slots, x)
            x, pullback = jax.vjp(run, slots, x)
            pullbacks.append((pullback, inside))
        dx, of_head, aux = heads_pass(self.model, x, number)
        aux = told(aux)
        for i, (pullback, inside) in reversed(list(enumerate(pullbacks))):
            gradients, dx = pullback(cotangents(dx))
            own = self.after(own, i, self.stored(own, i), gradients, aux)
            dx, _ = lax.optimization_barrier((arrays_of(dx, inside), own))  # updated before
        (of_embed,) = leave(cotangents(dx))
        return own, jax.tree.map(jnp.add, of_head, of_embed), aux

    def evaluate(self, own: Own) -> Any:
        """Return what the head tells, without a backward pass."""
        number = jnp.int32(0)
        x = self.model.first(self.model.ends, number)
        for i in range(len(self.layers)):
            x = self._layer(i, own, {}, x)
        return self.model.last(self.model.ends, x, number)[1]

    def _layer(self, i: int, own: Own, slots: Any, x: Any) -> Any:
        """Return what a layer makes of x; from the host nothing comes before x is there."""
        stored = self.stored(own, i)
        far = {path: value for path, value in stored.items() if is_on_host(value)}
        if far:
            far, _ = lax.optimization_barrier((far, lax.stop_gradient(x)))
        return self.layers[i](stored | far, slots, x)
