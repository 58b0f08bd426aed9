"""All-gather then multiply, and multiply then reduce-scatter, are each other's gradient.

`pair` makes two differentiable functions of any two implementations. Nothing gathered is saved: the
gradient of the weights sends x (or the gradient) round once more, S - 1 shards over the links,
while it is multiplied (in plain JAX: XLA hides the one under the other).
The gradient of the activations multiplies by w transposed, which is a copy of w: 2 K N numbers of
traffic beside the product's 2 R K N flops.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax

from hfjax.pallas_kernels.ring_reference import gathered_gradient
from hfjax.pallas_kernels.varying import varying


class Pair(NamedTuple):
    """Two products, each `(x, w, axis, tuning)`, and each one's gradient by the other.

    A gradient is `(axis, tuning, (x, w), dy) -> (dx, dw)`.
    """

    gathered: Callable
    scattered: Callable
    of_gathered: Callable
    of_scattered: Callable


def pair(gather: Callable, scatter: Callable) -> Pair:
    """Return differentiable products of two implementations."""

    @partial(jax.custom_vjp, nondiff_argnums=(2, 3))
    def gathered(x, w, axis, tuning):
        return gather(x, w, axis, tuning)

    @partial(jax.custom_vjp, nondiff_argnums=(2, 3))
    def scattered(x, w, axis, tuning):
        return scatter(x, w, axis, tuning)

    def of_gathered(axis, tuning, saved, dy):
        x, w = saved
        dx = scattered(dy, w.T, axis, tuning)
        return _like(x, dx), _like(w, gathered_gradient(x, dy, axis))

    def of_scattered(axis, tuning, saved, dy):
        x, w = saved
        dx = gathered(dy, w.T, axis, tuning)
        return _like(x, dx), _like(w, gathered_gradient(dy, x, axis).T)

    gathered.defvjp(lambda x, w, axis, tuning: (gather(x, w, axis, tuning), (x, w)), of_gathered)
    scattered.defvjp(lambda x, w, axis, tuning: (scatter(x, w, axis, tuning), (x, w)), of_scattered)
    return Pair(gathered, scattered, of_gathered, of_scattered)


def _like(primal: Any, gradient: Any) -> jax.Array:
    """Return a gradient of the primal's type, summed over axes along which that does not vary."""
    extra = varying(gradient) - varying(primal)
    gradient = lax.psum(gradient, tuple(sorted(extra))) if extra else gradient
    return gradient.astype(primal.dtype)
