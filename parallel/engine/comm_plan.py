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

from hfjax.parallel.mesh import partitioned, size_of
from hfjax.parallel.param_specs import Dims, Placed, auto_part
from hfjax.parallel.strategy import Axes
from hfjax.utils.paths import Flat


class Sender(Protocol):
    """What moves rows in place of XLA; equal and hashable from trace to trace."""

    def all_gather(self, rows: jax.Array, axes: Axes, dtype: DTypeLike) -> jax.Array:
        """Return the rows of all devices, in the dtype in which they are sent."""
        ...

    def reduce_scatter(self, rows: jax.Array, axes: Axes, dtype: DTypeLike) -> jax.Array:
        """Return this device's rows of the sum, sent in a dtype."""
        ...


class Move(NamedTuple):
    """What a sender is chosen for."""

    kind: str  # all_gather or reduce_scatter
    x: jax.ShapeDtypeStruct  # what a device has before
    axes: Axes
    devices: int
    dim: int
    dtype: DTypeLike  # what is sent


Choose = Callable[[Move], "Sender | None"]


def by_xla(move: Move) -> None:
    """Return no sender: beside a tensor axis only XLA moves parameters."""
    return None


class Leg(NamedTuple):
    """A gather or scatter along one dimension, which counts from the end, over mesh axes."""

    dim: int
    axes: Axes
    sender: Sender | None = None  # None: XLA


def legs(
    kind: str,
    dims: Dims,
    x: jax.Array | jax.ShapeDtypeStruct,
    dtype: DTypeLike,
    mesh: Mesh,
    choose: Choose,
) -> tuple[Leg, ...]:
    """Return the legs of an all_gather or reduce_scatter, each with what is chosen for its array.

    `x` is what a device has before the first of them, or its shape and dtype; `dtype` is what is
    sent.
    """
    shape, found = list(x.shape), []
    for dim, axes in dims:
        size, like = size_of(axes, mesh), jax.ShapeDtypeStruct(tuple(shape), x.dtype)
        sender = choose(Move(kind, like, axes, size, len(shape) + dim, dtype))
        found.append(Leg(dim, axes, sender))
        shape[dim] = shape[dim] * size if kind == "all_gather" else shape[dim] // size
    return tuple(found)


@dataclass(frozen=True)
class Movement:
    """How one parameter moves. Dimensions count from the end, so a scanned layer fits as well."""

    path: str
    shape: tuple[int, ...]
    gathers: tuple[Leg, ...]  # when it is read
    scatters: tuple[Leg, ...]  # of its gradient
    # Axes to sum its gradient over at once, layer by layer, under the rest of the backward pass.
    psum_at_once: Axes
    tensor_dims: Dims  # what the partitioner keeps split
    compute_dtype: Any
    gather_dtype: Any
    reduce_dtype: Any
    read: Callable[[str], None]  # told the path; of one trace, so that none is taken for another


def gather(
    x: jax.Array, gathers: tuple[Leg, ...], gather_dtype: DTypeLike, tensor_dims: Dims
) -> jax.Array:
    """Return the array whole along one dimension after the other, in the dtype that is sent."""
    move = partial(_gather_along, gather_dtype=gather_dtype)
    return _one_by_one(move, x, gathers, tensor_dims)


def gather_from_moments(p: Placed, x: jax.Array) -> jax.Array:
    """Return a parameter, or a layer of it, as it is stored, from the pieces of its moments."""
    gathers = legs("all_gather", p.moment_only_dims("parameter"), x, x.dtype, p.mesh, by_xla)
    return gather(x, gathers, x.dtype, p.tensor_dims)


def scatter(x: jax.Array, scatters: tuple[Leg, ...], tensor_dims: Dims) -> jax.Array:
    """Return this device's shard of the sum over devices, one dimension after the other."""
    return _one_by_one(_scatter_along, x, scatters, tensor_dims)


def _one_by_one(move: Callable, x: jax.Array, steps: tuple[Leg, ...], tensor_dims: Dims) -> Any:
    run = lambda x: reduce(move, steps, x)
    return on_tensor_shards(run, tensor_dims, x.ndim)(x) if steps else x


def _gather_along(x: jax.Array, leg: Leg, gather_dtype: DTypeLike) -> jax.Array:
    """Return the array whole along a dimension, in the dtype in which it is sent."""
    dim, sender = x.ndim + leg.dim, leg.sender
    if sender is None:
        return lax.all_gather(x.astype(gather_dtype), leg.axes, axis=dim, tiled=True)
    return _along(dim, x, lambda rows: sender.all_gather(rows, leg.axes, gather_dtype))


def _scatter_along(x: jax.Array, leg: Leg) -> jax.Array:
    """Return this device's part of the sum along a dimension; it is sent in the array's dtype."""
    dim, sender = x.ndim + leg.dim, leg.sender
    if sender is None:
        return lax.psum_scatter(x, leg.axes, scatter_dimension=dim, tiled=True)
    return _along(dim, x, lambda rows: sender.reduce_scatter(rows, leg.axes, x.dtype))


def _along(dim: int, x: jax.Array, move: Callable) -> jax.Array:
    """Return what `move` does with rows, done with another dimension."""
    return jnp.moveaxis(move(jnp.moveaxis(x, dim, 0)), 0, dim) if dim else move(x)


# -- beside a tensor axis -------------------------------------------------------------------------


def pin_tensor_axes(arrays: Flat, placed: Mapping[str, Placed], column: str) -> Flat:
    """Keep the tensor axes of arrays, by name, where a column of `placed` has them."""
    pin = lambda x, p: lax.with_sharding_constraint(x, auto_part(getattr(p, column)))
    split = lambda p: partitioned(p.mesh)
    return {n: pin(x, placed[n]) if split(placed[n]) else x for n, x in arrays.items()}


def mapped(function: Callable, axes: Iterable[str], in_specs: Any, out_specs: Any) -> Callable:
    """Return the function, run by itself along axes that nothing around is manual over."""
    specs: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.shard_map(function, axis_names=set(axes), check_vma=False, **specs)


def on_tensor_shards(move: Callable, split: Dims, ndim: int) -> Callable:
    """Return `move` run on each tensor shard by itself.

    Left to the partitioner, a gather or scatter over data axes beside a tensor axis is preceded by
    a gather over the tensor axis, and sends the whole array.
    """
    if not split:
        return move
    at = {ndim + dim: axes for dim, axes in split}
    spec = P(*(at.get(dim) for dim in range(ndim)))
    names = {axis for axes in at.values() for axis in axes}
    return mapped(move, names, spec, spec)
