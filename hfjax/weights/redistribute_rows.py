"""How rows of a file get to where a layout has them, and back: collectives, written out.

A tensor comes as rows that are split over all devices of the mesh, and its block of a parameter is
split as the layout says. Which device reads which rows is chosen so that axes that split our
counterpart of the rows cost nothing; axes that split another dimension exchange (`all_to_all`), and
those that split nothing gather.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.weights.tensor_rules import Rule, Shape

Axes = tuple[str, ...]


@dataclass(frozen=True)
class Way:
    """The way of some tensors of one rule.

    Attributes:
        mesh: The devices.
        rule: What is done with each.
        first: The sizes of the dimensions that number them.
        entries: The axes that split each dimension of the block, `first` among them.
        padded: The size of the dimension `rule.along`, if this tensor has it to itself; None: it
            shares it with others, and axes that split it gather.
    """

    mesh: Mesh
    rule: Rule
    first: Shape
    entries: tuple[Axes, ...]
    padded: int | None

    @cached_property
    def of_rows(self) -> int:
        """How many dimensions of the view the rows are taken apart into."""
        count, size = 1, self.rule.view[0]
        while size < self.rule.shape[0]:
            size *= self.rule.view[count]
            count += 1
        return count

    def axes_of(self, dimension: int) -> Axes:
        """Return the axes that split a dimension of the view in the layout."""
        return self._large(self.entries[len(self.first) + self.rule.order.index(dimension)])

    def _large(self, axes: Axes) -> Axes:
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def _shared(self, dimension: int) -> bool:
        along = self.rule.along is not None and self.rule.order[self.rule.along] == dimension
        return along and (self.padded is None or dimension > 0)

    @cached_property
    def split(self) -> Axes:
        """The axes that split our counterpart of the rows: who reads them has them."""
        return () if self._shared(0) else self.axes_of(0)

    @cached_property
    def exchanges(self) -> list[tuple[int, Axes]]:
        """Other dimensions that are split, by their number among (first, rows, columns)."""
        found = [(i, self._large(axes)) for i, axes in enumerate(self.entries[: len(self.first)])]
        for at, dimension in enumerate(range(self.of_rows, len(self.rule.view))):
            if not self._shared(dimension):
                found.append((len(self.first) + 1 + at, self.axes_of(dimension)))
        return [(i, axes) for i, axes in found if axes]

    @cached_property
    def gathers(self) -> Axes:
        """The axes over which all have the same, or what cannot be exchanged."""
        used = {*self.split, *(axis for _, axes in self.exchanges for axis in axes)}
        return tuple(a for a, n in self.mesh.shape.items() if n > 1 and a not in used)

    @cached_property
    def late(self) -> list[tuple[int, Axes]]:
        """Dimensions of the block that are cut once it is whole, with their axes."""
        found = [(i, self._large(axes)) for i, axes in enumerate(self.entries)]
        return [(i, axes) for i, axes in found if axes and {*axes} & {*self.gathers}]

    @property
    def order(self) -> Axes:
        """The axes that split the rows, from the first to the last."""
        return (*self.split, *self.gathers, *(a for _, axes in self.exchanges for a in axes))

    def size(self, axes: Axes) -> int:
        """Return how many devices lie along some axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @cached_property
    def view(self) -> Shape:
        """The view of the tensor, with what pads it."""
        first, *others = self.rule.view
        owns = self.rule.along is not None and self.rule.order[self.rule.along] == 0
        return (self.padded if owns and self.padded else first, *others)

    @cached_property
    def part(self) -> int:
        """The rows of each part into which the layout splits them."""
        return math.prod(self.view[: self.of_rows]) // self.size(self.split)

    @cached_property
    def rows(self) -> int:
        """The rows that each device reads; the last of a part may have fewer."""
        return -(-self.part // (self.size(self.order) // self.size(self.split)))

    def place(self, device: Sequence[int]) -> tuple[int, int]:
        """Return the first row and the number of rows of a device, by its indices in the mesh."""
        index = dict(zip(self.mesh.axis_names, device, strict=True))
        at = 0
        for axis in self.order:
            at = at * self.mesh.shape[axis] + index[axis]
        part, of_part = divmod(at, self.size(self.order) // self.size(self.split))
        start = of_part * self.rows
        count = max(0, min(self.rows, self.part - start))
        start += part * self.part
        return start, max(0, min(count, self.rule.shape[0] - start))

    @cached_property
    def spec(self) -> P:
        """How an array of these rows is split: (first, rows, columns)."""
        return P(*[None] * len(self.first), self.order or None)

    @property
    def sharding(self) -> NamedSharding:
        """The same on the mesh."""
        return NamedSharding(self.mesh, self.spec)

    @property
    def shape(self) -> Shape:
        """The shape of that array."""
        return (*self.first, self.rows * self.size(self.order), *self.rule.shape[1:])

    # -- within a device ------------------------------------------------------------------

    def arrive(self, x: jax.Array) -> jax.Array:
        """Return the block that a device has, of the rows that it read."""
        n, dtype = len(self.first), x.dtype
        x = _bits(x)
        x = x.reshape(*x.shape[: n + 1], *self.view[self.of_rows :])
        for dimension, axes in reversed(self.exchanges):
            x = lax.all_to_all(x, axes, dimension, n, tiled=True)
        if self.gathers:
            x = lax.all_gather(x, self.gathers, axis=n, tiled=True)
        x = lax.slice_in_dim(x, 0, self.part, axis=n)
        x = x.reshape(*x.shape[:n], *self._rows_apart(), *x.shape[n + 1 :])
        x = x.transpose([*range(n), *(n + i for i in self.rule.order)])
        return lax.bitcast_convert_type(x, dtype)

    def leave(self, block: jax.Array) -> jax.Array:
        """Return the rows that a device writes, of the block that it has."""
        n, dtype = len(self.first), block.dtype
        block = _bits(block)
        back = sorted(range(len(self.rule.order)), key=self.rule.order.__getitem__)
        x = block.transpose([*range(n), *(n + i for i in back)])
        x = x.reshape(*x.shape[:n], self.part, *x.shape[n + self.of_rows :])
        short = self.rows * (self.size(self.order) // self.size(self.split)) - self.part
        if short:
            zero = jnp.zeros((), x.dtype)
            x = lax.pad(x, zero, [(0, short * (i == n), 0) for i in range(x.ndim)])
            x = lax.optimization_barrier(x)  # an exchange of known zeros does not compile (XLA)
        x = _own_part(x, n, self.gathers, self.size(self.gathers))
        for dimension, axes in self.exchanges:
            x = lax.all_to_all(x, axes, n, dimension, tiled=True)
        x = x.reshape(*x.shape[: n + 1], *self.rule.shape[1:])
        return lax.bitcast_convert_type(x, dtype)

    def _rows_apart(self) -> Shape:
        first, *others = self.view[: self.of_rows]
        return first // self.size(self.split), *others

    def cut(self, block: jax.Array) -> jax.Array:
        """Return what a device has of a whole block, along dimensions that were gathered."""
        for dimension, axes in self.late:
            block = _own_part(block, dimension, axes, self.size(axes))
        return block

    def whole(self, block: jax.Array) -> jax.Array:
        """Return a block whole along dimensions that cannot be exchanged."""
        for dimension, axes in self.late:
            block = lax.all_gather(block, axes, axis=dimension, tiled=True)
        return block


def _bits(x: jax.Array) -> jax.Array:
    """Return the bits of numbers: what moves is not looked at, nor widened where that is usual."""
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _own_part(x: jax.Array, dimension: int, axes: Axes, count: int) -> jax.Array:
    if count == 1:
        return x
    size = x.shape[dimension] // count
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis=dimension)


def ways_of(
    mesh: Mesh, rules: Sequence[Rule], first: Shape, spec: Sequence[Axes], shape: Shape
) -> list[Way]:
    """Return the way of each rule of a block, of which `shape` and `spec` are without `first`."""
    alone = len(rules) == 1
    size = lambda rule: None if rule.along is None or not alone else shape[rule.along]
    return [Way(mesh, rule, first, tuple(spec), size(rule)) for rule in rules]
