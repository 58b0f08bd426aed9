"""Gathers and scatters along one dimension: XLA's collective, or a sender that the step was handed.

A sender takes the place of XLA's collective for single arrays (a kernel, or its plain JAX). It is
chosen when a step is built.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.typing import DTypeLike

from hfjax.parallel.mesh import size_of
from hfjax.parallel.placement import Dims
from hfjax.parallel.strategy import Axes


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


def gather(x: jax.Array, leg: Leg, gather_dtype: DTypeLike) -> jax.Array:
    """Return the array whole along a dimension, in the dtype in which it is sent."""
    dim, sender = x.ndim + leg.dim, leg.sender
    if sender is None:
        return lax.all_gather(x.astype(gather_dtype), leg.axes, axis=dim, tiled=True)
    return _along(dim, x, lambda rows: sender.all_gather(rows, leg.axes, gather_dtype))


def scatter(x: jax.Array, leg: Leg) -> jax.Array:
    """Return this device's part of the sum along a dimension; it is sent in the array's dtype."""
    dim, sender = x.ndim + leg.dim, leg.sender
    if sender is None:
        return lax.psum_scatter(x, leg.axes, scatter_dimension=dim, tiled=True)
    return _along(dim, x, lambda rows: sender.reduce_scatter(rows, leg.axes, x.dtype))


def _along(dim: int, x: jax.Array, move: Callable) -> jax.Array:
    """Return what `move` does with rows, done with another dimension."""
    return jnp.moveaxis(move(jnp.moveaxis(x, dim, 0)), 0, dim) if dim else move(x)
