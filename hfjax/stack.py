"""A list of layers as the pipeline wants it: equal layers are one module of stacked arrays."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hfjax.parallel.layers import is_list


class Chain(nnx.Module):
    """Layers as a model in three parts: nothing comes before them or after them."""

    def __init__(self, layers: Any):
        self.layers = layers

    def embed(self, batch: Any) -> Any:
        """Return what enters the first layer."""
        return batch["x"]

    def head(self, x: Any) -> Any:
        """Return the outputs: what leaves the last layer."""
        return x


def layers_of(layers: Any) -> list[Any]:
    """Return layers one by one: of a list, or the shapes of those that one module stacks."""
    if is_list(layers):
        found = list(layers.layers if isinstance(layers, nnx.Sequential) else layers)
        return _check_list(found)
    if not isinstance(layers, nnx.Module):
        raise ValueError(
            f"layers is {type(layers).__name__}: a list of modules, nnx.Sequential, nnx.List, or "
            "one module of stacked arrays (hfjax.models.parts.stacked) is expected."
        )
    graph, state = nnx.split(layers)
    rows = {x.shape[0] if x.shape else 0 for x in jax.tree.leaves(state)}
    if len(rows) != 1 or 0 in rows:
        raise ValueError(
            f"layers is one {type(layers).__name__}, whose arrays have {sorted(rows)} rows: in a "
            "module of stacked layers all arrays have one row for each layer. Make it with "
            "hfjax.models.parts.stacked(count, create, rngs), or give a list of modules."
        )
    row = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    return [nnx.merge(graph, row)] * rows.pop()


def _check_list(layers: list[Any]) -> list[Any]:
    owner: dict[int, int] = {}
    for i, layer in enumerate(layers):
        if not callable(layer) or isinstance(layer, type):
            raise ValueError(f"layer {i} is {layer!r}: a module or a function of x is expected.")
        modules = isinstance(layer, nnx.Module)
        for _, variable in nnx.to_flat_state(nnx.state(layer, nnx.Param)) if modules else ():
            first = owner.setdefault(id(variable), i)
            if first != i:
                raise ValueError(
                    f"layers {first} and {i} share a parameter of shape {variable.shape}. On "
                    "stages each layer has its own: make a module for each, for instance "
                    "[Block(rngs=rngs) for _ in range(8)], not [block] * 8."
                )
    return layers


def stack(layers: Sequence[Any]) -> Any:
    """Return equal layers as one module of stacked arrays, others as nnx.List."""
    if not all(isinstance(layer, nnx.Module) for layer in layers):
        return nnx.List(layers)
    graphs, states = zip(*(nnx.split(layer) for layer in layers), strict=True)
    shape = lambda state: [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    if any(g != graphs[0] for g in graphs) or any(shape(s) != shape(states[0]) for s in states):
        return nnx.List(layers)
    return nnx.merge(graphs[0], jax.tree.map(lambda *rows: jnp.stack(rows), *states))


def model_init(layers: Any) -> Callable:
    """Return rngs -> the chain of layers with zeros for values: it holds on to no array."""
    graph, state = nnx.split(Chain(layers))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    zeros = lambda x: lax.full(x.shape, 0, x.dtype)
    return lambda rngs: nnx.merge(graph, jax.tree.map(zeros, shapes))


def refilled(layer: Any, values: Mapping[str, Any]) -> Any:
    """Return a copy of the layer with these parameters, by path."""
    if not isinstance(layer, nnx.Module):
        return layer
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)
    flat = nnx.to_flat_state(parameters)
    new = [(keys, p.replace(values["/".join(map(str, keys))])) for keys, p in flat]
    return nnx.merge(graph, nnx.from_flat_state(new), rest)


def emptied(layer: Any) -> Any:
    """Return a copy of the layer with shapes in place of its parameters."""
    if not isinstance(layer, nnx.Module):
        return layer
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)
    shape = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
    return nnx.merge(graph, jax.tree.map(shape, parameters), rest)
