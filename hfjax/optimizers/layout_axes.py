"""What an optimizer may read of a layout while it is traced: names of dimensions, and shardings.

An optimizer that reads them has `update.bind_axes = bind_layout`, which `hfjax.layout` calls. A
step that updates shards calls `use_shardings`.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import optax
from jax.sharding import NamedSharding

from hfjax.optimizers.transforms import MasterWeights
from hfjax.utils.paths import Tree
from hfjax.utils.trace_context import set_value

Names = tuple[str | None, ...]


class NamedArray(Protocol):
    """An array with names of its dimensions."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""
        ...

    @property
    def axes(self) -> Names:
        """The name of each dimension, None where it has none."""
        ...


@dataclass(frozen=True, eq=False)
class LayoutAxes:
    """The arrays of a layout.

    Attributes:
        arrays: Path -> shape and names of dimensions, of all parameters.
        packed: How paths of arrays begin into which a list of layers may be packed.
    """

    arrays: Mapping[str, NamedArray]
    packed: str = ""


_axes: ContextVar[LayoutAxes | None] = ContextVar("axes", default=None)
_shardings: ContextVar[Mapping[str, NamedSharding] | None] = ContextVar("shardings", default=None)


def current_axes() -> LayoutAxes | None:
    """Return the arrays of the layout whose optimizer is traced; None without a layout."""
    return _axes.get()


def current_sharding(path: str) -> NamedSharding | None:
    """Return the sharding of a parameter's optimizer state; None where XLA alone knows it."""
    return (_shardings.get() or {}).get(path)


def use_shardings(shardings: Mapping[str, NamedSharding]) -> AbstractContextManager[None]:
    """Return a context in which an update sees these: path -> sharding of the optimizer state."""
    return set_value(_shardings, shardings)


def bind_layout(
    optimizer: optax.GradientTransformation, arrays: Mapping[str, NamedArray], packed: str
) -> optax.GradientTransformation:
    """Return the optimizer, which sees these arrays.

    Args:
        optimizer: An optimizer that reads them, perhaps in wrappers.
        arrays: Path -> shape and names of dimensions, of all parameters.
        packed: How paths of arrays begin into which a list of layers may be packed.
    """
    axes, inner = LayoutAxes(arrays, packed), optax.with_extra_args_support(optimizer)

    def init(params: Tree) -> Any:
        with set_value(_axes, axes):
            return inner.init(params)

    def update(updates: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple:
        with set_value(_axes, axes):
            return inner.update(updates, state, params, **extra)

    if not isinstance(optimizer, MasterWeights):
        return optax.GradientTransformationExtraArgs(init, update)
    bound = MasterWeights(init, update)
    bound.param_dtype = optimizer.param_dtype
    bound.inner = bind_layout(optimizer.inner, arrays, packed)
    return bound
