"""Wrap models that are functions of parameters and state as a module."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


class StatefulModel(nnx.Module):
    """A model that is a function of (parameters, state), as in Haiku and equinox.

    Floating-point arrays of `parameters` are trained, its other arrays are constants. Call it with
    the function to run: `model(lambda parameters, state: (outputs, new state))`.
    """

    def __init__(self, parameters: Any, state: Any) -> None:
        self.parameters = nnx.data(jax.tree.map(_as_variable, parameters))
        self.state = nnx.data(jax.tree.map(nnx.BatchStat, state))

    def __call__(self, run: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
        """Return the outputs, and store the new state."""
        is_variable = lambda x: isinstance(x, nnx.Variable)
        read = lambda x: x[...] if is_variable(x) else x
        trees = (jax.tree.map(read, t, is_leaf=is_variable) for t in (self.parameters, self.state))
        outputs, new = run(*trees)
        jax.tree.map(
            lambda variable, x: variable.set_value(x), self.state, new, is_leaf=is_variable
        )
        return outputs


def _as_variable(leaf: Any) -> Any:
    """Return an array leaf as a variable; other leaves unchanged."""
    if not isinstance(leaf, jax.Array | np.ndarray):
        return leaf
    return (nnx.Param if jnp.issubdtype(leaf.dtype, jnp.inexact) else nnx.Variable)(leaf)
