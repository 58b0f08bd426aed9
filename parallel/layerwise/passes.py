"""A pass over a batch written out, layer by layer: forward, the head, backward.

Nothing here is the derivative of a loop. What is done after each layer's backward pass is up to
the caller, so that no more than one layer's gradient has to wait for it. Layers that lie on the
host are fetched one ahead of the one that runs, forward and backward.

A pass over a batch through a list of layers: each is updated right after its backward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.base.paths import Flat
from hfjax.parallel.autodiff.dissect import Dissected, arrays_of, cotangents
from hfjax.parallel.engine.parts import Model
from hfjax.parallel.memory import is_on_host

Own = Any  # what changes layer by layer


@dataclass(frozen=True)
class ByLayer:
    """One pass over the rows of a device. `model.values` are not used: `near` and `far` give them.

    A layer that is fetched L times forward and L + 1 times backward in all, is one of L + 1: the
    last is fetched once more while it runs, and stays for its backward pass; the first while its
    backward pass runs, for nothing.
    """

    model: Model
    layers: int
    near: Callable  # (own, i) -> the stored parameters of a layer that are on the device
    far: Callable  # (own, i) -> those on the host, copied to the device
    after: Callable  # (own, i, stored parameters, gradients, told) -> own, after a backward pass
    unroll: int | bool = 1

    def run(self, own: Own, told: Callable) -> tuple[Own, Any, Any]:
        """Return what has changed, the gradients of the ends, and what `told(aux)` returns.

        `aux` is what the head tells, known before the first backward pass.
        """
        enter = lambda ends: self.model.first(ends, self._zero)
        x, leave = jax.vjp(enter, self.model.ends)
        (y, fetched), stashes = self._forward(own, x)
        dy, of_head, aux = heads_pass(self.model, y, self._zero)
        aux = told(aux)
        dx, own = self._backward(own, stashes, (dy, fetched), aux)
        (of_embed,) = leave(cotangents(dx))
        return own, jax.tree.map(jnp.add, of_head, of_embed), aux

    def evaluate(self, own: Own) -> Any:
        """Return what the head tells, without a backward pass."""
        x = self.model.first(self.model.ends, self._zero)
        (y, _), _ = self._forward(own, x, keeps=False)
        return self.model.last(self.model.ends, y, self._zero)[1]

    @cached_property
    def _zero(self) -> jax.Array:
        return jnp.int32(0)

    @cached_property
    def _numbers(self) -> jax.Array:
        return lax.iota("int32", self.layers)

    def _known(self, own: Own, fetched: Flat, i: Any) -> Any:
        return (self.near(own, i) | fetched, i, jnp.int32(0))

    def _passes(self, own: Own, fetched: Flat, x: Any) -> Dissected:
        known = self._known(own, fetched, jnp.int32(0))
        return self.model.passes(known, self.model.slots, x, False)

    def _forward(self, own: Own, x: Any, keeps: bool = True) -> tuple[Any, Any]:
        """Return what leaves the last layer with that layer, and what waits for backward passes."""

        def step(carry, i):
            x, fetched = carry
            coming = self.far(own, jnp.minimum(i + 1, self.layers - 1))
            y, stash, _ = passes.forward(self._known(own, fetched, i), x)
            return (y, coming), stash if keeps else None

        first = self.far(own, jnp.int32(0))
        passes = self._passes(own, first, x)
        return lax.scan(step, (x, first), self._numbers, unroll=self.unroll)

    def _backward(self, own: Own, stashes: Any, last: Any, told: Any) -> tuple[Any, Own]:
        def step(carry, layer):
            (dy, fetched), own = carry
            i, stash = layer
            coming = self.far(own, jnp.maximum(i - 1, 0))
            known = self._known(own, fetched, i)
            dx, gradients = passes.backward(known, stash, [], dy)
            fetched, coming = _arrived(fetched, coming)
            stored = self.near(own, i) | fetched
            return ((dx, coming), self.after(own, i, stored, gradients, told)), None

        passes = self._passes(own, last[1], last[0])
        layers = (self._numbers, stashes)
        (last, own), _ = lax.scan(step, (last, own), layers, reverse=True, unroll=self.unroll)
        return last[0], own


def heads_pass(model: Model, y: Any, number: Any) -> tuple[Any, Any, Any]:
    """Return the gradient of what enters the head, those of the ends, and what the head tells."""
    last = lambda ends, y: model.last(ends, y, number)
    total, pullback, aux = jax.vjp(last, model.ends, y, has_aux=True)
    gradients, dy = pullback(jnp.ones_like(total))
    return arrays_of(dy, y), gradients, aux


def _arrived(here: Flat, coming: Flat) -> tuple[Flat, Flat]:
    """Return both; what uses the first waits for the second, or XLA would fetch that last."""
    mine, coming = lax.optimization_barrier(({path: here[path] for path in coming}, coming))
    return here | mine, coming


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
