"""Whole matrices of a sharded stack: each device takes a share of the stack, by two all-to-alls.

A device has a shard of every matrix of a stack. Newton-Schulz needs whole matrices, and it is
enough that each is on one device. So devices exchange, for n devices and B matrices (what a device
has of a stack of layers, experts, gate and up):

| | on a device | sent by a device |
|---|---|---|
| before | 1/n of each of B matrices | |
| all-to-all | B/n whole matrices | (n - 1)/n of its shard |
| all-to-all, of the results | 1/n of each of B matrices | (n - 1)/n of its shard |

If n does not divide B, both all-to-alls are padded to ceil(B/n) matrices a device, with zeros.
A single matrix (B = 1) is all-gathered, n - 1 times the shard, and each device keeps its shard of
the result: two padded all-to-alls would send twice as much.

It is the same over every mesh axis that splits a side of the matrices: fsdp, context, data (ZeRO),
tensor, row. Axes that split the stack itself (pipe, expert) need no exchange. Devices along axes
that split nothing of an array have the same shard, and do the same work.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding

from hfjax.optimizers.matrix_axes import Dims, MatrixAxes


@dataclass(frozen=True)
class MatrixExchange:
    """The exchange of one array.

    Attributes:
        matrix: The dimensions that make matrices.
        sharding: The sharding of the array.
    """

    matrix: MatrixAxes
    sharding: NamedSharding

    def map_matrices(self, update: Callable, x: jax.Array) -> jax.Array:
        """Return the array of `update(stack)`, a function of whole matrices [B, *sides]."""
        run = partial(self._run_local, update)
        spec = self.sharding.spec
        return jax.shard_map(
            run, mesh=self.sharding.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )(x)

    @property
    def _axes(self) -> tuple[str, ...]:
        """The mesh axes, larger than 1, that split sides of the matrices: in the mesh's order."""
        split = {axis for dim in self.matrix.sides for axis in self._axes_of(dim)}
        return tuple(axis for axis in self.sharding.mesh.axis_names if axis in split)

    def _axes_of(self, dim: int) -> tuple[str, ...]:
        """Return the mesh axes, larger than 1, that split a dimension, major to minor."""
        spec = (*self.sharding.spec, *[None] * len(self.matrix.shape))
        names = spec[dim] or ()
        names = (names,) if isinstance(names, str) else names
        return tuple(axis for axis in names if self.sharding.mesh.shape[axis] > 1)

    @property
    def _sizes(self) -> Dims:
        return tuple(self.sharding.mesh.shape[axis] for axis in self._axes)

    def _run_local(self, update: Callable, shard: jax.Array) -> jax.Array:
        """Return a device's shard of the result."""
        x, axes, devices = self.matrix.stack(shard), self._axes, math.prod(self._sizes)
        count = x.shape[0]
        if devices == 1:
            new = update(x)
        elif count == 1:
            parts = lax.all_gather(x, axes)
            new = self._shards(update(self._full(parts)))[lax.axis_index(axes)]
        else:
            share = -(-count // devices)
            x = jnp.pad(x, [(0, share * devices - count), *[(0, 0)] * (x.ndim - 1)])
            send = partial(lax.all_to_all, axis_name=axes, split_axis=0, concat_axis=0)
            full = self._full(send(x.reshape(devices, share, *x.shape[1:])))
            new = send(self._shards(update(full))).reshape(x.shape)[:count]
        return self.matrix.unstack(new, shard.shape)

    def _full(self, shards: jax.Array) -> jax.Array:
        """Return whole matrices [B, *sides] of the shards [devices, B, *sides] of all devices."""
        sizes = self._sizes
        x = shards.reshape(*sizes, *shards.shape[1:])
        order = [len(sizes)]
        for i, dim in enumerate(self.matrix.sides):
            order += [self._axes.index(axis) for axis in self._axes_of(dim)]
            order.append(len(sizes) + 1 + i)
        sides = [self.matrix.shape[dim] for dim in self.matrix.sides]
        return x.transpose(order).reshape(shards.shape[1], *sides)

    def _shards(self, x: jax.Array) -> jax.Array:
        """Return the shards [devices, B, *sides] of whole matrices [B, *sides]."""
        split, axes = [x.shape[0]], list[str]()
        order = [0]
        for dim in self.matrix.sides:
            own = self._axes_of(dim)
            sizes = [self.sharding.mesh.shape[axis] for axis in own]
            split += [*sizes, self.matrix.shape[dim] // math.prod(sizes)]
            order.append(len(split) - 1)
            axes += own
        places = self._places()
        first = [places[axis] for axis in self._axes]
        x = x.reshape(split).transpose(*first, *order)
        return x.reshape(math.prod(self._sizes), *x.shape[len(first) :])

    def _places(self) -> dict[str, int]:
        """Return where each mesh axis is among the dimensions of matrices split into shards."""
        places, at = dict[str, int](), 1
        for dim in self.matrix.sides:
            for axis in self._axes_of(dim):
                places[axis] = at
                at += 1
            at += 1
        return places
