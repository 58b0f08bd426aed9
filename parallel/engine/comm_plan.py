"""Gathers and scatters along one dimension: XLA's collective, or a sender that the step was handed.

A sender takes the place of XLA's collective for single arrays (a kernel, or its plain JAX). It is
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
    """What moves rows in place of XLA; equal and hashable from trace to trace."""

    def all_gather(self, shard: jax.Array, axes: Axes, dtype: DTypeLike) -> jax.Array:
        """Return the rows of all devices, in the dtype in which they are sent."""
        ...

    def reduce_scatter(self, gradient: jax.Array, axes: Axes, dtype: DTypeLike) -> jax.Array:
        """Return this device's rows of the sum, sent in a dtype."""
        ...


class CollectiveOp(NamedTuple):
    """What a sender is chosen for."""

    kind: str  # all_gather or reduce_scatter
    x: jax.ShapeDtypeStruct  # what a device has before
    axes: Axes
    devices: int
    dim: int
    dtype: DTypeLike  # what is sent


ChooseKernel = Callable[[CollectiveOp], "CollectiveKernel | None"]


def use_xla(op: CollectiveOp) -> None:
    """Return no sender: beside a tensor axis only XLA moves parameters."""
    return None


class DimCollective(NamedTuple):
    """A gather or scatter along one dimension, which counts from the end, over mesh axes."""

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
    """Return the legs of an all_gather or reduce_scatter, each with what is chosen for its array.

    `x` is what a device has before the first of them, or its shape and dtype; `dtype` is what is
    sent.
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
    """How one parameter moves. Dimensions count from the end, so a scanned layer fits as well."""

    path: str
    shape: tuple[int, ...]
    gathers: tuple[DimCollective, ...]  # when it is read
    scatters: tuple[DimCollective, ...]  # of its gradient
    # Axes to sum its gradient over at once, layer by layer, under the rest of the backward pass.
    psum_axes: Axes
    tensor_dims: Dims  # what the partitioner keeps split
    compute_dtype: Any
    gather_dtype: Any
    reduce_dtype: Any
    on_read: Callable[[str], None]  # told the path; of one trace, so that none is taken for another


def gather(
    x: jax.Array, gathers: tuple[DimCollective, ...], gather_dtype: DTypeLike, tensor_dims: Dims
) -> jax.Array:
    """Return the array whole along one dimension after the other, in the dtype that is sent."""
    apply = partial(_gather_along, gather_dtype=gather_dtype)
    return _apply_in_order(apply, x, gathers, tensor_dims)


def gather_from_optimizer_state(spec: ParamSpecs, x: jax.Array) -> jax.Array:
    """Return a parameter, or a layer of it, as it is stored, from the pieces of its moments."""
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
    """Return the array whole along a dimension, in the dtype in which it is sent."""
    dim, kernel = x.ndim + collective.dim, collective.kernel
    if kernel is None:
        return lax.all_gather(x.astype(gather_dtype), collective.axes, axis=dim, tiled=True)
    return _apply_along_dim(
        dim, x, lambda shard: kernel.all_gather(shard, collective.axes, gather_dtype)
    )


def _scatter_along(x: jax.Array, collective: DimCollective) -> jax.Array:
    """Return this device's part of the sum along a dimension; it is sent in the array's dtype."""
    dim, kernel = x.ndim + collective.dim, collective.kernel
    if kernel is None:
        return lax.psum_scatter(x, collective.axes, scatter_dimension=dim, tiled=True)
    return _apply_along_dim(
        dim, x, lambda gradient: kernel.reduce_scatter(gradient, collective.axes, x.dtype)
    )


def _apply_along_dim(dim: int, x: jax.Array, apply: Callable) -> jax.Array:
    """Return what `apply` does with rows, done with another dimension."""
    return jnp.moveaxis(apply(jnp.moveaxis(x, dim, 0)), 0, dim) if dim else apply(x)


# -- beside a tensor axis -------------------------------------------------------------------------


def pin_tensor_axes(arrays: Flat, param_specs: Mapping[str, ParamSpecs], column: str) -> Flat:
    """Keep the tensor axes of arrays, by name, where a column of `param_specs` has them."""
    pin = lambda x, spec: lax.with_sharding_constraint(x, auto_part(getattr(spec, column)))
    has_auto_axes = lambda spec: auto_axes(spec.mesh)
    return {
        n: pin(x, param_specs[n]) if has_auto_axes(param_specs[n]) else x for n, x in arrays.items()
    }


def shard_map_over(
    function: Callable, axes: Iterable[str], in_specs: Any, out_specs: Any
) -> Callable:
    """Return the function, run by itself along axes that nothing around is manual over."""
    specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(function, axis_names=set(axes), check_vma=False, **specs)


def map_tensor_shards(function: Callable, split: Dims, ndim: int) -> Callable:
    """Return `function` run on each tensor shard by itself.

    Left to the partitioner, a gather or scatter over data axes beside a tensor axis is preceded by
    a gather over the tensor axis, and sends the whole array.
    """
    if not split:
        return function
    at = {ndim + dim: axes for dim, axes in split}
    spec = P(*(at.get(dim) for dim in range(ndim)))
    names = {axis for axes in at.values() for axis in axes}
    return shard_map_over(function, names, spec, spec)
