"""What a transformer's layer sends on a grid of devices, by formula, and the sides that send least.

A grid has sides a x r x c, the mesh axes fsdp, row and tensor. A linear map of T tokens from k to n
features has its activations sharded over ((a, c), r), [tokens, features], its weights over
((r, a), c). Each device all-gathers activations over c and weights over a, multiplies, and
reduce-scatters the outputs over r: they are sharded over ((a, r), c). The next map has r and c
swapped, so after two maps the residual stream is sharded as before. Sent by each device, in
numbers, forward and backward:

- activations: 2 T / (a r c) · ((c - 1) k + (r - 1) n); in the maps that lead back to the residual
  stream r and c are swapped,
- weights: 3 (a - 1) / a · k n / (r c): gathered twice, scattered once; 2 where what the forward
  pass gathered is kept for the backward pass.

SUMMA on q x q devices sends 3 (q - 1) / q² · (T k + k n), and on d such layers (Tesseract) the same
with T / d tokens, and 2 (d - 1) / d · k n / q² for the gradients of the weights.

Attention sends nothing: devices have whole heads of full sequences. Not counted are norms, for
which the devices along r add one or two numbers a token, and biases.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

from hfjax.utils.keywords import is_int
from hfjax.utils.tables import align, human


class Config(Protocol):
    """The shape of a transformer's layer; its `kv_heads`, if any, are sharded by whole heads."""

    @property
    def linear_maps(self) -> Mapping[str, tuple[int, int]]:
        """Inputs and outputs: alternately out of the residual stream, and back into it."""
        ...

    @property
    def heads(self) -> int:
        """Its heads of queries."""
        ...


CommVolume = tuple[Fraction, Fraction]  # numbers that a device sends: of activations, of weights


def grid_comm_volume(
    maps: Mapping[str, tuple[int, int]], tokens: int, shape: tuple[int, int, int], times: int = 3
) -> CommVolume:
    """Return what each device sends for these maps on sides (a, r, c): activations, weights.

    >>> [int(n) for n in grid_comm_volume({"up": (8, 32)}, 16, (2, 1, 4))]  # r = 1: FSDP x TP
    [96, 96]
    """
    a, r, c = shape
    activations = weights = Fraction(0)
    for number, (inputs, outputs) in enumerate(maps.values()):
        gather_size, scatter_size = (
            (c, r) if number % 2 == 0 else (r, c)
        )  # gathered over one, scattered over
        features = (gather_size - 1) * inputs + (scatter_size - 1) * outputs
        activations += Fraction(2 * tokens * features, a * r * c)
        weights += Fraction(times * (a - 1) * inputs * outputs, a * r * c)
    return activations, weights


def summa_comm_volume(
    maps: Mapping[str, tuple[int, int]], tokens: int, size: int, depth: int = 1
) -> CommVolume:
    """Return what each device sends for these maps on `depth` squares: activations, weights.

    >>> [int(n) for n in summa_comm_volume({"up": (8, 32)}, 16, size=2)]
    [96, 192]
    """
    features = sum(inputs for inputs, _ in maps.values())
    numbers = sum(inputs * outputs for inputs, outputs in maps.values())
    share = Fraction(3 * (size - 1), size**2)
    over_layers = Fraction(2 * (depth - 1) * numbers, depth * size**2)
    return share * tokens * features / depth, share * numbers + over_layers


@dataclass(frozen=True)
class GridCost:
    """What one arrangement of the devices sends, and why it is impossible, if it is."""

    name: str
    shape: tuple[int, int, int]  # fsdp, row, tensor; of SUMMA: layers, rows and columns
    activations: int  # bytes that each device sends for one layer, forward and backward
    weights: int
    longest_row: int  # tokens; attention shards whole sequences over fsdp and row
    refusal: str = ""

    @property
    def bytes(self) -> int:
        """Both together."""
        return self.activations + self.weights


@dataclass(frozen=True)
class GridCosts:
    """All arrangements of the devices, the one that sends least first: print it."""

    entries: tuple[GridCost, ...]
    title: str

    @property
    def least(self) -> GridCost:
        """The possible one that sends least. SUMMA, which hfjax only compares with, counts too."""
        return next(entry for entry in self.entries if not entry.refusal)

    def named(self, name: str) -> GridCost:
        """Return the possible one of a name, for instance "FSDP | TENSOR", that sends least.

        Args:
            name: As the table shows it. If none of this name is possible, the first is returned.
        """
        matches = [entry for entry in self.entries if entry.name == name]
        if not matches:
            known = sorted({entry.name for entry in self.entries})
            raise ValueError(f"no row {name!r}. There are: {', '.join(known)}.")
        return min(matches, key=lambda entry: bool(entry.refusal))  # the first of equals: the least

    def __iter__(self) -> Iterator[GridCost]:
        return iter(self.entries)

    def __str__(self) -> str:
        head = ("", "sides", "activations", "weights", "both", "longest row", "")
        least = self.least
        lines = [
            _line(entry, "least" if entry is least else entry.refusal) for entry in self.entries
        ]
        return "\n".join([self.title, *align([head, *lines], numbers=(2, 3, 4, 5))])

    __repr__ = __str__


