"""Axes by name: of a variable's dimensions, and of the mesh where code runs."""

from typing import Any

from flax import nnx
from jax import lax

# Metadata keys by which models and libraries name the logical axes of a parameter.
_AXES_KEYS = ("axes", "out_sharding", "sharding_names", "sharding")


def logical_axes(template: Any) -> tuple[str | None, ...]:
    """Return the names of a variable's dimensions, () if it has none.

    `axes` are ours and have to fit. Those of Flax may be of the user's own mesh: what is not one
    name for each dimension is ignored.
    """
    if not isinstance(template, nnx.Variable):
        return ()
    for key in _AXES_KEYS:
        names = template.get_metadata(key, None)
        if names is None:
            continue
        if key == "axes":
            return tuple(names)
        if isinstance(names, tuple | list) and len(names) == len(template.shape):
            return tuple(name if isinstance(name, str) else None for name in names)
    return ()


def axis_size_or_one(axis: str) -> int:
    """Return the size of a mesh axis, for a collective along it: 1 outside of a step."""
    try:
        return lax.axis_size(axis)
    except NameError:  # it is not bound here
        return 1
