"""A function with some of its residuals in host memory.

The pullback of `jax.vjp` is a tree of arrays. Those that depend on weights alone (casts, gathers)
are recomputed; of the others some are copied to the host as soon as they are computed, and back
when the gradient of the function's result is there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.tree_util import Partial

from hfjax.parallel.jaxprs.program import Residuals
from hfjax.parallel.jaxprs.saved_tensor import Tensor
from hfjax.parallel.offload.activations import Share, join, split
from hfjax.parallel.offload.host_memory import to_device, to_host

ChooseTensors = Callable[[Sequence[Tensor]], Share]


def save_residuals_on_host(
    function: Callable, choose_tensors: ChooseTensors, barrier: bool = True
) -> Callable:
    """Return `function(known, weights, x) -> (y, aux)`, with some of its residuals on the host.

    It is differentiated with respect to weights and x. `choose_tensors` is given the residuals that
    depend on x. Outside of loops a barrier keeps XLA from dropping the round trip and from merging
    recomputed values with the originals.
    """

    @jax.custom_vjp
    def run(known, weights, x) -> tuple[Any, Any]:
        return function(known, weights, x)

    def with_pullback(known_and_weights: tuple, x) -> tuple[tuple, Callable]:
        known, weights = known_and_weights
        call = lambda weights, x: function(known, weights, x)
        y, pullback, aux = jax.vjp(call, weights, x, has_aux=True)
        return (y, aux), pullback

    def forward(known, weights, x) -> tuple[tuple, Partial]:
        known_and_weights = known, weights
        residuals = Residuals(with_pullback, known_and_weights, x)
        share = choose_tensors(residuals.tensors)
        out, stash = residuals.forward(known_and_weights, x)

        def pullback(
            halves: Sequence[tuple], constants: Sequence[Any], known_and_weights: tuple
        ) -> Callable:
            stash = join(share, ((to_device(on_host), on_device) for on_host, on_device in halves))
            return residuals.pullback(known_and_weights, stash, constants)

        halves = [
            (_send_to_host(on_host, barrier), on_device)
            for on_host, on_device in split(share, stash)
        ]
        return out, Partial(pullback, halves, residuals.constants, known_and_weights)

    def backward(residuals: Partial, cotangents: tuple) -> tuple:
        dy = cotangents[0]
        if barrier:
            residuals, dy = lax.optimization_barrier((residuals, dy))
        gradients, dx = residuals()(dy)
        return None, gradients, dx

    run.defvjp(forward, backward)
    return run


def _send_to_host(arrays: list[jax.Array], barrier: bool) -> list[jax.Array]:
    host_arrays = to_host(arrays)
    return lax.optimization_barrier(host_arrays) if barrier and host_arrays else host_arrays
