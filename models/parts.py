"""Small parts of a transformer: linear, layer norm, dropout. Axes are named on every parameter."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

Axes = tuple[str | None, ...]


def anywhere(x: jax.Array, *names: str | None) -> jax.Array:
    """Return x as it is: the `place` of a module that nobody has put on a mesh."""
    return x


class Linear(nnx.Module):
    """x @ kernel + bias over the last `len(shape) - len(out)` dimensions of x.

    Rows are flattened: one contracted dimension is what every backend multiplies fastest.
    """

    def __init__(
        self, shape: tuple[int, ...], axes: Axes, outputs: int, scale: float, *, rngs: nnx.Rngs
    ):
        self.inputs = len(shape) - outputs
        kernel = scale * jax.random.normal(rngs.params(), shape)
        self.kernel = nnx.Param(kernel, axes=axes)
        self.bias = nnx.Param(jnp.zeros(shape[self.inputs :]), axes=axes[self.inputs :])

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel, bias = self.kernel[...], self.bias[...]
        rows, features = x.shape[: -self.inputs], kernel.shape[: self.inputs]
        flat = x.reshape(-1, math.prod(features)) @ kernel.reshape(math.prod(features), -1)
        y = flat.reshape(*rows, *kernel.shape[self.inputs :])
        return y + bias.reshape((1,) * len(rows) + bias.shape)


class LayerNorm(nnx.Module):
    """Layer normalisation over the last dimension, computed in float32 or wider."""

    def __init__(self, size: int, axis: str = "embed"):
        self.scale = nnx.Param(jnp.ones((size,)), axes=(axis,))
        self.bias = nnx.Param(jnp.zeros((size,)), axes=(axis,))

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - wide.mean(-1, keepdims=True)
        unit = centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        like = lambda p: p[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return (unit * like(self.scale) + like(self.bias)).astype(x.dtype)


class RowKey(nnx.Variable):
    """A random key that a training step turns into one key per row of the global batch."""


class Dropout(nnx.Module):
    """Dropout whose mask depends on a row's place in the global batch, never on the device."""

    def __init__(self, rate: float, *, rngs: nnx.Rngs):
        self.rate = rate
        self.deterministic = False
        self.key = RowKey(rngs.dropout(), per_row=True) if rate else None

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.deterministic or self.key is None:
            return x
        keys = self.key[...]
        if keys.ndim == 0:  # outside a training step: the rows are those of x
            keys = jax.vmap(jax.random.fold_in, (None, 0))(keys, jnp.arange(x.shape[0]))
        mask = jax.vmap(lambda key: jax.random.bernoulli(key, 1 - self.rate, x.shape[1:]))(keys)
        return jnp.where(mask, x / (1 - self.rate), jnp.zeros((), x.dtype))


def stacked(count: int, create: Callable[[nnx.Rngs], nnx.Module], rngs: nnx.Rngs) -> nnx.Module:
    """Return one module whose arrays stack `count` layers along a new first dimension."""
    make = nnx.vmap(create, in_axes=(0,), out_axes=0)
    return nnx.split_rngs(splits=count)(make)(rngs)
