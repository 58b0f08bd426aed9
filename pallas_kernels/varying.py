"""Over which axes of a mesh values are known to differ between devices (shard_map's check_vma)."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike


def varying(x: Any) -> frozenset[str]:
    """Return the axes over which a value is known to differ between devices."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)


def alike(x: Any, axes: frozenset[str]) -> Any:
    """Return x, marked as differing over these axes (and those over which it does already)."""
    missing = tuple(sorted(axes - varying(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def together(operands: Any) -> Any:
    """Return a tree whose arrays all differ over the axes over which one of them does."""
    axes = frozenset[str]().union(*map(varying, jax.tree.leaves(operands)))
    return jax.tree.map(lambda x: alike(x, axes), operands)


def zeros(shape: tuple[int, ...], like: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return zeros to sum into, which differ between devices as `like` does."""
    return alike(jnp.zeros(shape, dtype), varying(like))
