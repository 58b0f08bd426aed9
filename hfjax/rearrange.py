"""The layers of a state in another order: as another schedule stores them, or as the model does."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from hfjax.parallel.arrangement import Arrangement
from hfjax.plan import Layout, State, nest


def canonical(layout: Layout, state: State) -> State:
    """Return the state with its layers in the model's order: what to save, and to look at.

    Any layout of the same model can restore it, whatever its mesh, strategy or schedule.
    """
    return rearrange(layout.arranged(None), state)


def rearrange(layout: Layout, state: State) -> State:
    """Return the state with its layers where the layout has them; itself if they are there."""
    if _same(layout.order, state.order):
        return state
    old = None if state.order is None else Arrangement(np.asarray(state.order)[None, None])
    move = partial(_move, layout.arrangement, old)
    dims = _layer_dims(layout)

    def run(state: State) -> State:
        params = jax.tree.map(move, state.params, dims.params)
        moments = jax.tree.map(move, state.optimizer, dims.optimizer)
        return replace(state, params=params, optimizer=moments, order=layout.order)

    return jax.jit(run, out_shardings=layout.shardings())(state)


def _same(wanted: Any, found: Any) -> bool:
    if wanted is None or wanted is found:
        return True
    rows = np.arange(len(wanted)) if found is None else np.asarray(found)
    return np.array_equal(wanted, rows)


def _move(new: Arrangement | None, old: Arrangement | None, array: jax.Array, dim: int) -> Any:
    """Return an array whose dimension `dim` (-1: none) has a row for each layer, rearranged."""
    if dim < 0:
        return array
    layers = array if old is None else old.restore(array, dim)
    return layers if new is None else new.store(layers, dim)


def _layer_dims(layout: Layout) -> State:
    """Return which dimension of each array of the state has a row for each layer; -1: none.

    It is the one that grows with the number of layers.
    """

    def shapes(more: int) -> State:
        params = {}
        for path, p in layout.placed.items():
            rows, *rest = p.shape or (0,)
            shape = (rows + more, *rest) if p.stacked else p.shape
            params[path] = jax.ShapeDtypeStruct(shape, p.dtype)
        nested = nest(params)
        return State(None, nested, jax.eval_shape(layout.optimizer.init, nested), None)

    def grown(a: Any, b: Any) -> int:
        return next((i for i, n in enumerate(a.shape) if n != b.shape[i]), -1)

    return jax.tree.map(grown, shapes(0), shapes(1))
