"""A pass over a batch written out, layer by layer: forward, head, backward.

Nothing here is the derivative of a loop. The caller decides what happens after each layer's
backward pass, so no more than one layer's gradient has to wait. Layers on the host are fetched one
ahead of the layer that runs, forward and backward. `StackedPasses` is for stacked arrays,
`ListedPasses` for a list of layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.jaxprs.split_backward import Dissected
from hfjax.parallel.jaxprs.stage_fns import ModelParts, arrays_of, cotangents
from hfjax.parallel.offload.host_memory import is_on_host
from hfjax.utils.paths import Flat, Index

Carry = Any  # what changes layer by layer


@dataclass(frozen=True)
class StackedPasses:
    """One pass over the rows of a device. `model.values` are not used: `near` and `far` give them.

    A layer that is fetched L times forward and L + 1 times backward in all, is one of L + 1: the
    last is fetched once more while it runs, and stays for its backward pass; the first while its
    backward pass runs, for nothing.
    """

    model: ModelParts
    layers: int
    near: Callable  # (carry, i) -> the stored parameters of a layer that are on the device
    far: Callable  # (carry, i) -> those on the host, copied to the device
    after: Callable  # (carry, i, stored, gradients, told) -> carry, after a backward pass
    unroll: int | bool = 1

    def run(self, carry: Carry, told: Callable) -> tuple[Carry, Any, Any]:
        """Return what has changed, the gradients outside the layers, and what is told.

        The head tells the Mean before the first backward pass; `told(Mean)` is (what is told,
        divisor), and gradients are those of total / divisor.
        """
        x, leave = self.model.embed_pass(self._zero)
        (y, fetched), stashes = self._forward(carry, x)
        dy, of_head, aux, _ = self.model.head_pass(y, self._zero, told)
        dx, carry = self._backward(carry, stashes, (dy, fetched), aux)
        return carry, jax.tree.map(jnp.add, of_head, leave(dx)), aux

    def evaluate(self, carry: Carry) -> Any:
        """Return what the head tells, without a backward pass."""
        x = self.model.first(self.model.outside, self._zero)
        (y, _), _ = self._forward(carry, x, keeps=False)
        return self.model.last(self.model.outside, y, self._zero)[1]

    @cached_property
    def _zero(self) -> jax.Array:
        return jnp.int32(0)

    @cached_property
    def _numbers(self) -> jax.Array:
        return lax.iota("int32", self.layers)

    def _known(self, carry: Carry, fetched: Flat, i: Index) -> tuple[Flat, Index, jax.Array]:
        return (self.near(carry, i) | fetched, i, jnp.int32(0))

    def _passes(self, carry: Carry, fetched: Flat, x: Any) -> Dissected:
        known = self._known(carry, fetched, jnp.int32(0))
        return self.model.passes(known, self.model.slots, x, False)

    def _forward(self, carry: Carry, x: Any, keeps: bool = True) -> tuple[Any, Any]:
        """Return what leaves the last layer with that layer, and what waits for backward passes."""

        def step(running: tuple, i: jax.Array) -> tuple[tuple, Any]:
            x, fetched = running
            coming = self.far(carry, jnp.minimum(i + 1, self.layers - 1))
            y, stash, _ = passes.forward(self._known(carry, fetched, i), x)
            return (y, coming), stash if keeps else None

        first = self.far(carry, jnp.int32(0))
        passes = self._passes(carry, first, x)
        return lax.scan(step, (x, first), self._numbers, unroll=self.unroll)

    def _backward(self, carry: Carry, stashes: Any, last: tuple, told: Any) -> tuple[Any, Carry]:
        def step(running: tuple, layer: tuple) -> tuple[tuple, None]:
            (dy, fetched), carry = running
            i, stash = layer
            coming = self.far(carry, jnp.maximum(i - 1, 0))
            known = self._known(carry, fetched, i)
            dx, gradients = passes.backward(known, stash, [], dy)
            fetched, coming = _arrived(fetched, coming)
            stored = self.near(carry, i) | fetched
            return ((dx, coming), self.after(carry, i, stored, gradients, told)), None

        passes = self._passes(carry, last[1], last[0])
        layers = (self._numbers, stashes)
        (last, carry), _ = lax.scan(step, (last, carry), layers, reverse=True, unroll=self.unroll)
        return last[0], carry


def _arrived(here: Flat, coming: Flat) -> tuple[Flat, Flat]:
    """Return both; what uses the first waits for the second, or XLA would fetch that last."""
    mine, coming = lax.optimization_barrier(({path: here[path] for path in coming}, coming))
    return here | mine, coming


@dataclass(frozen=True)
class ListedPasses:
    """One pass over the rows of a device, without a loop: layers may be unlike."""

    model: ModelParts  # of which first, last and outside are used
    layers: Sequence[Callable]  # (stored parameters, slots, x) -> y
    stored: Callable  # (carry, i) -> the stored parameters of a layer
    slots: Sequence[Any]  # of each layer
    after: Callable  # (carry, i, stored, gradients, told) -> carry, after a backward pass

    def run(self, carry: Carry, told: Callable) -> tuple[Carry, Any, Any]:
        """Return what changed, the gradients outside the layers, and what is told."""
        number = jnp.int32(0)
        x, leave = self.model.embed_pass(number)
        pullbacks = []
        for i, slots in enumerate(self.slots):
            inside, run = x, lambda slots, x, i=i: self._layer(i, carry, slots, x)
            x, pullback = jax.vjp(run, slots, x)
            pullbacks.append((pullback, inside))
        dx, of_head, aux, _ = self.model.head_pass(x, number, told)
        for i, (pullback, inside) in reversed(list(enumerate(pullbacks))):
            gradients, dx = pullback(cotangents(dx))
            carry = self.after(carry, i, self.stored(carry, i), gradients, aux)
            dx, _ = lax.optimization_barrier((arrays_of(dx, inside), carry))  # updated before
        return carry, jax.tree.map(jnp.add, of_head, leave(dx)), aux

    def evaluate(self, carry: Carry) -> Any:
        """Return what the head tells, without a backward pass."""
        number = jnp.int32(0)
        x = self.model.first(self.model.outside, number)
        for i in range(len(self.layers)):
            x = self._layer(i, carry, {}, x)
        return self.model.last(self.model.outside, x, number)[1]

    def _layer(self, i: int, carry: Carry, slots: Flat, x: Any) -> Any:
        """Return what a layer makes of x; from the host nothing comes before x is there."""
        stored = self.stored(carry, i)
        far = {path: value for path, value in stored.items() if is_on_host(value)}
        if far:
            far, _ = lax.optimization_barrier((far, lax.stop_gradient(x)))
        return self.layers[i](stored | far, slots, x)
