"""A pass over a batch written out, layer by layer: forward, head, backward.

Nothing here is the derivative of a loop. The caller decides what happens after each layer's
backward pass, so no more than one layer's gradient has to wait. Layers on the host are prefetched,
one ahead of the layer that runs, forward and backward. `StackedPasses` is for stacked arrays,
`ListedPasses` for a list of layers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.jaxprs.split_backward import SplitBackward
from hfjax.parallel.jaxprs.stage_fns import StageFns, to_arrays, to_cotangents
from hfjax.parallel.offload.host_memory import is_on_host
from hfjax.utils.paths import Flat, Index

Carry = Any  # what changes layer by layer


@dataclass(frozen=True)
class StackedPasses:
    """One pass over the examples of a device, with `device_params` and `host_params`.

    L layers on the host are copied L + 1 times forward and L times backward: the last once more
    while it runs, and stays for its backward pass; the first while its backward pass runs, for
    nothing.
    """

    model: StageFns
    layers: int
    device_params: Callable  # (carry, i) -> the stored parameters of a layer that are on the device
    host_params: Callable  # (carry, i) -> those on the host, copied to the device
    after_backward: Callable  # (carry, i, params, gradients, aux) -> carry, after a backward pass
    unroll: int | bool = 1

    def run(self, carry: Carry, loss_and_divisor: Callable) -> tuple[Carry, Any, Any]:
        """Return the carry, the gradients outside the layers, and auxiliary outputs.

        The head reports (Mean, outputs or None) before the first backward pass;
        `loss_and_divisor` of that is (auxiliary outputs, divisor), and gradients are those of
        total / divisor.
        """
        x, embed_pullback = self.model.embed_pass(self._zero)
        (y, prefetched), stashes = self._forward(carry, x)
        dy, of_head, aux, _ = self.model.head_pass(y, self._zero, loss_and_divisor)
        dx, carry = self._backward(carry, stashes, (dy, prefetched), aux)
        return carry, jax.tree.map(jnp.add, of_head, embed_pullback(dx)), aux

    def evaluate(self, carry: Carry) -> Any:
        """Return the head's auxiliary outputs, without a backward pass."""
        x = self.model.embed(self.model.outer_params, self._zero)
        (y, _), _ = self._forward(carry, x, keeps=False)
        return self.model.head(self.model.outer_params, y, self._zero)[1]

    @cached_property
    def _zero(self) -> jax.Array:
        return jnp.int32(0)

    @cached_property
    def _numbers(self) -> jax.Array:
        return lax.iota("int32", self.layers)

    def _known_values(
        self, carry: Carry, prefetched: Flat, i: Index
    ) -> tuple[Flat, Index, jax.Array]:
        return (self.device_params(carry, i) | prefetched, i, jnp.int32(0))

    def _passes(self, carry: Carry, prefetched: Flat, x: Any) -> SplitBackward:
        known = self._known_values(carry, prefetched, jnp.int32(0))
        return self.model.layer_passes(known, self.model.slots, x, False)

    def _forward(self, carry: Carry, x: Any, keeps: bool = True) -> tuple[Any, Any]:
        """Return the last layer's output and parameters, and the stashes for backward passes."""

        def step(running: tuple, i: jax.Array) -> tuple[tuple, Any]:
            x, prefetched = running
            upcoming = self.host_params(carry, jnp.minimum(i + 1, self.layers - 1))
            y, stash, _ = passes.forward(self._known_values(carry, prefetched, i), x)
            return (y, upcoming), stash if keeps else None

        first = self.host_params(carry, jnp.int32(0))
        passes = self._passes(carry, first, x)
        return lax.scan(step, (x, first), self._numbers, unroll=self.unroll)

    def _backward(
        self, carry: Carry, stashes: Any, last: tuple, loss_mean: Any
    ) -> tuple[Any, Carry]:
        def step(running: tuple, layer: tuple) -> tuple[tuple, None]:
            (dy, prefetched), carry = running
            i, stash = layer
            upcoming = self.host_params(carry, jnp.maximum(i - 1, 0))
            known = self._known_values(carry, prefetched, i)
            dx, gradients = passes.backward(known, stash, [], dy)
            prefetched, upcoming = _await_prefetch(prefetched, upcoming)
            params = self.device_params(carry, i) | prefetched
            return (
                (dx, upcoming),
                self.after_backward(carry, i, params, gradients, loss_mean),
            ), None

        passes = self._passes(carry, last[1], last[0])
        layers = (self._numbers, stashes)
        (last, carry), _ = lax.scan(step, (last, carry), layers, reverse=True, unroll=self.unroll)
        return last[0], carry


def _await_prefetch(current: Flat, upcoming: Flat) -> tuple[Flat, Flat]:
    """Return both; what uses the first waits for the second, or XLA would copy that last."""
    mine, upcoming = lax.optimization_barrier(
        ({path: current[path] for path in upcoming}, upcoming)
    )
    return current | mine, upcoming


@dataclass(frozen=True)
class ListedPasses:
    """One pass over the examples of a device, without a loop: layers may differ."""

    model: StageFns  # of which embed, head and outer_params are used
    layers: Sequence[Callable]  # (stored parameters, slots, x) -> y
    params: Callable  # (carry, i) -> the stored parameters of a layer
    slots: Sequence[Any]  # of each layer
    after_backward: Callable  # (carry, i, params, gradients, aux) -> carry, after a backward pass

    def run(self, carry: Carry, loss_and_divisor: Callable) -> tuple[Carry, Any, Any]:
        """Return the carry, the gradients outside the layers, and auxiliary outputs."""
        number = jnp.int32(0)
        x, embed_pullback = self.model.embed_pass(number)
        pullbacks = []
        for i, slots in enumerate(self.slots):
            layer_input, run = x, lambda slots, x, i=i: self._layer(i, carry, slots, x)
            x, pullback = jax.vjp(run, slots, x)
            pullbacks.append((pullback, layer_input))
        dx, of_head, aux, _ = self.model.head_pass(x, number, loss_and_divisor)
        for i, (pullback, layer_input) in reversed(list(enumerate(pullbacks))):
            gradients, dx = pullback(to_cotangents(dx))
            carry = self.after_backward(carry, i, self.params(carry, i), gradients, aux)
            dx, _ = lax.optimization_barrier((to_arrays(dx, layer_input), carry))  # updated before
        return carry, jax.tree.map(jnp.add, of_head, embed_pullback(dx)), aux

    def evaluate(self, carry: Carry) -> Any:
        """Return the head's auxiliary outputs, without a backward pass."""
        number = jnp.int32(0)
        x = self.model.embed(self.model.outer_params, number)
        for i in range(len(self.layers)):
            x = self._layer(i, carry, {}, x)
        return self.model.head(self.model.outer_params, x, number)[1]

    def _layer(self, i: int, carry: Carry, slots: Flat, x: Any) -> Any:
        """Return the output of a layer on x; nothing is copied from the host before x is ready."""
        params = self.params(carry, i)
        far = {path: value for path, value in params.items() if is_on_host(value)}
        if far:
            far, _ = lax.optimization_barrier((far, lax.stop_gradient(x)))
        return self.layers[i](params | far, slots, x)
