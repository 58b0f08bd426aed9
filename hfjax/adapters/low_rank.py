"""The adapter of a linear map: s B A, with A [inputs, rank] and B [rank, outputs]."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
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
        return f"{self.path}/{self.part}".strip("/")

    @property
    def adapter_path(self) -> str:
        """The path of its adapter, whose arrays are `a` [inputs, rank] and `b` [rank, outputs]."""
        return f"{self.path}/lora/{self.part}".strip("/")

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
        self.reads_stream, self.outputs = axes[0] == "embed", axes[inputs:]
        self.scale, self.dropout = scale, Dropout(dropout, rngs=rngs)
        self.place = no_constraint

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the change of a linear map's outputs, in A's dtype.

        Args:
            x: The input of the map: its inputs are the last dimensions.
        """
        a = jnp.asarray(self.a[...])
        return self.expand(self.contract(self.dropout(x.astype(a.dtype)), a))

    def contract(self, x: jax.Array, a: jax.Array) -> jax.Array:
        """Return x A, whole on each device: it is small, so that it is sent in place of x.

        Args:
            x: The input of the map.
            a: A, or those of several adapters of one map side by side.
        """
        batch_shape = x.shape[: x.ndim - a.ndim + 1]
        operands = x.reshape(*batch_shape, -1), a.reshape(-1, a.shape[-1])
        h = _matmul(self.place, *operands)
        if len(batch_shape) != 2:  # the dimensions of [B, S, …] have names
            return h
        if self.reads_stream:
            h = self.place(h, STREAM)
        return self.place(h, FULL_SEQUENCE, STREAM if self.reads_stream else None)

    def expand(self, h: jax.Array) -> jax.Array:
        """Return s h B, placed as the outputs of the map.

        Args:
            h: The input times A.
        """
        b = jnp.asarray(self.b[...])
        y = _matmul(self.place, h * self.scale, b.reshape(b.shape[0], -1))
        y = y.reshape(*h.shape[:-1], *b.shape[1:])
        if h.ndim != 3:
            return y
        return self.place(y, ("batch", None, *self.outputs) if self.reads_stream else STREAM)


def _matmul(place: Any, x: jax.Array, kernel: jax.Array) -> Any:
    """Return x @ kernel; of a sharded sequence batch and sequence stay two dimensions."""
    return x @ kernel if place.axes("seq") else project(lambda y: y, x, kernel)


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
        adapters = {name: getattr(self, name) for name, _ in self.parts if hasattr(self, name)}
        first = next(iter(adapters.values()))
        if first.dropout.rate:  # each has its own mask
            changes = {name: adapter(x) for name, adapter in adapters.items()}
        else:
            a = jnp.concatenate([adapter.a[...] for adapter in adapters.values()], axis=-1)
            ends = list(accumulate(adapter.a.shape[-1] for adapter in adapters.values()))
            parts = jnp.split(first.contract(x.astype(a.dtype), a), ends[:-1], axis=-1)
            pairs = zip(adapters.items(), parts, strict=True)
            changes = {name: adapter.expand(h) for (name, adapter), h in pairs}
        y = changes[next(iter(changes))]
        dim = x.ndim - first.a[...].ndim + 2
        zeros = lambda size: jnp.zeros((*y.shape[:dim], size, *y.shape[dim + 1 :]), y.dtype)
        blocks = [changes.get(name, zeros(size)) for name, size in self.parts]
        return jnp.concatenate(blocks, axis=dim)
