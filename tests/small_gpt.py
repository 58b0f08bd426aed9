"""A GPT small enough to compile in seconds, a smaller model still, and batches for them."""

from functools import partial

import numpy as np
import optax
from flax import nnx

import hfjax
from hfjax.models.gpt import GPT, MLP, GPTConfig
from hfjax.models.layers import STREAM, Dropout, no_constraint, stack_layers

SHAPE = {"length": 24, "layers": 2, "embed": 32, "vocab": 64}


class OnlyMLP(nnx.Module):
    """A layer of a GPT without its attention and norms."""

    def __init__(self, config, *, rngs):
        self.mlp, self.dropout = MLP(config, rngs=rngs), Dropout(config.dropout, rngs=rngs)
        self.place = no_constraint

    def __call__(self, x):
        return x + self.dropout(self.place(self.mlp(self.place(x, STREAM)), STREAM))


class MLPs(GPT):
    """A GPT whose layers are only MLPs: what does not look into layers meets the same laws in it.

    It compiles in half of the time. Embedding and head are tied, both have a gradient; kernels may
    be split over tensor, the stream over the sequence.
    """

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        self.layers = stack_layers(config.layers, lambda rngs: OnlyMLP(config, rngs=rngs), rngs)


def gpt(**changes):
    config = GPTConfig.tiny(**(SHAPE | changes))
    return lambda rngs: GPT(config, rngs=rngs)


def mlps(**changes):
    config = GPTConfig.tiny(**(SHAPE | changes))
    return lambda rngs: MLPs(config, rngs=rngs)


def tokens(rows=16, length=24, **extra):
    rng = np.random.default_rng(0)
    return {"tokens": rng.integers(0, 64, (rows, length + 1)).astype(np.int32), **extra}


def gpt_layout(strategy, sizes, optimizer=None, devices=None, model=gpt, **changes):
    """Everything is split, however small, unless the strategy says from which size on."""
    if strategy.replicate_below is None:
        strategy = strategy.edit(replicate_below=0)
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    return hfjax.layout(model(**changes), optimizer or optax.adamw(1e-3), mesh, strategy)


mlp_layout = partial(gpt_layout, model=mlps)
