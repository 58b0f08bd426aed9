"""How tokens get to experts that lie on several devices, and back.

In `all_to_all` each device sends the places of an expert to the device that has it. In `gather`
every device is given all tokens and adds what its own experts make of them (a ring of experts).
`dispatch_kinds.py` counts what both send.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax


class ExpertsHere(Protocol):
    """What a model hands over: see hfjax/models/moe/experts.py."""

    def to_experts(self, x_GTD: jax.Array, routed: Any) -> jax.Array:
        """Return the rows of each expert, [E, N, D]."""
        ...

    def run(self, x_END: jax.Array) -> jax.Array:
        """Return what the experts that are here make of their rows."""
        ...

    def from_experts(self, y_END: jax.Array, routed: Any) -> jax.Array:
        """Return what the tokens get back."""
        ...

    def part(self, x_GTD: jax.Array, routed: Any, every: Callable, first: jax.Array) -> jax.Array:
        """Return what the experts that are here, from number `first` on, add to all tokens."""
        ...

    @property
    def here(self) -> int:
        """How many experts are here."""
        ...


def all_to_all(
    mixture: ExpertsHere, x_GTD: jax.Array, routed: Any, axes: tuple[str, ...]
) -> jax.Array:
    """Return what the experts of all devices make of the tokens here: places travel."""
    there = lax.all_to_all(mixture.to_experts(x_GTD, routed), axes, 0, 1, tiled=True)
    back = lax.all_to_all(mixture.run(there), axes, 1, 0, tiled=True)
    return mixture.from_experts(back, routed)


def gather(
    mixture: ExpertsHere, x_GTD: jax.Array, routed: Any, axes: tuple[str, ...], wide: bool = False
) -> jax.Array:
    """Return what the experts of all devices make of the tokens here: tokens travel.

    `wide`: sums are of float32, also where tokens are of bfloat16 (XLA aborts on these on CPUs).
    """
    narrow = jnp.issubdtype(x_GTD.dtype, jnp.floating) and x_GTD.dtype.itemsize < 4
    summed, every = _wide(axes) if wide and narrow else _as_they_are(axes)
    first = lax.axis_index(axes) * mixture.here
    return summed(mixture.part(every(x_GTD), routed, every, first))


def _as_they_are(axes: tuple[str, ...]) -> tuple[Callable, Callable]:
    """Return this device's part of the sum over devices, and what all devices have."""
    return (
        lambda x: lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True),
        lambda x: lax.all_gather(x, axes, axis=0, tiled=True),
    )


def _wide(axes: tuple[str, ...]) -> tuple[Callable, Callable]:
    """Return both with sums of float32; arrays that are gathered stay narrow."""
    summed, every = _as_they_are(axes)
    sum_of = lambda x: summed(x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)
    return _with_derivative(sum_of, every), _with_derivative(every, sum_of)


def _with_derivative(function: Callable, transposed: Callable) -> Callable:
    """Return a linear function whose derivative is another."""
    linear = jax.custom_vjp(function)
    linear.defvjp(lambda x: (function(x), None), lambda _, dy: (transposed(dy),))
    return linear
