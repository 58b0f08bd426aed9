"""A stack of equal linear layers, which compiles in a third of a GPT's time, and a batch for it."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hfjax
from hfjax import Mean
from hfjax.models.layers import Dropout, LayerNorm, stack_layers


class Bent(nnx.Module):
    def __init__(self, dropout=0.0, *, rngs):
        self.kernel = nnx.Param(0.5 * jax.random.normal(rngs.params(), (8, 8)))
        self.bias = nnx.Param(jnp.zeros(8))
        self.dropout = Dropout(dropout, rngs=rngs)

    def __call__(self, x) -> Any:
        return self.dropout(jnp.tanh(x @ self.kernel[...] + self.bias[...][None]))


class Stack(nnx.Module):
    """A model in three parts whose head reads what embed reads."""

    def __init__(self, layers, dropout=0.0, *, rngs):
        self.before = nnx.Param(0.5 * jax.random.normal(rngs.params(), (4, 8)))
        self.layers = stack_layers(layers, lambda rngs: Bent(dropout, rngs=rngs), rngs)
        self.norm = LayerNorm(8)

    def embed(self, batch):
        return batch["x"] @ self.before[...]

    def head(self, x):
        return self.norm(x) @ self.before[...].T


def squared(outputs, batch):
    """Rows weigh unequally."""
    apart = jnp.square(outputs - batch["y"]).sum(axis=1) * batch["weight"]
    return Mean(apart.sum(), batch["weight"].sum(), {"first": outputs[:, 0].mean()})


def rows(n=8, **extra):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, n, 4)).astype(np.float32)
    return {"x": x, "y": y, "weight": rng.integers(1, 5, n).astype(np.float32), **extra}


def stack_layout(strategy, sizes, optimizer=None, layers=3, dropout=0.0):
    """Everything is split, however small."""
    mesh = hfjax.make_mesh(devices=jax.devices()[: math.prod(sizes.values())], **sizes)
    init = lambda rngs: Stack(layers, dropout, rngs=rngs)
    small = strategy.edit(replicate_below=0)
    return hfjax.layout(init, optimizer or optax.adamw(1e-3), mesh, small)


def of_stacks(params):
    """Say that kernels of stacked layers are matrices, and nothing else is."""
    matrix = optax.contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    return jax.tree.map(lambda x: matrix if x.ndim == 3 else None, params)
