"""Where a program is being traced: variables set for a while, axes that XLA's partitioner has."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import jax

Value = TypeVar("Value")


@contextmanager
def set_value(variable: ContextVar[Value], value: Value) -> Iterator[None]:
    """Give a context variable this value meanwhile.

    >>> depth = ContextVar("depth", default=0)
    >>> with set_value(depth, 1):
    ...     depth.get()
    1
    >>> depth.get()
    0
    """
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# Whether XLA's partitioner computes a scatter, or its derivative, wrongly along a dimension that it
# splits: until jax 0.12 (tests/test_explicit_sharding.py).
MISPLACES_SCATTERS = jax.__version_info__ < (0, 12)


def current_auto_axes() -> tuple[str, ...]:
    """Return the axes larger than 1 that XLA's partitioner has."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in mesh.auto_axes if mesh.shape[axis] > 1)
