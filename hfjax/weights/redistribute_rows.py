"""Reshard the rows of a file to a layout, and back, with explicit collectives.

A tensor is read as rows sharded over all devices of the mesh, and its block of a parameter is
sharded as the layout says. Rows are assigned to devices so that mesh axes that shard the matching
dimension of the parameter need no communication; axes that shard another dimension need an
`all_to_all`, and those that shard nothing an all-gather.
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
class RowPlan:
    """How to reshard some tensors of one rule.

    Attributes:
        mesh: The device mesh.
        rule: The rule of each tensor.
        stack_shape: The sizes of the dimensions that number tensors.
        entries: The mesh axes that shard each dimension of the block, `stack_shape` included.
        padded_size: The size of the dimension `rule.concat_dim`, if only this tensor fills it;
            None: it shares it with others, and axes that shard it need an all-gather.
    """

    mesh: Mesh
    rule: Rule
    stack_shape: Shape
    entries: tuple[Axes, ...]
    padded_size: int | None

    @cached_property
    def num_row_dims(self) -> int:
        """The number of dimensions of the view that the rows are split into."""
        count, size = 1, self.rule.view[0]
        while size < self.rule.shape[0]:
            size *= self.rule.view[count]
            count += 1
        return count

    def dim_axes(self, dimension: int) -> Axes:
        """Return the axes that shard a dimension of the view in the layout."""
        return self._multi_device(
            self.entries[len(self.stack_shape) + self.rule.order.index(dimension)]
        )

    def _multi_device(self, axes: Axes) -> Axes:
        return tuple(axis for axis in axes if self.mesh.shape[axis] > 1)

    def _is_shared(self, dimension: int) -> bool:
        is_concat_dim = (
            self.rule.concat_dim is not None and self.rule.order[self.rule.concat_dim] == dimension
        )
        return is_concat_dim and (self.padded_size is None or dimension > 0)

    @cached_property
    def row_axes(self) -> Axes:
        """The axes that shard the rows in the layout: each device reads the rows that it stores."""
        return () if self._is_shared(0) else self.dim_axes(0)

    @cached_property
    def all_to_alls(self) -> list[tuple[int, Axes]]:
        """Other sharded dimensions, as (number among (stack, rows, columns), axes)."""
        dims = [
            (i, self._multi_device(axes))
            for i, axes in enumerate(self.entries[: len(self.stack_shape)])
        ]
        for i, dimension in enumerate(range(self.num_row_dims, len(self.rule.view))):
            if not self._is_shared(dimension):
                dims.append((len(self.stack_shape) + 1 + i, self.dim_axes(dimension)))
        return [(i, axes) for i, axes in dims if axes]

    @cached_property
    def gather_axes(self) -> Axes:
        """The axes that replicate the block, or shard it as no `all_to_all` can."""
        used = {*self.row_axes, *(axis for _, axes in self.all_to_alls for axis in axes)}
        return tuple(a for a, n in self.mesh.shape.items() if n > 1 and a not in used)

    @cached_property
    def gathered_dims(self) -> list[tuple[int, Axes]]:
        """Dimensions of the block that are sliced after the all-gather, with their axes."""
        dims = [(i, self._multi_device(axes)) for i, axes in enumerate(self.entries)]
        return [(i, axes) for i, axes in dims if axes and {*axes} & {*self.gather_axes}]

    @property
    def axis_order(self) -> Axes:
        """The axes that shard the rows, from major to minor."""
        return (
            *self.row_axes,
            *self.gather_axes,
            *(a for _, axes in self.all_to_alls for a in axes),
        )

    def num_devices(self, axes: Axes) -> int:
        """Return the number of devices along some axes."""
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @cached_property
    def view(self) -> Shape:
        """The view of the tensor, with padding."""
        first, *others = self.rule.view
        is_row_dim = self.rule.concat_dim is not None and self.rule.order[self.rule.concat_dim] == 0
        return (self.padded_size if is_row_dim and self.padded_size else first, *others)

    @cached_property
    def shard_rows(self) -> int:
        """The number of rows of each shard in the layout."""
        return math.prod(self.view[: self.num_row_dims]) // self.num_devices(self.row_axes)

    @cached_property
    def device_rows(self) -> int:
        """The number of rows that each device reads; the last of a shard may have fewer."""
        return -(
            -self.shard_rows
            // (self.num_devices(self.axis_order) // self.num_devices(self.row_axes))
        )

    def row_range(self, device: Sequence[int]) -> tuple[int, int]:
        """Return the first row and the number of rows of a device, by its indices in the mesh."""
        index = dict(zip(self.mesh.axis_names, device, strict=True))
        rank = 0
        for axis in self.axis_order:
            rank = rank * self.mesh.shape[axis] + index[axis]
        shard, shard_position = divmod(
            rank, self.num_devices(self.axis_order) // self.num_devices(self.row_axes)
        )
        start = shard_position * self.device_rows
        count = max(0, min(self.device_rows, self.shard_rows - start))
        start += shard * self.shard_rows
        return start, max(0, min(count, self.rule.shape[0] - start))

    @cached_property
    def spec(self) -> P:
        """The partition spec of an array of these rows: (stack, rows, columns)."""
        return P(*[None] * len(self.stack_shape), self.axis_order or None)

    @property
    def sharding(self) -> NamedSharding:
        """The sharding of that array."""
        return NamedSharding(self.mesh, self.spec)

    @property
    def shape(self) -> Shape:
        """The shape of that array."""
        return (
            *self.stack_shape,
            self.device_rows * self.num_devices(self.axis_order),
            *self.rule.shape[1:],
        )

    # -- within a device ------------------------------------------------------------------

    def rows_to_block(self, x: jax.Array) -> jax.Array:
        """Return a device's block from the rows that it read."""
        n, dtype = len(self.stack_shape), x.dtype
        x = _to_bits(x)
        x = x.reshape(*x.shape[: n + 1], *self.view[self.num_row_dims :])
        for dimension, axes in reversed(self.all_to_alls):
            x = lax.all_to_all(x, axes, dimension, n, tiled=True)
        if self.gather_axes:
            x = lax.all_gather(x, self.gather_axes, axis=n, tiled=True)
        x = lax.slice_in_dim(x, 0, self.shard_rows, axis=n)
        x = x.reshape(*x.shape[:n], *self._row_dims(), *x.shape[n + 1 :])
        x = x.transpose([*range(n), *(n + i for i in self.rule.order)])
        return lax.bitcast_convert_type(x, dtype)

    def block_to_rows(self, block: jax.Array) -> jax.Array:
        """Return the rows that a device writes, from its block."""
        n, dtype = len(self.stack_shape), block.dtype
        block = _to_bits(block)
        inverse = sorted(range(len(self.rule.order)), key=self.rule.order.__getitem__)
        x = block.transpose([*range(n), *(n + i for i in inverse)])
        x = x.reshape(*x.shape[:n], self.shard_rows, *x.shape[n + self.num_row_dims :])
        num_padding = (
            self.device_rows
            * (self.num_devices(self.axis_order) // self.num_devices(self.row_axes))
            - self.shard_rows
        )
        if num_padding:
            zero = jnp.zeros((), x.dtype)
            x = lax.pad(x, zero, [(0, num_padding * (i == n), 0) for i in range(x.ndim)])
            x = lax.optimization_barrier(x)  # XLA fails to compile an all_to_all of known zeros
        x = _slice_local(x, n, self.gather_axes, self.num_devices(self.gather_axes))
        for dimension, axes in self.all_to_alls:
            x = lax.all_to_all(x, axes, n, dimension, tiled=True)
        x = x.reshape(*x.shape[: n + 1], *self.rule.shape[1:])
        return lax.bitcast_convert_type(x, dtype)

    def _row_dims(self) -> Shape:
        first, *others = self.view[: self.num_row_dims]
        return first // self.num_devices(self.row_axes), *others

    def slice_local(self, block: jax.Array) -> jax.Array:
        """Return a device's slice of a block along the dimensions that were gathered."""
        for dimension, axes in self.gathered_dims:
            block = _slice_local(block, dimension, axes, self.num_devices(axes))
        return block

    def all_gather(self, block: jax.Array) -> jax.Array:
        """Return a block all-gathered along `gathered_dims`."""
        for dimension, axes in self.gathered_dims:
            block = lax.all_gather(block, axes, axis=dimension, tiled=True)
        return block


def _to_bits(x: jax.Array) -> jax.Array:
    """Return the bits of numbers, so that transfers neither interpret nor widen them."""
    return lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")


def _slice_local(x: jax.Array, dimension: int, axes: Axes, count: int) -> jax.Array:
    if count == 1:
        return x
    size = x.shape[dimension] // count
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axes) * size, size, axis=dimension)


def row_plans(
    mesh: Mesh, rules: Sequence[Rule], stack_shape: Shape, spec: Sequence[Axes], shape: Shape
) -> list[RowPlan]:
    """Return the plan of each rule of a block; `shape` excludes the `stack_shape` dimensions."""
    is_only = len(rules) == 1
    size = lambda rule: None if rule.concat_dim is None or not is_only else shape[rule.concat_dim]
    return [RowPlan(mesh, rule, stack_shape, tuple(spec), size(rule)) for rule in rules]
