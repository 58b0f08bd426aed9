"""What each layer costs, in parameters or in arithmetic: what a balanced partition goes by."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx


def parameter_costs(layers: Sequence[Any]) -> list[int]:
    """Return the bytes of each layer's parameters; a function has none.

    >>> parameter_costs([nnx.Linear(4, 8, rngs=nnx.Rngs(0)), jax.nn.relu])
    [160, 0]
    """
    size = lambda x: x.size * jnp.dtype(x.dtype).itemsize
    arrays = lambda layer: jax.tree.leaves(nnx.state(layer, nnx.Param))
    return [
        sum(map(size, arrays(layer))) if isinstance(layer, nnx.Module) else 0 for layer in layers
    ]


def flop_costs(layers: Sequence[Any], example: Any) -> list[int]:
    """Return the floating-point operations of each layer's forward pass on `example`.

    Counted by XLA, which takes the body of a loop once; nothing runs. `example` may be arrays or
    shapes; what a layer returns is the next one's example.

    >>> flop_costs([nnx.Linear(4, 8, use_bias=False, rngs=nnx.Rngs(0))], jnp.ones((2, 4)))
    [128]
    """
    costs = []
    for layer in layers:
        run, state = _function(layer)
        analysis = jax.jit(run).lower(state, example).cost_analysis() or {}
        costs.append(round(analysis.get("flops", 0)))
        example = jax.eval_shape(run, state, example)
    return costs


def _function(layer: Any) -> tuple[Callable, Any]:
    """Return (arrays, x) -> layer(x), and the layer's arrays."""
    if not isinstance(layer, nnx.Module):
        return lambda _, x: layer(x), None
    graph, state = nnx.split(layer)
    return lambda state, x: nnx.merge(graph, state)(x), state
