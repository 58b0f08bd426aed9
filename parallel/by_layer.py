"""A pass over a batch written out, layer by layer: forward, the head, backward with updates.

Nothing here is the derivative of a loop: what is done after each layer's backward pass is up to
the caller, so that no more than one layer's gradient has to wait for it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.dissect import Dissected, arrays_of, cotangents
from hfjax.parallel.pipeline import Model

Own = Any  # what is updated layer by layer


@dataclass(frozen=True)
class ByLayer:
    """One pass over the rows of a device. `model.values` are not used: `values` gives them."""

    model: Model
    layers: int
    values: Callable  # (own, i) -> the stored parameters of a layer
    update: Callable  # (own, i, gradients, told) -> own, after the backward pass of a layer
    mark: Callable  # marks a tree as differing between devices
    unroll: int | bool = 1

    def run(self, own: Own, told: Callable) -> tuple[Own, Any, Any]:
        """Return what was updated, the gradients of the ends, and what `told(aux)` returns.

        `aux` is what the head tells, known before the first backward pass.
        """
        number = self.mark(jnp.int32(0))
        enter = lambda ends: self.mark(self.model.first(ends, number))
        x, leave = jax.vjp(enter, self.model.ends)
        y, stashes = self._forward(own, x)
        dy, of_head, aux = heads_pass(self.model, y, number, self.mark)
        aux = told(aux)
        dx, own = self._backward(own, stashes, dy, aux)
        (of_embed,) = leave(cotangents(dx))
        return own, jax.tree.map(jnp.add, of_head, of_embed), aux

    @cached_property
    def _numbers(self) -> jax.Array:
        return lax.iota("int32", self.layers)

    def _known(self, own: Own, i: Any) -> Any:
        return self.mark((self.values(own, i), i, jnp.int32(0)))

    def _passes(self, own: Own, x: Any) -> Dissected:
        return self.model.passes(self._known(own, jnp.int32(0)), self.model.slots, x, False)

    def _forward(self, own: Own, x: Any) -> tuple[Any, Any]:
        """Return what leaves the last layer, and what waits for the backward passes."""

        def step(x, i):
            y, stash, _ = passes.forward(self._known(own, i), x)
            return self.mark(y), stash

        passes = self._passes(own, x)
        return lax.scan(step, x, self._numbers, unroll=self.unroll)

    def _backward(self, own: Own, stashes: Any, dy: Any, told: Any) -> tuple[Any, Own]:
        def step(carry, layer):
            dy, own = carry
            i, stash = layer
            dx, gradients = passes.backward(self._known(own, i), stash, [], dy)
            return (self.mark(dx), self.update(own, i, gradients, told)), None

        passes = self._passes(own, dy)
        layers = (self._numbers, stashes)
        return lax.scan(step, (dy, own), layers, reverse=True, unroll=self.unroll)[0]


def heads_pass(model: Model, y: Any, number: Any, mark: Callable) -> tuple[Any, Any, Any]:
    """Return the gradient of what enters the head, those of the ends, and what the head tells."""
    last = lambda ends, y: mark(model.last(ends, y, number))
    total, pullback, aux = jax.vjp(last, model.ends, y, has_aux=True)
    gradients, dy = pullback(mark(jnp.ones_like(total)))
    return arrays_of(dy, y), gradients, aux
