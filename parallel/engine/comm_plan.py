"""All-gathers and reduce-scatters along one dimension, by XLA's collective or a kernel.

A `CollectiveKernel` replaces XLA's collective for single arrays (a kernel, or its plain JAX). It is
chosen when a step is built.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jax.typing import DTypeLike

from hfjax.parallel.mesh import auto_axes, size_of
from hfjax.parallel.param_specs import Dims, ParamSpecs, auto_part
from hfjax.parallel.strategy import Axes
from hfjax.utils.paths import Flat


class CollectiveKernel(Protocol):
    """Communicates along dimension 0 in place of XLA; equal and hashable from trace to trace."""

    def all_gather(self, shard: jax.Array, axes: Axes, dtype: DTypeLike) -> jax.Array:
        """Return the shards of all devices, in the dtype in which they are sent."""
        ...

    def reduce_scatter(self, gradient: jax.Array, axes: Axes, dtype: DTypeLike) -> jax.Array:
        """Return this device's shard of the sum, sent in a dtype."""
        ...


class CollectiveOp(NamedTuple):
    """What a kernel is chosen for."""

    kind: str  # all_gather or reduce_scatter
    x: jax.ShapeDtypeStruct  # a device's input
    axes: Axes
    devices: int
    dim: int
    dtype: DTypeLike  # what is sent


ChooseKernel = Callable[[CollectiveOp], "CollectiveKernel | None"]


def use_xla(op: CollectiveOp) -> None:
    """Return no kernel: with a tensor axis only XLA sends parameters."""
    return None


class DimCollective(NamedTuple):
    """A gather or scatter over mesh axes along one dimension, counted from the end."""

    dim: int
    axes: Axes
    kernel: CollectiveKernel | None = None  # None: XLA


def collectives(
    kind: str,
    dims: Dims,
    x: jax.Array | jax.ShapeDtypeStruct,
    dtype: DTypeLike,
    mesh: Mesh,
    choose_kernel: ChooseKernel,
) -> tuple[DimCollective, ...]:
    """Return an all_gather or reduce_scatter dimension by dimension, each with its kernel.

    `x` is the input of the first, or its shape and dtype; `dtype` is what is sent.
    """
    shape, per_dim = list(x.shape), []
    for dim, axes in dims:
        size, like = size_of(axes, mesh), jax.ShapeDtypeStruct(tuple(shape), x.dtype)
        kernel = choose_kernel(CollectiveOp(kind, like, axes, size, len(shape) + dim, dtype))
        per_dim.append(DimCollective(dim, axes, kernel))
        shape[dim] = shape[dim] * size if kind == "all_gather" else shape[dim] // size
    return tuple(per_dim)


@dataclass(frozen=True)
class CommPlan:
    """How one parameter is sent. Dimensions count from the end, so a scanned layer fits as well."""

    path: str
    shape: tuple[int, ...]
    gathers: tuple[DimCollective, ...]  # when it is read
    scatters: tuple[DimCollective, ...]  # of its gradient
    # Axes to sum its gradient over layer by layer, overlapping the rest of the backward pass.
    psum_axes: Axes
    tensor_dims: Dims  # what the partitioner keeps sharded
    compute_dtype: Any
    gather_dtype: Any
    reduce_dtype: Any
    on_read: Callable[[str], None]  # takes the path; one per trace, so that none is mistaken


def gather(
    x: jax.Array, gathers: tuple[DimCollective, ...], gather_dtype: DTypeLike, tensor_dims: Dims
) -> jax.Array:
    """Return the array gathered along one dimension after the other, in the dtype that is sent."""
    apply = partial(_gather_along, gather_dtype=gather_dtype)
    return _apply_in_order(apply, x, gathers, tensor_dims)


def gather_from_optimizer_state(spec: ParamSpecs, x: jax.Array) -> jax.Array:
    """Return a parameter (or a layer of it) as stored, from shards like its optimizer state's."""
    gathers = collectives(
        "all_gather", spec.optimizer_only_dims("parameter"), x, x.dtype, spec.mesh, use_xla
    )
    return gather(x, gathers, x.dtype, spec.tensor_dims)


def scatter(x: jax.Array, scatters: tuple[DimCollective, ...], tensor_dims: Dims) -> jax.Array:
    """Return this device's shard of the sum over devices, one dimension after the other."""
    return _apply_in_order(_scatter_along, x, scatters, tensor_dims)


def _apply_in_order(
    apply: Callable, x: jax.Array, per_dim: tuple[DimCollective, ...], tensor_dims: Dims
) -> Any:
    run = lambda x: reduce(apply, per_dim, x)
    return map_tensor_shards(run, tensor_dims, x.ndim)(x) if per_dim else x


def _gather_along(x: jax.Array, collective: DimCollective, gather_dtype: DTypeLike) -> jax.Array:
    """Return the array gathered along a dimension, in the dtype in which it is sent."""
    dim, kernel = x.ndim + collective.dim, collective.kernel
    if kernel is None:
        return lax.all_gather(x.astype(gather_dtype), collective.axes, axis=dim, tiled=True)
    return _apply_with_dim_first(
        dim, x, lambda shard: kernel.all_gather(shard, collective.axes, gather_dtype)
    )


def _scatter_along(x: jax.Array, collective: DimCollective) -> jax.Array:
    """Return this device's shard of the sum along a dimension, sent in the array's dtype."""
    dim, kernel = x.ndim + collective.dim, collective.kernel
    if kernel is None:
        return lax.psum_scatter(x, collective.axes, scatter_dimension=dim, tiled=True)
    return _apply_with_dim_first(
        dim, x, lambda gradient: kernel.reduce_scatter(gradient, collective.axes, x.dtype)
    )


def _apply_with_dim_first(dim: int, x: jax.Array, apply: Callable) -> jax.Array:
    """Return `apply(x)`, which works on dimension 0, for another dimension."""
    return jnp.moveaxis(apply(jnp.moveaxis(x, dim, 0)), 0, dim) if dim else apply(x)


# -- with a tensor axis ---------------------------------------------------------------------------


def pin_tensor_axes(arrays: Flat, param_specs: Mapping[str, ParamSpecs], column: str) -> Flat:
    """Constrain the tensor axes of arrays, by name, as in a column of `param_specs`."""
    pin = lambda x, spec: lax.with_sharding_constraint(x, auto_part(getattr(spec, column)))
    has_auto_axes = lambda spec: auto_axes(spec.mesh)
    return {
        n: pin(x, param_specs[n]) if has_auto_axes(param_specs[n]) else x for n, x in arrays.items()
    }


def shard_map_over(
    function: Callable, axes: Iterable[str], in_specs: Any, out_specs: Any
) -> Callable:
    """Return the function under a `shard_map` over axes that are not manual around it."""
    specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(function, axis_names=set(axes), check_vma=False, **specs)


def map_tensor_shards(function: Callable, split: Dims, ndim: int) -> Callable:
    """Return `function` run on each tensor shard by itself.

    Left to the partitioner, a gather or scatter over data axes with a tensor axis is preceded by a
    gather over the tensor axis, and sends the full array.
    """
    if not split:
        return function
    at = {ndim + dim: axes for dim, axes in split}
    spec = P(*(at.get(dim) for dim in range(ndim)))
    names = {axis for axes in at.values() for axis in axes}
    return shard_map_over(function, names, spec, spec)
