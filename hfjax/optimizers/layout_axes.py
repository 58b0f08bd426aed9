"""What an optimizer may read of a layout while it is traced: names of dimensions, and shardings.

`hfjax.layout` calls `bind_axes`; a step that updates shards calls `use_shardings`. An optimizer
that reads them marks its update function: `update.reads_axes = True`.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import optax
from jax.sharding import NamedSharding

from hfjax.optimizers.transforms import MasterWeights, find_closure_functions
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


def bind_axes(
    optimizer: optax.GradientTransformation, axes: LayoutAxes
) -> optax.GradientTransformation:
    """Return the optimizer, which sees these arrays; one that reads none stays the same."""
    functions = find_closure_functions(optimizer.update, set())
    if not any(getattr(function, "reads_axes", False) for function in functions):
        return optimizer
    inner = optax.with_extra_args_support(optimizer)

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
    bound.inner = bind_axes(optimizer.inner, axes)
    return bound
