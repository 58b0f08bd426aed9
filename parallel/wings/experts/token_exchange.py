"""How tokens get to experts that lie on several devices, and back.

In `all_to_all` each device sends the places of an expert to the device that has it. In `gather`
every device is given all tokens and adds what its own experts make of them (a ring of experts).
`dispatch.py` counts what both send.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax


class ExpertsHere(Protocol):
    """What a model hands over: see hfjax/models/moe/mixture.py."""

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


def all_to_all(mixture: ExpertsHere, x_GTD: jax.Array, routed: Any, axes: Any) -> jax.Array:
    """Return what the experts of all devices make of the tokens here: places travel."""
    there = lax.all_to_all(mixture.to_experts(x_GTD, routed), axes, 0, 1, tiled=True)
    back = lax.all_to_all(mixture.run(there), axes, 1, 0, tiled=True)
    return mixture.from_experts(back, routed)


def gather(
    mixture: ExpertsHere, x_GTD: jax.Array, routed: Any, axes: Any, wide: bool = False
) -> jax.Array:
    """Return what the experts of all devices make of the tokens here: tokens travel.

    `wide`: sums are of float32, also where tokens are of bfloat16 (XLA aborts on these on CPUs).
    """
    every = partial(_every, axes, wide)
    first = lax.axis_index(axes) * mixture.here
    return _summed(axes, wide, mixture.part(every(x_GTD), routed, every, first))


def _summed(axes: Any, wide: bool, x: jax.Array) -> jax.Array:
    """Return this device's part of the sum over devices."""
    sent = x.astype(jnp.promote_types(x.dtype, jnp.float32)) if wide else x
    return lax.psum_scatter(sent, axes, scatter_dimension=0, tiled=True).astype(x.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gathered(axes: Any, wide: bool, x: jax.Array) -> jax.Array:
    return lax.all_gather(x, axes, axis=0, tiled=True)


_gathered.defvjp(
    lambda axes, wide, x: (_gathered(axes, wide, x), None),
    lambda axes, wide, _, dy: (_summed(axes, wide, dy),),
)


def _every(axes: Any, wide: bool, x: jax.Array) -> jax.Array:
    """Return what all devices have of an array."""
    narrow = jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize < 4
    if wide and narrow:  # the derivative is a sum
        return _gathered(axes, wide, x)
    return lax.all_gather(x, axes, axis=0, tiled=True)
