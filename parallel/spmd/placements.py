"""Placements: what a device holds of each value of a program that runs on shards.

A program is traced at global shapes. When it runs, a value is one of

- an array: replicated, the same on every device (`REPLICATED`);
- `ShardedValue`: sharded along a dimension; a device holds its shard (the placement is a `Split`);
- `PartialValue`: the sum over the devices is the value (`PARTIAL`). Linear equations keep it so;
- `LazyValue`: not computed yet (an iota, a mask, random bits). A device can compute its shard only;
- `Ungathered`: not all-gathered yet (a parameter).

Derivatives are JAX's own, since all of this is a program that JAX differentiates. The cotangent of
a sharded value is sharded alike, that of a replicated value is partial, that of a partial value is
replicated.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from hfjax.utils.trace_context import MISPLACES_SCATTERS, current_auto_axes

Shape = tuple[int, ...]


class Split(NamedTuple):
    """How a dimension is split: it has `blocks` blocks, and a device its shard of each of them.

    [B] -> [S * B] has S blocks, for instance, and so has `concatenate` of S arrays of B examples.
    """

    dim: int
    blocks: int = 1

    def with_dim(self, dim: int) -> "Split":
        """Return the same split of another dimension."""
        return Split(dim, self.blocks)


REPLICATED, PARTIAL = "same", "sum"
Placement = Split | str
BATCH_SPLIT = Split(0)


@partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["split"])
@dataclass(frozen=True, eq=False)
class ShardedValue:
    """A value sharded along one dimension: `x` is this device's shard."""

    x: jax.Array
    split: Split = BATCH_SPLIT


@partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=[])
@dataclass(frozen=True, eq=False)
class PartialValue:
    """A partial sum: the value is the sum of `x` over the devices."""

    x: jax.Array


@dataclass(frozen=True, eq=False)
class LazyValue:
    """A value that no device has computed yet.

    Attributes:
        shape: The global shape.
        dtype: Its dtype.
        make: (context, split or None) -> this device's shard, or the full array.
        is_constant: Whether it depends on nothing but constants of the program.
    """

    shape: Shape
    dtype: Any
    make: Callable[[Any, Split | None], jax.Array]
    is_constant: bool = False


class Ungathered(ABC):
    """A parameter that is all-gathered when an equation uses it, once."""

    param: Any  # a pytree, which may enter a loop or a rematerialised function

    @abstractmethod
    def unshard(self) -> jax.Array:
        """Return the full parameter."""

    @property
    @abstractmethod
    def can_slice(self) -> bool:
        """Whether a loop may slice it before it is gathered."""


def placement_of(value: object) -> Placement:
    """Return the placement of a value."""
    if isinstance(value, ShardedValue):
        return value.split
    return PARTIAL if isinstance(value, PartialValue) else REPLICATED


def from_local(x: jax.Array, placement: Placement) -> ShardedValue | PartialValue | jax.Array:
    """Return the value with this placement of which `x` is the local array."""
    if isinstance(placement, Split):
        return ShardedValue(x, placement)
    return PartialValue(x) if placement == PARTIAL else x


def cotangent_placement(placement: Placement) -> Placement:
    """Return the placement of the cotangent of a value with this placement."""
    return (
        placement
        if isinstance(placement, Split)
        else REPLICATED
        if placement == PARTIAL
        else PARTIAL
    )


def _next_placement(
    placement: Placement, returned: Placement, number: int, fixed: set[int]
) -> Placement:
    """Return the placement to try next for the carry of a loop with this number.

    A replicated carry may become sharded or partial, once; those in `fixed` no longer change.
    """
    if returned == placement or (isinstance(placement, Split) and not isinstance(returned, Split)):
        return placement
    if placement == REPLICATED:
        return returned
    fixed.add(number)
    return returned if placement == PARTIAL and isinstance(returned, Split) else REPLICATED


def loop_placements(
    placements: list[Placement], run: Callable[[list[Placement]], list[Placement]]
) -> list[Placement]:
    """Return the first placements that `run(placements)`, one loop iteration, returns again."""
    fixed: set[int] = set()
    while True:
        outs = run(placements)
        if len(outs) != len(placements):  # which JAX refuses
            return placements
        new = [
            placement if i in fixed else _next_placement(placement, out, i, fixed)
            for i, (placement, out) in enumerate(zip(placements, outs, strict=True))
        ]
        if new == placements:
            return placements
        placements = new


def is_distributed(x: object) -> bool:
    """Return whether a value is sharded or partial."""
    return isinstance(x, ShardedValue | PartialValue)


def local_array(value: Any) -> jax.Array:
    """Return this device's array of a value."""
    return value.x if isinstance(value, ShardedValue | PartialValue) else jnp.asarray(value)


