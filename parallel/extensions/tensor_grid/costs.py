"""What a transformer's layer sends on a grid of devices, by formula, and the sides that send least.

A grid has sides a x r x c, the mesh axes fsdp, row and tensor. A linear map of T tokens from k to n
features has its activations in blocks over ((a, c), r), [tokens, features], its weights in blocks
over ((r, a), c). Each device gathers activations over c and weights over a, multiplies, and
scatters the outputs over r: they lie over ((a, r), c). The next map has r and c swapped, so after
two maps the residual stream lies as before. Sent by each device, in numbers, forward and backward:

- activations: 2 T / (a r c) · ((c - 1) k + (r - 1) n); in the maps that lead back to the residual
  stream r and c are swapped,
- weights: 3 (a - 1) / a · k n / (r c): gathered twice, scattered once; 2 where what the forward
  pass gathered is kept for the backward pass.

SUMMA on q x q devices sends 3 (q - 1) / q² · (T k + k n), and on d such layers (Tesseract) the same
with T / d tokens, and 2 (d - 1) / d · k n / q² for the gradients of the weights.

Attention sends nothing: devices have whole heads of whole rows. Not counted are norms, for which
the devices along r add one or two numbers a token, and biases.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from hfjax.utils.keywords import is_whole
from hfjax.utils.tables import aligned, human


class Config(Protocol):
    """The shape of a transformer's layer; its `kv_heads`, if it has them, are split as a whole."""

    @property
    def linear_maps(self) -> Mapping[str, tuple[int, int]]:
        """Inputs and outputs: in turn from the residual stream, and back to it."""
        ...

    @property
    def heads(self) -> int:
        """Its heads of queries."""
        ...


Found = tuple[Fraction, Fraction]  # numbers that a device sends: of activations, of weights


def sent_on_grid(
    maps: Mapping[str, tuple[int, int]], tokens: int, sides: tuple[int, int, int], times: int = 3
) -> Found:
    """Return what each device sends for these maps on sides (a, r, c): activations, weights.

    >>> [int(n) for n in sent_on_grid({"up": (8, 32)}, 16, (2, 1, 4))]  # r = 1: FSDP x TP
    [96, 96]
    """
    a, r, c = sides
    activations = weights = Fraction(0)
    for number, (inputs, outputs) in enumerate(maps.values()):
        into, out_of = (c, r) if number % 2 == 0 else (r, c)  # gathered over one, scattered over
        moved = (into - 1) * inputs + (out_of - 1) * outputs
        activations += Fraction(2 * tokens * moved, a * r * c)
        weights += Fraction(times * (a - 1) * inputs * outputs, a * r * c)
    return activations, weights


def sent_by_summa(
    maps: Mapping[str, tuple[int, int]], tokens: int, side: int, depth: int = 1
) -> Found:
    """Return what each device sends for these maps on `depth` squares: activations, weights.

    >>> [int(n) for n in sent_by_summa({"up": (8, 32)}, 16, side=2)]
    [96, 192]
    """
    features = sum(inputs for inputs, _ in maps.values())
    numbers = sum(inputs * outputs for inputs, outputs in maps.values())
    part = Fraction(3 * (side - 1), side**2)
    over_layers = Fraction(2 * (depth - 1) * numbers, depth * side**2)
    return part * tokens * features / depth, part * numbers + over_layers


@dataclass(frozen=True)
class GridCost:
    """What one way to arrange the devices sends, and why it cannot be, if it cannot."""

    name: str
    sides: tuple[int, int, int]  # fsdp, row, tensor; of SUMMA: layers, rows and columns
    activations: int  # bytes that each device sends for one layer, forward and backward
    weights: int
    longest_row: int  # tokens; attention splits whole rows of the batch over fsdp and row
    refused: str = ""

    @property
    def bytes(self) -> int:
        """Both together."""
        return self.activations + self.weights


@dataclass(frozen=True)
class GridCosts:
    """All ways to arrange the devices, what sends least first: print it."""

    rows: tuple[GridCost, ...]
    title: str

    @property
    def least(self) -> GridCost:
        """What can be and sends least. SUMMA, which hfjax has only for comparison, counts too."""
        return next(row for row in self.rows if not row.refused)

    def named(self, name: str) -> GridCost:
        """Return what sends least of a name, for instance "FSDP | TENSOR"; of those that can be.

        Args:
            name: As the table shows it. If none of this name can be, the first is returned.
        """
        found = [row for row in self.rows if row.name == name]
        if not found:
            known = sorted({row.name for row in self.rows})
            raise ValueError(f"no row {name!r}. There are: {', '.join(known)}.")
        return min(found, key=lambda row: bool(row.refused))  # the first of equals: the least

    def __iter__(self) -> Iterator[GridCost]:
        return iter(self.rows)

    def __str__(self) -> str:
        head = ("", "sides", "activations", "weights", "both", "longest row", "")
        least = self.least
        lines = [_cells(row, "least" if row is least else row.refused) for row in self.rows]
        return "\n".join([self.title, *aligned([head, *lines], numbers=(2, 3, 4, 5))])

    __repr__ = __str__


def _cells(row: GridCost, note: str) -> tuple[str, ...]:
    sides = " x ".join(map(str, row.sides))
    sizes = [human(n) for n in (row.activations, row.weights, row.bytes)]
    return (row.name, sides, *sizes, str(row.longest_row), note)


