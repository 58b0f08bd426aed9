"""A function whose backward pass finds part of what it needs in host memory.

The pullback of `jax.vjp` is a tree of arrays. Those that follow from weights alone (casts, gathers)
are made again; of the others some go to the host as soon as they are made, and come back when the
gradient of the function's result is there.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.tree_util import Partial

from hfjax.parallel.jaxprs.program import Residuals, Tensor
from hfjax.parallel.offload.activations import Share, join, split
from hfjax.parallel.offload.host_memory import to_device, to_host

Choose = Callable[[Sequence[Tensor]], Share]


def kept(function: Callable, choose: Choose, barrier: bool = True) -> Callable:
    """Return `function(known, weights, x) -> (y, aux)`, parts of what it keeps on the host.

    It is differentiated with respect to weights and x. `choose` is told the tensors that depend on
    x and are needed for the backward pass. Outside of loops a barrier keeps XLA from dropping the
    round trip and from merging what is made again with what it was made from.
    """

    @jax.custom_vjp
    def run(known, weights, x) -> tuple[Any, Any]:
        return function(known, weights, x)

    def with_pullback(given: tuple, x) -> tuple[tuple, Callable]:
        known, weights = given
        of = lambda weights, x: function(known, weights, x)
        y, pullback, aux = jax.vjp(of, weights, x, has_aux=True)
        return (y, aux), pullback

    def forward(known, weights, x) -> tuple[tuple, Partial]:
        given = known, weights
        residuals = Residuals(with_pullback, given, x)
        share = choose(residuals.tensors)
        out, stash = residuals.forward(given, x)

        def pullback(parts: Sequence[tuple], constants: Sequence[Any], given: tuple) -> Callable:
            stash = join(share, ((to_device(gone), stayed) for gone, stayed in parts))
            return residuals.pullback(given, stash, constants)

        parts = [(_sent(goes, barrier), stays) for goes, stays in split(share, stash)]
        return out, Partial(pullback, parts, residuals.constants, given)

    def backward(waiting: Partial, cotangents: tuple) -> tuple:
        dy = cotangents[0]
        if barrier:
            waiting, dy = lax.optimization_barrier((waiting, dy))
        gradients, dx = waiting()(dy)
        return None, gradients, dx

    run.defvjp(forward, backward)
    return run


def _sent(arrays: list[jax.Array], barrier: bool) -> list[jax.Array]:
    there = to_host(arrays)
    return lax.optimization_barrier(there) if barrier and there else there
