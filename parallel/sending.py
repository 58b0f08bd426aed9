"""How shards of parameters are gathered, and gradients added up and scattered, over data axes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from hfjax.pallas_kernels import collectives, collectives_reference
from hfjax.pallas_kernels.choice import Shape
from hfjax.parallel.mesh import TENSOR_AXES
from hfjax.parallel.on_shards import mapped
from hfjax.parallel.strategy import Axes

FORMS: dict[str, Any] = {"pallas": collectives, "reference": collectives_reference}


class Sending(Protocol):
    """Gathers and scatters along one dimension over mesh axes; `wire` is the dtype sent."""

    def gather(self, x: jax.Array, axes: Axes, dim: int, wire: Any) -> jax.Array:
        """Return the whole array, in `wire`."""
        ...

    def scatter(self, x: jax.Array, axes: Axes, dim: int, wire: Any) -> jax.Array:
        """Return this device's part of the sum."""
        ...


class ByXla:
    """XLA's collectives. What they add up they add in the dtype that is sent."""

    def gather(self, x: jax.Array, axes: Axes, dim: int, wire: Any) -> jax.Array:
        return lax.all_gather(x.astype(wire), axes, axis=dim, tiled=True)

    def scatter(self, x: jax.Array, axes: Axes, dim: int, wire: Any) -> jax.Array:
        return lax.psum_scatter(x.astype(wire), axes, scatter_dimension=dim, tiled=True)


BY_XLA = ByXla()


@dataclass(frozen=True)
class AsChosen:
    """In the form that `form(kernel, refusal, shape)` names; kernels add in float32."""

    form: Callable[[str, str | None, Shape], str]

    def gather(self, x: jax.Array, axes: Axes, dim: int, wire: Any) -> jax.Array:
        form = self._form("all_gather", x, axes, dim, wire)
        if form not in FORMS:
            return BY_XLA.gather(x, axes, dim, wire)
        send = lambda rows: FORMS[form].all_gather(rows, _axis(axes), wire)
        return _along(dim, x, _alone(send) if form == "pallas" else send)

    def scatter(self, x: jax.Array, axes: Axes, dim: int, wire: Any) -> jax.Array:
        form = self._form("reduce_scatter", x, axes, dim, wire)
        if form not in FORMS:
            return BY_XLA.scatter(x, axes, dim, wire)
        send = lambda rows: FORMS[form].reduce_scatter(rows, _axis(axes), wire)
        return _along(dim, x, _alone(send) if form == "pallas" else send)

    def _form(self, kernel: str, x: jax.Array, axes: Axes, dim: int, wire: Any) -> str:
        return self.form(kernel, _refuses(kernel, x, axes, dim, wire), {"N": x.size})


def _axis(axes: Axes) -> str | Axes:
    return axes[0] if len(axes) == 1 else axes


def _alone(send: Callable) -> Callable:
    """Return `send` where a kernel can name its peers: manual over all axes of the mesh."""
    return mapped(send, TENSOR_AXES, P(), P())


def _along(dim: int, x: jax.Array, move: Callable) -> jax.Array:
    """Return what `move` does with rows, done with another dimension."""
    return jnp.moveaxis(move(jnp.moveaxis(x, dim, 0)), 0, dim) if dim else move(x)


def _refuses(what: str, x: jax.Array, axes: Axes, dim: int, wire: Any) -> str | None:
    """Return why the kernel cannot move an array, or None."""
    if dim:
        return f"an array of shape {x.shape} is split along dimension {dim}; the kernel moves rows"
    return collectives.refuses(what, x, _axis(axes), lax.axis_size(axes), wire)
