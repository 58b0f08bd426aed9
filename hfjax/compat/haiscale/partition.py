"""Partition a model's layers over pipeline stages, to minimise the cost of the largest stage.

Equal layers become one module of stacked arrays.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from hfjax.parallel.adapters.model_template import is_list, items_of
from hfjax.parallel.layer_costs import flop_costs, parameter_costs
from hfjax.parallel.layer_order import balance_layers, layer_counts
from hfjax.utils.keywords import is_int
from hfjax.utils.tables import align

BALANCES = ("parameters", "flops")  # a schedule has "even" too


@dataclass(frozen=True, eq=False)
class Partition:
    """The layers of each stage; prints as a table. `hfjax.compat.partition` returns one.

    Part g of the model is on stage g % stages, its chunk g // stages.

    Example:
        >>> import hfjax
        >>> from flax import nnx
        >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(4)]
        >>> print(hfjax.compat.partition(layers, stages=2))
        4 layers on 2 stages
          part  stage  chunk  layers  bytes  share
             0      0      0     0-1    160  50.0%
             1      1      0     2-3    160  50.0%
    """

    layers: Any  # a tuple of modules, or one module of stacked layers
    stages: int
    chunks: int  # parts on each stage
    counts: tuple[int, ...]  # layers of each part, in the model's order
    costs: tuple[float, ...]  # of each layer
    unit: str  # of the costs: bytes (of parameters) or flops

    def __str__(self) -> str:
        return "\n".join(_table(self))

    __repr__ = __str__


def partition(
    layers: Any,
    stages: int,
    balance: str | Sequence[int] = "parameters",
    *,
    chunks: int = 1,
    example: Any = None,
) -> Partition:
    """Return a partition of layers over `stages` stages, with `chunks` parts of the model on each.

    Args:
        layers: A list of modules or functions, nnx.Sequential, nnx.List, or one module of stacked
            arrays (`hfjax.models.layers.stack_layers`).
        stages: The size of the mesh's pipe axis.
        balance: The cost to balance, "parameters" or "flops"; or the number of layers of each part,
            in the model's order.
        chunks: Parts of the model on each stage; above 1 for `Interleaved1F1B`.
        example: The input of the first layer, or its shape; "flops" needs it.

    Raises:
        ValueError: There are fewer layers than parts, or layers share a parameter.

    Example:
        >>> import hfjax
        >>> from flax import nnx
        >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(6)]
        >>> hfjax.compat.partition(layers, stages=4).counts
        (2, 2, 1, 1)
    """
    for name, value in (("stages", stages), ("chunks", chunks)):
        if not is_int(value):
            raise ValueError(f"{name}={value!r}: a positive whole number is expected.")
    layer_list = list_layers(layers)
    unit = "flops" if balance == "flops" else "bytes"
    give = "what enters the first layer, partition(…, example=x)"
    costs = (
        parameter_costs(layer_list) if unit == "bytes" else flop_costs(layer_list, example, give)
    )
    layer_counts = _layer_counts(balance, costs, stages * chunks)
    model_layers = tuple(layer_list) if is_list(layers) else layers
    return Partition(model_layers, stages, chunks, tuple(layer_counts), tuple(costs), unit)


def _layer_counts(
    balance: str | Sequence[int], costs: Sequence[float], num_parts: int
) -> list[int]:
    """Return the number of layers of each part."""
    even = layer_counts(len(costs), num_parts)
    if isinstance(balance, str) and balance in BALANCES:
        return even if len(set(costs)) == 1 else balance_layers(costs, num_parts)
    requested_counts = [] if isinstance(balance, str) or not np.iterable(balance) else [*balance]
    if not requested_counts or not all(is_int(n, 0) for n in requested_counts):
        raise ValueError(
            f"balance={balance!r}: one of {', '.join(BALANCES)}, or the number of layers of each "
            f"part in the model's order, e.g. {even}."
        )
    return layer_counts(len(costs), num_parts, requested_counts)


def _table(assignment: Partition) -> Iterator[str]:
    chunks = f" x {assignment.chunks} chunks" if assignment.chunks > 1 else ""
    yield f"{len(assignment.costs)} layers on {assignment.stages} stages{chunks}"
    ends = np.cumsum(assignment.counts)
    sums = [
        sum(assignment.costs[end - n : end]) for n, end in zip(assignment.counts, ends, strict=True)
    ]
    entries = [("part", "stage", "chunk", "layers", assignment.unit, "share")]
    for g, (n, end, cost) in enumerate(zip(assignment.counts, ends, sums, strict=True)):
        layer_range = f"{end - n}" if n == 1 else f"{end - n}-{end - 1}"
        cells = (str(g), str(g % assignment.stages), str(g // assignment.stages))
        entries.append((*cells, layer_range, f"{cost:,.0f}", f"{cost / max(sum(sums), 1):.1%}"))
    yield from (f"  {line}" for line in align(entries, justify=str.rjust))


class Chain(nnx.Module):
    """Layers as a layer-stack model, with an identity embed and head."""

    def __init__(self, layers: Any) -> None:
        self.layers = layers

    def embed(self, batch: Any) -> Any:
        """Return the input of the first layer."""
        return batch["x"]

    def head(self, x: Any) -> Any:
        """Return the output of the last layer."""
        return x


def list_layers(layers: Any) -> list[Any]:
    """Return a list of layers: those of a list, or the shapes of stacked ones."""
    if is_list(layers):
        return _check_layers(list(items_of(layers)))
    if not isinstance(layers, nnx.Module):
        raise ValueError(
            f"layers is {type(layers).__name__}: a list of modules, nnx.Sequential, nnx.List, or "
            "one module of stacked arrays (hfjax.models.layers.stack_layers) is expected."
        )
    graph, state = nnx.split(layers)
    lengths = {x.shape[0] if x.shape else 0 for x in jax.tree.leaves(state)}
    if len(lengths) != 1 or 0 in lengths:
        raise ValueError(
            f"layers is one {type(layers).__name__}, whose arrays have {sorted(lengths)} rows: in "
            "a module of stacked layers all arrays have one row for each layer. Make it with "
            "hfjax.models.layers.stack_layers(count, create, rngs), or give a list of modules."
        )
    layer_state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), state)
    return [nnx.merge(graph, layer_state)] * lengths.pop()


def _check_layers(layers: list[Any]) -> list[Any]:
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


def stack_layers(layers: Sequence[Any]) -> Any:
    """Return equal layers as one module of stacked arrays, others as nnx.List."""
    if not all(isinstance(layer, nnx.Module) for layer in layers):
        return nnx.List(layers)
    graphs, states = zip(*(nnx.split(layer) for layer in layers), strict=True)
    shape = lambda state: [(x.shape, x.dtype) for x in jax.tree.leaves(state)]
    if any(g != graphs[0] for g in graphs) or any(shape(s) != shape(states[0]) for s in states):
        return nnx.List(layers)
    return nnx.merge(graphs[0], jax.tree.map(lambda *arrays: jnp.stack(arrays), *states))


def model_init(model: Chain) -> Callable:
    """Return rngs -> the model, with zeros as values; it keeps no array alive."""
    graph, state = nnx.split(model)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)
    zeros = lambda x: lax.full(x.shape, 0, x.dtype)
    return lambda rngs: nnx.merge(graph, jax.tree.map(zeros, shapes))
