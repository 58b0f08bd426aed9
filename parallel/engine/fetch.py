"""Fetching a parameter: copy, cast, all-gather; backward, its gradient is reduced (`reduce.py`).

Inside the data plane a parameter is `Stored`: this device's shard, and the slot that its gradient
goes to. The model gets the whole parameter in the compute dtype. Each gather and scatter is a
`Leg`, whose form, XLA's collective or a kernel's, is chosen when the step is built.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hfjax.base.paths import Index, Tree
from hfjax.parallel.engine.legs import Movement, gather
from hfjax.parallel.engine.reduce import reduce_gradient
from hfjax.parallel.memory import to_device


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


class Placeholder:
    """Stands for an array of a layer where that layer does not run; using it is refused."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __getitem__(self, index: Index) -> "Placeholder":
        return self if index is ... else self._refuse()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__jax_array__":
            raise AttributeError(name)
        return self._refuse()

    def _refuse(self, *_: object) -> NoReturn:
        raise ValueError(
            f"{self.path} is used outside of its layer. A model in three parts (embed, layers, "
            "head) is run layer by layer, and what embed and head share with a layer lies outside "
            "of `layers`. Without stages there is a way around: hfjax.layout(…, forward=lambda "
            "model, batch: model(batch)) runs the model as it is written."
        )

    def __repr__(self) -> str:
        return f"<{self.path}, which is in a layer that does not run here>"


_OPERATORS = "add sub mul truediv floordiv mod pow matmul neg abs len iter lt le gt ge float array"
for _name in _OPERATORS.split():
    for _side in ("", "r"):
        setattr(Placeholder, f"__{_side}{_name}__", Placeholder._refuse)


def refuse_elsewhere(variable: nnx.Variable, value: Any) -> Any:
    """Return what a variable holds, unless that is elsewhere: a hook of every parameter."""
    return value._refuse() if isinstance(value, Placeholder) else value


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


def devices_along(axis: str) -> int:
    """Return over how many devices a collective along a mesh axis goes: 1 outside of a step."""
    try:
        return lax.axis_size(axis)
    except NameError:  # it is not bound here
        return 1
