"""Unshard a parameter: copy, cast, all-gather; backward, reduce its gradient (reduce_gradients.py).

Inside the data plane a parameter is `Stored`: this device's shard, and the slot that its gradient
goes to. The model gets the whole parameter in the compute dtype. Each gather and scatter is a
`Leg`, whose form, XLA's collective or a kernel's, is chosen when the step is built.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.parallel.engine.comm_plan import Movement, gather
from hfjax.parallel.engine.reduce_gradients import reduce_gradient
from hfjax.parallel.offload.host_memory import to_device
from hfjax.utils.paths import Tree


@partial(jax.tree_util.register_dataclass, data_fields=["value", "slot"], meta_fields=["movement"])
@dataclass
class Stored:
    """What a device stores of one parameter; `slot` takes its gradient (None: no gradient)."""

    value: jax.Array
    slot: jax.Array | None
    movement: Movement

    @property
    def full_shape(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of the whole parameter, as it is fetched."""
        return jax.ShapeDtypeStruct(self.movement.shape, self.movement.compute_dtype)

    def fetch(self) -> jax.Array:
        """Return the whole parameter in the compute dtype."""
        move = self.movement
        move.read(move.path)
        if self.slot is None:
            return _gather(move, self.value)
        return _fetch(move, self.value, self.slot)


def at_hand(path: str, value: jax.Array, slot: jax.Array | None = None) -> Stored:
    """Return a whole parameter as a stored one: fetching it moves nothing."""
    dtype, ignore = value.dtype, lambda path: None
    still = Movement(path, value.shape, (), (), (), (), dtype, dtype, dtype, ignore)
    return Stored(value, slot, still)


def is_stored(x: object) -> bool:
    """Return whether this is a parameter as it is stored."""
    return isinstance(x, Stored)


def fetched(tree: Tree) -> Any:
    """Return a tree with whole parameters in place of stored ones."""
    return jax.tree.map(lambda x: x.fetch() if is_stored(x) else x, tree, is_leaf=is_stored)


def _gather(move: Movement, value: jax.Array) -> jax.Array:
    whole = gather(to_device(value), move.gathers, move.gather_dtype, move.tensor_dims)
    return whole.astype(move.compute_dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _fetch(move: Movement, value: jax.Array, slot: jax.Array) -> jax.Array:
    return _gather(move, value)


def _forward(move: Movement, value: jax.Array, slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gather(move, value), jnp.zeros((0,), slot.dtype)


def _backward(move: Movement, like: jax.Array, cotangent: jax.Array) -> tuple[None, jax.Array]:
    return None, reduce_gradient(move, cotangent, like.dtype)


_fetch.defvjp(_forward, _backward)
