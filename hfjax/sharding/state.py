"""The state of a training run: what a step takes and returns, and what a layout places."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.utils.paths import Flat, nest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scale:
    """The loss scale of a float16 run, and the numbers on which it depends."""

    value: Any
    steps: Any  # judged so far, skipped ones included
    last: Any  # the step of the last overflow; -1: none
    hysteresis: Any  # overflows left until the scale halves
    skipped: Any  # steps in total


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class State:
    """The state of a training run: plain arrays, sharded as the layout says.

    It is a pytree: jax.tree.map, jax.jit and donation work on it.

    Attributes:
        step: The number of steps taken, an int32 scalar.
        params: The parameters, nested by their paths.
        optimizer: The state of the optax optimizer.
        variables: Arrays that are no parameters: statistics, random keys.
        order: The layer number of each entry of stacked layers; None if nothing is stacked.
        scale: The loss scale of a float16 run; None before its first step, and without one.

    Example:
        >>> import hfjax, optax
        >>> from flax import nnx
        >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> state = hfjax.init(layout)
        >>> int(state.step), sorted(state.params)
        (0, ['bias', 'kernel'])
    """

    step: Any
    params: Any
    optimizer: Any
    variables: Any  # arrays that are no parameters: statistics, random keys
    order: Any = None  # the layer number of each entry of stacked layers
    scale: Scale | None = None


def initial_state(layout: Any, arrays: Flat, params: Flat) -> State:
    """Return the initial state with these parameters, and variables from `arrays`."""
    variables = nest({path: arrays[path] for path in layout.template.variables})
    optimizer_state = layout.optimizer.init(nest(params))  # master weights start before rounding
    params = nest({path: x.astype(layout.param_specs[path].dtype) for path, x in params.items()})
    return State(jnp.zeros((), jnp.int32), params, optimizer_state, variables, layout.order)
