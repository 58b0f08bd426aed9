"""Gathers and scatters along one dimension, in the form that is chosen when a step is built.

The form is XLA's collective, a kernel of `pallas_kernels/collectives`, or its plain JAX.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jax.typing import DTypeLike

from hfjax.pallas_kernels.choice import Shape
from hfjax.pallas_kernels.collectives import casting, reference
from hfjax.parallel.for_models.on_shards import mapped
from hfjax.parallel.mesh import TENSOR_AXES, size_of
from hfjax.parallel.placement import Dims
from hfjax.parallel.strategy import Axes

FORMS: dict[str, Any] = {"pallas": casting, "reference": reference}
Form = Callable[[str, "str | None", Shape], str]  # (kernel, why it does not fit, shape) -> form


def xla(kernel: str, refusal: str | None, shape: Shape) -> str:
    """Return XLA's form: beside a tensor axis no kernel moves parameters."""
    return "xla"


class Leg(NamedTuple):
    """A gather or scatter along one dimension, which counts from the end, over mesh axes."""

    dim: int
    axes: Axes
    form: str = "xla"  # or pallas, reference


def legs(
    kernel: str, dims: Dims, x: Any, dtype: DTypeLike, mesh: Mesh, form: Form
) -> tuple[Leg, ...]:
    """Return the legs of a gather or reduce_scatter, each in the form chosen for its array.

    `x` is what a device has before the first of them, or its shape and dtype; `dtype` is what is
    sent. Kernels add in float32, and move rows.
    """
    shape, found = list(x.shape), []
    for dim, axes in dims:
        size, like = size_of(axes, mesh), jax.ShapeDtypeStruct(tuple(shape), x.dtype)
        refusal = _refuses(kernel, like, axes, size, len(shape) + dim, dtype)
        found.append(Leg(dim, axes, form(kernel, refusal, {"N": like.size})))
        shape[dim] = shape[dim] * size if kernel == "all_gather" else shape[dim] // size
    return tuple(found)


def _refuses(
    kernel: str, x: jax.ShapeDtypeStruct, axes: Axes, size: int, dim: int, dtype: DTypeLike
) -> str | None:
    """Return why the kernel cannot move an array, or None."""
    if dim:
        return f"an array of shape {x.shape} is split along dimension {dim}; the kernel moves rows"
    return casting.refuses(kernel, x, _axis(axes), size, dtype)


def _axis(axes: Axes) -> str | Axes:
    return axes[0] if len(axes) == 1 else axes


def gather(x: jax.Array, leg: Leg, gather_dtype: DTypeLike) -> jax.Array:
    """Return the array whole along a dimension, in the dtype in which it is sent."""
    dim = x.ndim + leg.dim
    if leg.form not in FORMS:
        return lax.all_gather(x.astype(gather_dtype), leg.axes, axis=dim, tiled=True)
    send = lambda rows: FORMS[leg.form].all_gather(rows, _axis(leg.axes), gather_dtype)
    return _along(dim, x, _alone(send) if leg.form == "pallas" else send)


def scatter(x: jax.Array, leg: Leg) -> jax.Array:
    """Return this device's part of the sum along a dimension; it is sent in the array's dtype."""
    dim = x.ndim + leg.dim
    if leg.form not in FORMS:
        return lax.psum_scatter(x, leg.axes, scatter_dimension=dim, tiled=True)
    send = lambda rows: FORMS[leg.form].reduce_scatter(rows, _axis(leg.axes), x.dtype)
    return _along(dim, x, _alone(send) if leg.form == "pallas" else send)


def _alone(send: Callable) -> Callable:
    """Return `send` where a kernel can name its peers: manual over all axes of the mesh."""
    return mapped(send, TENSOR_AXES, P(), P())


def _along(dim: int, x: jax.Array, move: Callable) -> jax.Array:
    """Return what `move` does with rows, done with another dimension."""
    return jnp.moveaxis(move(jnp.moveaxis(x, dim, 0)), 0, dim) if dim else move(x)
