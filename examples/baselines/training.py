"""Synchronous training with an all-reduce: every device has all parameters and updates them."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from jax import lax
from jax.flatten_util import ravel_pytree

Tree = Any
Step = Callable[[Tree, Tree, Tree], tuple[Tree, Tree, jax.Array]]


def all_reduce_step(
    loss: Callable[[Tree, Tree], jax.Array],
    optimizer: optax.GradientTransformation,
    all_reduce: Callable[[jax.Array], jax.Array],
    axes: str | tuple[str, ...],
) -> Step:
    """Return step(parameters, state, rows) -> parameters, state and the loss of these rows.

    Args:
        loss: Function of (parameters, rows): the mean over rows.
        optimizer: Any optax transformation.
        all_reduce: What adds a vector over all devices, for instance
            `partial(ring_all_reduce, axis="data")`.
        axes: The mesh axes of all devices.
    """

    def step(parameters: Tree, state: Tree, rows: Tree) -> tuple[Tree, Tree, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, rows)
        vector, as_tree = ravel_pytree(gradients)
        mean = as_tree(all_reduce(vector) / lax.axis_size(axes))
        updates, state = optimizer.update(mean, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    return step