def best_grid(
    config: Config,
    devices: int,
    tokens: int,
    *,
    itemsize: int = 2,
    reshard_after_forward: bool = True,
) -> GridCosts:
    """Return what each device sends for one layer, for all sides of a grid, least first.

    It prints as a table: FSDP, Megatron's tensor parallelism, both, every grid with rows, and SUMMA
    for comparison. docs/appendix_tensor_grids.md has the formulas.

    Args:
        config: A `GPTConfig` or `LlamaConfig`, or an object that has its `linear_maps` and `heads`.
        devices: How many share the layer. Those along data or pipe do not count.
        tokens: How many all of them work on at a time: those of a microbatch.
        itemsize: The bytes of a number as it is sent; 2 in bfloat16.
        reshard_after_forward: Whether weights are gathered again in the backward pass, or kept.

    Example:
        >>> import hfjax
        >>> from hfjax.models.llama import LlamaConfig
        >>> found = hfjax.best_grid(LlamaConfig.preset("llama3-70b"), devices=64, tokens=8192)
        >>> found.least.sides, found.named("FSDP | TENSOR").sides
        ((2, 4, 8), (8, 1, 8))
    """
    _check(config, devices, tokens, itemsize)
    maps, times = config.linear_maps, 3 if reshard_after_forward else 2
    rows = []
    for sides in _all_sides(devices):
        found = sent_on_grid(maps, tokens, sides, times)
        longest = tokens // (sides[0] * sides[1])
        refused = _refused(config, tokens, sides)
        rows.append(_cost(_name(sides), sides, found, itemsize, longest, refused))
    for depth, side in _squares(devices):
        found = sent_by_summa(maps, tokens, side, depth)
        name = "SUMMA (2D)" if depth == 1 else "Tesseract (2.5D)"
        refused = _refused(config, tokens, (depth, side, side))
        longest = tokens // (depth * side)
        rows.append(_cost(name, (depth, side, side), found, itemsize, longest, refused))
    rows.sort(key=lambda row: row.bytes)
    _check_that_some_can_be(rows, devices, tokens)
    kept = "gathered twice" if reshard_after_forward else "gathered once and kept"
    title = (
        f"{devices} devices, {tokens} tokens: bytes that each sends for one layer, forward and "
        f"backward (sides: fsdp x row x tensor; weights {kept})"
    )
    return GridCosts(tuple(rows), title)


def _check_that_some_can_be(rows: list[GridCost], devices: int, tokens: int) -> None:
    if not all(row.refused for row in rows):
        return
    if all(tokens % (a * c) or tokens % (a * r) for a, r, c in (row.sides for row in rows)):
        raise ValueError(
            f"{tokens} tokens on {devices} devices: no sides divide them. "
            f"A multiple of {devices} divides on all sides."
        )
    first = rows[0]
    more = f", or a multiple of {devices} tokens" if tokens % devices else ""
    raise ValueError(
        f"{tokens} tokens on {devices} devices: no sides divide tokens, heads and widths; for "
        f"instance {first.name} of {' x '.join(map(str, first.sides))}: {first.refused}. Take "
        f"other devices{more}."
    )


def _check(config: object, devices: object, tokens: object, itemsize: object) -> None:
    if not hasattr(config, "linear_maps") or not hasattr(config, "heads"):
        raise ValueError(
            f"config is {config!r}: a GPTConfig or LlamaConfig of hfjax.models is expected, or an "
            "object that has `linear_maps` and `heads` as they have."
        )
    for name, value in (("devices", devices), ("tokens", tokens), ("itemsize", itemsize)):
        if not is_whole(value):
            raise ValueError(f"{name}={value!r}: a positive integer is expected.")


def _all_sides(devices: int) -> Iterator[tuple[int, int, int]]:
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for a in divisors:
        for r in divisors:
            if devices // a % r == 0:
                yield a, r, devices // a // r


def _squares(devices: int) -> Iterator[tuple[int, int]]:
    """Yield (layers, side) of all squares of at least 2 x 2, on layers that use all devices."""
    for side in range(2, math.isqrt(devices) + 1):
        if devices % side**2 == 0:
            yield devices // side**2, side


def _name(sides: tuple[int, int, int]) -> str:
    a, r, c = sides
    if r > 1:
        return "cube" if a == r == c else "FSDP | GRID" if a > 1 else "GRID"
    words = ["FSDP"] * (a > 1) + ["TENSOR"] * (c > 1)
    return " | ".join(words) if words else "one device"


def _refused(config: Config, tokens: int, sides: tuple[int, int, int]) -> str:
    """Return why these sides cannot be, if they cannot: what does not divide, mostly."""
    a, r, c = sides
    if r > 1 and c == 1:
        return "a grid of rows needs tensor > 1 too"
    heads = getattr(config, "kv_heads", config.heads)
    if heads % c:
        return f"{heads} heads do not divide by {c}"
    for number, (name, (inputs, outputs)) in enumerate(config.linear_maps.items()):
        into, out_of = (r, c) if number % 2 == 0 else (c, r)
        if inputs % into or outputs % out_of:
            return f"{name} of {inputs} x {outputs} does not divide by {into} x {out_of}"
        if inputs // into % a and outputs // out_of % a:
            return f"{name} of {inputs} x {outputs} does not divide by fsdp={a}, and stays whole"
    for number in (a * c, a * r):
        if tokens % number:
            return f"tokens do not divide by {number}"
    return ""


def _cost(
    name: str, sides: tuple[int, int, int], found: Found, itemsize: int, longest: int, why: str
) -> GridCost:
    activations, weights = (math.ceil(numbers * itemsize) for numbers in found)
    return GridCost(name, sides, activations, weights, longest, why)
