"""The mesh axes over which values are known to vary between devices (shard_map's check_vma)."""

from collections.abc import Set
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from hfjax.utils.paths import Index, Tree


def varying_axes(x: Index) -> frozenset[str]:
    """Return the mesh axes over which a value is known to vary between devices."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def mark_varying(tree: Tree, axes: Set[str]) -> Any:
    """Return a tree, marked as varying over these axes (and those over which it already does)."""

    def mark(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - varying_axes(x)))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(mark, tree)


def unify_varying(operands: Tree) -> Any:
    """Return a tree whose arrays all vary over every axis over which one of them does."""
    return mark_varying(
        operands, frozenset[str]().union(*map(varying_axes, jax.tree.leaves(operands)))
    )


def zeros(shape: tuple[int, ...], like: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return zeros to accumulate into, varying over the same mesh axes as `like`."""
    return mark_varying(jnp.zeros(shape, dtype), varying_axes(like))
