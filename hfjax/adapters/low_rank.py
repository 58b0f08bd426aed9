"""The adapter of a linear map: s B A, with A [inputs, rank] and B [rank, outputs]."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hfjax.models.layers import FULL_SEQUENCE, STREAM, Axes, Dropout, no_constraint
from hfjax.utils.head import project

A, B = "a", "b"


@dataclass(frozen=True)
class LinearMap:
    """A linear map of a model that may have an adapter.

    Attributes:
        path: The path of its module.
        part: Its name among the maps that share the kernel, "" where it has the kernel alone.
        shape: The shape of its kernel, inputs first, without the layers of a stack.
        axes: The names of the kernel's dimensions.
        inputs: How many dimensions are inputs.
        start: Where it begins in the kernel, along the second dimension of the outputs.
    """

    path: str
    part: str
    shape: tuple[int, ...]
    axes: Axes
    inputs: int
    start: int = 0

    @property
    def name(self) -> str:
        """The name that patterns match: layers/attention/qkv/q."""
        return f"{self.path}/{self.part}" if self.part else self.path

    @property
    def adapter_path(self) -> str:
        """The path of its adapter, whose arrays are `a` [inputs, rank] and `b` [rank, outputs]."""
        return f"{self.path}/lora/{self.part}" if self.part else f"{self.path}/lora"

    @property
    def sizes(self) -> tuple[int, int]:
        """How many inputs and outputs it has."""
        return math.prod(self.shape[: self.inputs]), math.prod(self.shape[self.inputs :])


@dataclass(frozen=True)
class Adapter:
    """The adapter of a linear map.

    Attributes:
        map: The map.
        rank: The rank.
        alpha: What its scale is made of.
        scale: The factor of its output.
    """

    map: LinearMap
    rank: int
    alpha: float
    scale: float


class LowRank(nnx.Module):
    """The output of one adapter: s (x A) B. At first it is 0, since B is.

    Args:
        linear_map: The map that it changes.
        rank: The rank.
        scale: The factor s.
        dropout: The fraction of the input's elements to drop.
        gaussian: Whether A is drawn from a normal distribution of deviation 1 / rank, not from a
            uniform one within 1 / sqrt(inputs).
        rngs: The random number generators.
    """

    def __init__(
        self,
        linear_map: LinearMap,
        rank: int,
        scale: float,
        dropout: float = 0.0,
        gaussian: bool = False,
        *,
        rngs: nnx.Rngs,
    ) -> None:
        shape, axes, inputs = linear_map.shape, linear_map.axes, linear_map.inputs
        key, a_shape = rngs.params(), (*shape[:inputs], rank)
        bound = math.prod(shape[:inputs]) ** -0.5
        a = (
            jax.random.normal(key, a_shape) / rank
            if gaussian
            else jax.random.uniform(key, a_shape, minval=-bound, maxval=bound)
        )
        self.a = nnx.Param(a, axes=(*axes[:inputs], None))
        self.b = nnx.Param(jnp.zeros((rank, *shape[inputs:])), axes=(None, *axes[inputs:]))
        self.reads_stream = axes[0] == "embed"
        self.scale, self.dropout = scale, Dropout(dropout, rngs=rngs)
        self.place = no_constraint

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the change of a linear map's outputs, in A's dtype.

        Args:
            x: The input of the map: its inputs are the last dimensions.
        """
        a, b = jnp.asarray(self.a[...]), jnp.asarray(self.b[...])
        rank, batch_shape = a.shape[-1], x.shape[: x.ndim - a.ndim + 1]
        x = self.dropout(x.astype(a.dtype)).reshape(*batch_shape, -1)
        h: Any = project(lambda y: y, x, a.reshape(-1, rank))
        h = h * self.scale
        if len(batch_shape) == 2:  # the dimensions of [B, S, …] have names
            h = self.place(h, FULL_SEQUENCE, STREAM) if self.reads_stream else self.place(h, STREAM)
        y: Any = project(lambda y: y, h, b.reshape(rank, -1))
        return y.reshape(*batch_shape, *b.shape[1:])


class LowRankParts(nnx.Module):
    """The adapters of a linear map that computes several: queries, keys and values, for instance.

    Args:
        parts: Sizes of all parts along the second dimension of the outputs, in order.
        adapters: The adapters of some of them.
    """

    def __init__(self, parts: Mapping[str, int], adapters: Mapping[str, LowRank]) -> None:
        self.parts = tuple(parts.items())
        for name, adapter in adapters.items():
            setattr(self, name, adapter)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the change of the map's outputs; it is 0 in parts without an adapter.

        Args:
            x: The input of the map.
        """
        changes = {name: getattr(self, name)(x) for name, _ in self.parts if hasattr(self, name)}
        y = next(iter(changes.values()))
        dim = x.ndim - self._num_inputs + 1
        zeros = lambda size: jnp.zeros((*y.shape[:dim], size, *y.shape[dim + 1 :]), y.dtype)
        blocks = [changes.get(name, zeros(size)) for name, size in self.parts]
        return jnp.concatenate(blocks, axis=dim)

    @property
    def _num_inputs(self) -> int:
        """How many of the last dimensions of x are inputs."""
        adapter = next(getattr(self, name) for name, _ in self.parts if hasattr(self, name))
        return adapter.a[...].ndim - 1
