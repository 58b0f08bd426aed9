"""Layers of two kernels between two maps, and rows for them: laws of pipelines need no GPT.

Weights are constants, so a state is made, and a step compiled, in half of the time of MLPs.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hfjax
from hfjax import Mean
from hfjax.models.layers import Dropout, run_stacked, stack_layers


def fixed(*shape):
    """Return numbers that differ; float64 where JAX has it."""
    return jnp.asarray(0.3 * np.random.default_rng(shape).normal(size=shape))


class Layers(nnx.Module):
    """What `hfjax.models.layers.stack_layers` makes of layers; called with the arrays of one.

    A layer of zeros changes what enters it, and has a gradient: empty places that run are seen.
    """

    def __init__(self, count, dropout, rngs):
        self.up = nnx.Param(fixed(count, 8, 16), axes=("embed", "mlp"))
        self.down = nnx.Param(fixed(count, 16, 8), axes=("mlp", "embed"))
        drop = lambda rngs: Dropout(dropout, rngs=rngs)
        self.dropout = stack_layers(count, drop, rngs) if dropout else None

    def __call__(self, x):
        y = jnp.tanh(1 + x @ self.up[...]) @ self.down[...]
        return jnp.sin(x + (self.dropout(y) if self.dropout else y))


class Stack(nnx.Module):
    def __init__(self, rngs, layers=4, dropout=0.0):
        self.before = nnx.Param(2 * fixed(4, 8), axes=("vocab", "embed"))
        self.after = nnx.Param(2 * fixed(8, 2), axes=("embed", None))
        self.layers = Layers(layers, dropout, rngs)

    def embed(self, batch):
        return batch["x"] @ self.before[...]

    def head(self, x):
        return x @ self.after[...]

    def __call__(self, batch):
        return self.head(run_stacked(self.layers, self.embed(batch)))


class Tied(Stack):
    """The head reads what embed reads, beside its own."""

    def head(self, x):
        return (x @ self.before[...].T)[:, :2] + x @ self.after[...]


def weighted(outputs, batch):
    """Rows weigh unequally, and so do microbatches."""
    apart = jnp.square(jnp.tanh(outputs) - batch["y"]).sum(axis=1) * batch["weight"]
    metrics = {"first": Mean(outputs[:, 0].sum(), batch["weight"].sum())}
    return Mean(apart.sum(), batch["weight"].sum(), metrics)


def rows(n=16, seed=0):
    rng = np.random.default_rng(seed)
    weight = rng.integers(1, 5, n).astype(float)
    return {"x": rng.normal(size=(n, 4)), "y": rng.normal(size=(n, 2)), "weight": weight}


def stack(**changes):
    return partial(Tied, **changes)


def stack_layout(strategy, sizes, optimizer=None, **changes):
    """Everything is split, however small; Adam does not amplify rounding."""
    mesh = hfjax.make_mesh(devices=jax.devices()[: np.prod(list(sizes.values()))], **sizes)
    optimizer = optimizer or optax.adamw(1e-2, eps=1e-4)
    return hfjax.layout(stack(**changes), optimizer, mesh, strategy.edit(replicate_below=0))