def _line(entry: GridCost, remark: str) -> tuple[str, ...]:
    shape = " x ".join(map(str, entry.shape))
    sizes = [human(n) for n in (entry.activations, entry.weights, entry.bytes)]
    return (entry.name, shape, *sizes, str(entry.longest_row), remark)


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
        tokens: How many all of them process at a time: those of a microbatch.
        itemsize: The bytes of a number as it is sent; 2 in bfloat16.
        reshard_after_forward: Whether weights are gathered again in the backward pass, or kept.

    Example:
        >>> import hfjax
        >>> from hfjax.models.llama import LlamaConfig
        >>> found = hfjax.best_grid(LlamaConfig.preset("llama3-70b"), devices=64, tokens=8192)
        >>> found.least.shape, found.named("FSDP | TENSOR").shape
        ((2, 4, 8), (8, 1, 8))
    """
    _check(config, devices, tokens, itemsize)
    maps, times = config.linear_maps, 3 if reshard_after_forward else 2
    entries = []
    for shape in _grid_shapes(devices):
        volume = grid_comm_volume(maps, tokens, shape, times)
        longest = tokens // (shape[0] * shape[1])
        refusal = _refusal(config, tokens, shape)
        entries.append(_grid_cost(_grid_name(shape), shape, volume, itemsize, longest, refusal))
    for depth, size in _square_grids(devices):
        volume = summa_comm_volume(maps, tokens, size, depth)
        name = "SUMMA (2D)" if depth == 1 else "Tesseract (2.5D)"
        refusal = _refusal(config, tokens, (depth, size, size))
        longest = tokens // (depth * size)
        entries.append(_grid_cost(name, (depth, size, size), volume, itemsize, longest, refusal))
    entries.sort(key=lambda entry: entry.bytes)
    _check_any_fits(entries, devices, tokens)
    gather_text = "gathered twice" if reshard_after_forward else "gathered once and kept"
    title = (
        f"{devices} devices, {tokens} tokens: bytes that each sends for one layer, forward and "
        f"backward (sides: fsdp x row x tensor; weights {gather_text})"
    )
    return GridCosts(tuple(entries), title)


def _check_any_fits(entries: list[GridCost], devices: int, tokens: int) -> None:
    if not all(entry.refusal for entry in entries):
        return
    if all(tokens % (a * c) or tokens % (a * r) for a, r, c in (entry.shape for entry in entries)):
        raise ValueError(
            f"{tokens} tokens on {devices} devices: no sides divide them. "
            f"A multiple of {devices} divides on all sides."
        )
    first = entries[0]
    more = f", or a multiple of {devices} tokens" if tokens % devices else ""
    raise ValueError(
        f"{tokens} tokens on {devices} devices: no sides divide tokens, heads and widths; for "
        f"instance {first.name} of {' x '.join(map(str, first.shape))}: {first.refusal}. Take "
        f"other devices{more}."
    )


def _check(config: object, devices: object, tokens: object, itemsize: object) -> None:
    if not hasattr(config, "linear_maps") or not hasattr(config, "heads"):
        raise ValueError(
            f"config is {config!r}: a GPTConfig or LlamaConfig of hfjax.models is expected, or an "
            "object that has `linear_maps` and `heads` as they have."
        )
    for name, value in (("devices", devices), ("tokens", tokens), ("itemsize", itemsize)):
        if not is_int(value):
            raise ValueError(f"{name}={value!r}: a positive integer is expected.")


def _grid_shapes(devices: int) -> Iterator[tuple[int, int, int]]:
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    for a in divisors:
        for r in divisors:
            if devices // a % r == 0:
                yield a, r, devices // a // r


def _square_grids(devices: int) -> Iterator[tuple[int, int]]:
    """Yield (layers, side) of all squares of at least 2 x 2, on layers that use all devices."""
    for size in range(2, math.isqrt(devices) + 1):
        if devices % size**2 == 0:
            yield devices // size**2, size


def _grid_name(shape: tuple[int, int, int]) -> str:
    a, r, c = shape
    if r > 1:
        return "cube" if a == r == c else "FSDP | GRID" if a > 1 else "GRID"
    names = ["FSDP"] * (a > 1) + ["TENSOR"] * (c > 1)
    return " | ".join(names) if names else "one device"


def _refusal(config: Config, tokens: int, shape: tuple[int, int, int]) -> str:
    """Return why these sides are impossible, if they are: what does not divide, mostly."""
    a, r, c = shape
    if r > 1 and c == 1:
        return "a grid of rows needs tensor > 1 too"
    heads = getattr(config, "kv_heads", config.heads)
    if heads % c:
        return f"{heads} heads do not divide by {c}"
    for number, (name, (inputs, outputs)) in enumerate(config.linear_maps.items()):
        in_size, out_size = (r, c) if number % 2 == 0 else (c, r)
        if inputs % in_size or outputs % out_size:
            return f"{name} of {inputs} x {outputs} does not divide by {in_size} x {out_size}"
        if inputs // in_size % a and outputs // out_size % a:
            return f"{name} of {inputs} x {outputs} does not divide by fsdp={a}, and stays whole"
    for number in (a * c, a * r):
        if tokens % number:
            return f"tokens do not divide by {number}"
    return ""


def _grid_cost(
    name: str,
    shape: tuple[int, int, int],
    volume: CommVolume,
    itemsize: int,
    longest: int,
    why: str,
) -> GridCost:
    activations, weights = (math.ceil(numbers * itemsize) for numbers in volume)
    return GridCost(name, shape, activations, weights, longest, why)