@dataclass(frozen=True)
class AxisGroup:
    """The devices along mesh axes that shard one thing: the batch, positions or heads.

    Attributes:
        axes: The mesh axes.
        size: The number of devices.
        name: What they shard.
        chunks: Which chunks, all of one size, each device holds, in order; None: one each.
        blocks: Over how many devices the batch is split besides: the group shards each one's block.
    """

    axes: tuple[str, ...]
    size: int
    name: str = "examples"
    chunks: tuple[tuple[int, ...], ...] | None = None
    blocks: int = 1

    @property
    def axis_index(self) -> jax.Array:
        """The index of this device."""
        return lax.axis_index(self.axes)

    @property
    def device_chunks(self) -> tuple[tuple[int, ...], ...]:
        """The chunks that each device holds."""
        return self.chunks or tuple((i,) for i in range(self.size))

    @property
    def num_chunks(self) -> int:
        """The number of chunks of a dimension."""
        return self.size * len(self.device_chunks[0])

    @property
    def local_chunks(self) -> jax.Array:
        """The numbers of the chunks that this device holds."""
        return (
            jnp.asarray(self.device_chunks, "int32")[self.axis_index]
            if self.chunks
            else self.axis_index[None]
        )

    def local_shape(self, shape: Shape, split: Split) -> Shape:
        """Return the shape of a shard of an array of this shape."""
        return (*shape[: split.dim], shape[split.dim] // self.size, *shape[split.dim + 1 :])

    def global_shape(self, shape: Shape, split: Split) -> Shape:
        """Return the shape of the array that has shards of this shape."""
        return (*shape[: split.dim], shape[split.dim] * self.size, *shape[split.dim + 1 :])

    def divides(self, shape: Shape, split: Split) -> bool:
        """Return whether an array of this shape can be split so."""
        return shape[split.dim] > 0 and shape[split.dim] % (self.num_chunks * split.blocks) == 0

    # -- collectives -------------------------------------------------------------------------

    def replicate(self, value: Any) -> jax.Array:
        """Return the full array of a value, on every device."""
        if isinstance(value, ShardedValue):
            return self.all_gather(value.x, value.split)
        return self.all_reduce(value.x) if isinstance(value, PartialValue) else value

    def all_reduce(self, x: jax.Array) -> jax.Array:
        """Return the sum over the devices, computed in at least float32."""
        return lax.psum(widen(x), self.axes).astype(x.dtype)

    def all_reduce_max(self, x: jax.Array) -> jax.Array:
        """Return the maximum over the devices; NaN where one has it."""
        return _reduce_by_order(lambda x: lax.pmax(x, self.axes), widen(x), "max").astype(x.dtype)

    def all_reduce_min(self, x: jax.Array) -> jax.Array:
        """Return the minimum over the devices; NaN where one has it."""
        return _reduce_by_order(lambda x: lax.pmin(x, self.axes), widen(x), "min").astype(x.dtype)

    def all_gather_stack(self, x: jax.Array) -> jax.Array:
        """Return the arrays of all devices, [devices, ...]."""
        return self._gather_tiled(x[None], 0)

    def all_gather(self, x: jax.Array, split: Split) -> jax.Array:
        """Return the full array of which the devices hold shards."""
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = self.all_gather(jax.random.key_data(x), split)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        if split.blocks == 1 and not self.chunks:
            return self._gather_tiled(x, split.dim)
        blocks = self._split_dim(x, split.dim, split.blocks, x.shape[split.dim] // split.blocks)
        gathered = self._gather_tiled(blocks, split.dim + 1)
        if self.chunks:
            order = sorted(range(self.num_chunks), key=self._chunk_order.__getitem__)
            gathered = self._reorder_chunks(gathered, split.dim + 1, order)
        return gathered.reshape(self.global_shape(x.shape, split))

    @property
    def _chunk_order(self) -> list[int]:
        """The chunks of all devices, one device after the other."""
        return [chunk for chunks in self.device_chunks for chunk in chunks]

    def _split_dim(self, x: jax.Array, dim: int, *sizes: int) -> jax.Array:
        return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])

    def _reorder_chunks(self, x: jax.Array, dim: int, order: list[int]) -> jax.Array:
        """Return an array whose chunks along a dimension are in this order."""
        chunks = self._split_dim(x, dim, self.num_chunks, x.shape[dim] // self.num_chunks)
        take = lambda i: lax.index_in_dim(chunks, i, dim, keepdims=False)
        return lax.concatenate([take(i) for i in order], dim)

    def _gather_tiled(self, x: jax.Array, dim: int) -> jax.Array:
        gather = _isolate(partial(lax.all_gather, axis_name=self.axes, axis=dim, tiled=True))
        if x.dtype == jnp.bool_:
            return gather(x.astype("uint8")).astype(bool)
        if widen(x).dtype == x.dtype:
            return gather(x)
        narrow = jax.custom_jvp(gather)  # its derivative is a sum, in a wide dtype
        narrow.defjvp(lambda xs, dxs: (gather(*xs), gather(widen(*dxs)).astype(x.dtype)))
        return narrow(x)

    def reduce_scatter(self, x: jax.Array, split: Split) -> jax.Array:
        """Return this device's shard of the sum over the devices."""
        if split.blocks > 1:
            return self.slice_local(self.all_reduce(x), split)
        ordered = self._reorder_chunks(x, split.dim, self._chunk_order) if self.chunks else x
        scatter = partial(
            lax.psum_scatter, axis_name=self.axes, scatter_dimension=split.dim, tiled=True
        )
        return _isolate(scatter)(widen(ordered)).astype(x.dtype)

    def slice_local(self, x: jax.Array, split: Split) -> jax.Array:
        """Return this device's shard of a replicated array, without communication."""
        chunk_size = x.shape[split.dim] // (split.blocks * self.num_chunks)
        if split.blocks == 1:
            take = lambda i: lax.dynamic_slice_in_dim(x, i * chunk_size, chunk_size, split.dim)
            return _concatenate([take(i) for i in self._chunk_indices], split.dim)
        blocks = self._split_dim(x, split.dim, split.blocks, self.num_chunks, chunk_size)
        index = lambda i: lax.dynamic_index_in_dim(blocks, i, split.dim + 1, keepdims=False)
        chunks = _concatenate([index(i) for i in self._chunk_indices], split.dim + 1)
        return chunks.reshape(self.local_shape(x.shape, split))

    @property
    def _chunk_indices(self) -> list[jax.Array]:
        """The number of each chunk that this device holds."""
        return (
            [self.local_chunks[i] for i in range(len(self.device_chunks[0]))]
            if self.chunks
            else [self.axis_index]
        )

    def global_indices(self, size: int, blocks: int, dtype: DTypeLike = "int32") -> jax.Array:
        """Return the indices, in a dimension of this global size, of this device's entries."""
        chunk_size = size // blocks // self.num_chunks
        starts = self.local_chunks.astype(dtype) * chunk_size
        indices = (starts[:, None] + lax.iota(dtype, chunk_size)[None]).reshape(-1)
        block_starts = lax.iota(dtype, blocks) * (size // blocks)
        return (block_starts[:, None] + indices[None]).reshape(-1)

    def all_reduce_mean(self, x: jax.Array) -> jax.Array:
        """Return the mean over the devices; of integers the maximum."""
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return self.all_reduce_max(x)
        return (lax.psum(widen(x), self.axes) / self.size).astype(x.dtype)

    def as_partial(self, x: jax.Array) -> jax.Array:
        """Return this device's term of a replicated array: the terms add up to it."""
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return x / self.size
        return jnp.where(self.axis_index == 0, x, jnp.zeros_like(x))

    def as_partial_tree(self, tree: Any) -> Any:
        """Return this device's term of each value of a tree; sharded values are gathered first."""
        if self.size == 1:
            return tree
        to_partial = lambda v: (
            v.x if isinstance(v, PartialValue) else self.as_partial(jnp.asarray(self.replicate(v)))
        )
        return jax.tree.map(to_partial, tree, is_leaf=is_distributed)

    def redistribute(self, value: Any, placement: Placement) -> jax.Array:
        """Return this device's array of a value, redistributed to this placement."""
        if placement_of(value) == placement:
            return value.x if is_distributed(value) else jnp.asarray(value)
        full_array = jnp.asarray(self.replicate(value))
        if isinstance(placement, Split):
            return self.slice_local(full_array, placement)
        return self.as_partial_tree(full_array) if placement == PARTIAL else full_array

    def broadcast_from_first(self, x: jax.Array) -> jax.Array:
        """Return the first device's decision, where rounding may differ between devices."""
        contribution = jnp.where(self.axis_index == 0, x.astype("int32"), 0)
        return lax.psum(contribution, self.axes).astype(x.dtype)


def _isolate(collective: Callable) -> Callable:
    """Return a collective that XLA fuses with no scatter along a dimension that it splits."""
    return (
        (lambda x: lax.optimization_barrier(collective(lax.optimization_barrier(x))))
        if MISPLACES_SCATTERS and current_auto_axes()
        else collective
    )


ONE_DEVICE = AxisGroup((), 1)


def _concatenate(arrays: list[jax.Array], dim: int) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else lax.concatenate(arrays, dim)


def _reduce_by_order(extreme: Callable, x: jax.Array, limit: str) -> jax.Array:
    """Return an extreme of integers in the order of x; XLA's own, on CPUs, drops NaN."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return extreme(x)
    int_info = jnp.iinfo(f"int{8 * x.dtype.itemsize}")
    flip_order = lambda n: jnp.where(n < 0, n ^ int_info.max, n)  # its own inverse
    best = extreme(
        jnp.where(jnp.isnan(x), getattr(int_info, limit), flip_order(x.view(int_info.dtype)))
    )
    return flip_order(best).view(x.dtype)


def widen(x: jax.Array) -> jax.Array:
    """Return an array in a dtype whose sums are exact enough, and known to all XLA backends."""
    if x.dtype == jnp.bool_:
        return x.astype("int32")
    if jnp.issubdtype(x.dtype, jnp.floating):
        return x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return x
