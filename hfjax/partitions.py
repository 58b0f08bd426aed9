"""Layers dealt to the stages of a pipeline, so that the dearest stage is as cheap as can be."""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hfjax.parallel.arrangement import balanced, check_balance, counts
from hfjax.parallel.balance import flop_costs, parameter_costs
from hfjax.parallel.layers import is_list
from hfjax.stack import layers_of

BALANCES = ("parameters", "flops")


@dataclass(frozen=True, eq=False)
class Partition:
    """Which layers each stage gets; prints as a table.

    Part g of the model is on stage g % stages, its chunk g // stages.
    """

    layers: Any  # a tuple of modules, or one module that stacks them
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
    """Return the layers dealt to `stages` stages, `chunks` parts of the model on each.

    `layers` is a list of modules, nnx.Sequential, or one module of stacked arrays. `balance` says
    by what the parts are made even ("flops" needs an `example` of what enters the first layer), or
    how many layers each part has, in the model's order.

    >>> from flax import nnx
    >>> layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(6)]
    >>> partition(layers, stages=4).counts
    (2, 2, 1, 1)
    """
    for name, given in (("stages", stages), ("chunks", chunks)):
        if not isinstance(given, int) or isinstance(given, bool) or given < 1:
            raise ValueError(f"{name}={given!r}: a positive whole number is expected.")
    found = layers_of(layers)
    costs = _costs(found, balance if isinstance(balance, str) else "parameters", example)
    unit = "flops" if balance == "flops" else "bytes"
    numbers = _numbers(balance, costs, stages * chunks)
    kept = tuple(found) if is_list(layers) else layers
    return Partition(kept, stages, chunks, tuple(numbers), tuple(costs), unit)


def _costs(layers: list[Any], balance: str, example: Any) -> Sequence[float]:
    if balance == "parameters":
        return parameter_costs(layers)
    if balance != "flops":
        raise ValueError(
            f"balance={balance!r}: one of {', '.join(BALANCES)}, or the number of layers of each "
            "part in the model's order, e.g. [4, 4, 3]."
        )
    if example is None:
        raise ValueError(
            'balance="flops" counts the arithmetic on an example: give what enters the first '
            "layer, partition(…, example=x). Shapes will do: jax.ShapeDtypeStruct((8, 512), "
            "jax.numpy.float32)."
        )
    return flop_costs(layers, example)


def _numbers(balance: str | Sequence[int], costs: Sequence[float], parts: int) -> list[int]:
    """Return the number of layers of each part."""
    if isinstance(balance, str):
        same = len(set(costs)) == 1
        return counts(len(costs), parts, "even") if same else balanced(costs, parts)
    try:
        given = [operator.index(n) for n in balance]
    except TypeError:
        given = []
    if len(costs) < parts:  # no balance will do
        counts(len(costs), parts, "even")
    if not given:
        raise ValueError(
            f"balance={balance!r}: {', '.join(BALANCES)}, or the number of layers of each part in "
            f"the model's order, e.g. {counts(len(costs), parts, 'even')}."
        )
    return check_balance(given, len(costs), parts)


def _table(parts: Partition) -> Iterator[str]:
    chunks = f" x {parts.chunks} chunks" if parts.chunks > 1 else ""
    yield f"{len(parts.costs)} layers on {parts.stages} stages{chunks}"
    ends = np.cumsum(parts.counts)
    sums = [sum(parts.costs[end - n : end]) for n, end in zip(parts.counts, ends, strict=True)]
    rows = [("part", "stage", "chunk", "layers", parts.unit, "share")]
    for g, (n, end, cost) in enumerate(zip(parts.counts, ends, sums, strict=True)):
        which = f"{end - n}" if n == 1 else f"{end - n}-{end - 1}"
        place = (str(g), str(g % parts.stages), str(g // parts.stages))
        rows.append((*place, which, f"{cost:,.0f}", f"{cost / max(sum(sums), 1):.1%}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True))
