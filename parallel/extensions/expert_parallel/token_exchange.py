"""How tokens get to experts that are sharded over devices, and back.

In `all_to_all` each device sends the slots of an expert to the device that has it. In `gather`
every device gathers all tokens and adds its own experts' outputs (a ring of experts).
`dispatch_kinds.py` counts what both send.
"""

from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax


class LocalExperts(Protocol):
    """The experts that a model passes in: see hfjax/models/moe/experts.py."""

    def to_experts(self, x_GTD: jax.Array, routed: Any) -> jax.Array:
        """Return the inputs of each expert, [E, N, D]."""
        ...

    def run(self, x_END: jax.Array) -> jax.Array:
        """Return the local experts' outputs for their inputs."""
        ...

    def from_experts(self, y_END: jax.Array, routed: Any) -> jax.Array:
        """Return the outputs of the tokens."""
        ...

    def partial_output(
        self, x_GTD: jax.Array, routed: Any, all_gather: Callable, first: jax.Array
    ) -> jax.Array:
        """Return what the local experts, from index `first` on, add to all tokens."""
        ...

    @property
    def num_local(self) -> int:
        """How many experts are local."""
        ...


def all_to_all(
    mixture: LocalExperts, x_GTD: jax.Array, routed: Any, axes: tuple[str, ...]
) -> jax.Array:
    """Return the output of all devices' experts for the local tokens: slots are sent."""
    expert_inputs = lax.all_to_all(mixture.to_experts(x_GTD, routed), axes, 0, 1, tiled=True)
    expert_outputs = lax.all_to_all(mixture.run(expert_inputs), axes, 1, 0, tiled=True)
    return mixture.from_experts(expert_outputs, routed)


def gather(
    mixture: LocalExperts, x_GTD: jax.Array, routed: Any, axes: tuple[str, ...], wide: bool = False
) -> jax.Array:
    """Return the output of all devices' experts for the local tokens: tokens are gathered.

    `wide`: sums are in float32, also of bfloat16 tokens (XLA aborts on bfloat16 sums on CPUs).
    """
    is_narrow = jnp.issubdtype(x_GTD.dtype, jnp.floating) and x_GTD.dtype.itemsize < 4
    reduce_scatter, all_gather = (
        _wide_collectives(axes) if wide and is_narrow else _tiled_collectives(axes)
    )
    first = lax.axis_index(axes) * mixture.num_local
    return reduce_scatter(mixture.partial_output(all_gather(x_GTD), routed, all_gather, first))


def _tiled_collectives(axes: tuple[str, ...]) -> tuple[Callable, Callable]:
    """Return a reduce-scatter and an all-gather along dimension 0."""
    return (
        lambda x: lax.psum_scatter(x, axes, scatter_dimension=0, tiled=True),
        lambda x: lax.all_gather(x, axes, axis=0, tiled=True),
    )


def _wide_collectives(axes: tuple[str, ...]) -> tuple[Callable, Callable]:
    """Return both with sums in float32; arrays that are gathered stay narrow."""
    reduce_scatter, all_gather = _tiled_collectives(axes)
    wide_reduce_scatter = lambda x: reduce_scatter(
        x.astype(jnp.promote_types(x.dtype, jnp.float32))
    ).astype(x.dtype)
    return _with_derivative(wide_reduce_scatter, all_gather), _with_derivative(
        all_gather, wide_reduce_scatter
    )


def _with_derivative(function: Callable, transpose: Callable) -> Callable:
    """Return a linear function whose derivative is another function."""
    linear = jax.custom_vjp(function)
    linear.defvjp(lambda x: (function(x), None), lambda _, dy: (transpose(dy),))
    return linear
