"""A GPT small enough to compile in seconds, and batches for it."""

import numpy as np
import optax

import hfjax
from hfjax.models.gpt import GPT, GPTConfig

SHAPE = {"length": 24, "layers": 2, "embed": 32, "vocab": 64}


def gpt(**changes):
    config = GPTConfig.tiny(**(SHAPE | changes))
    return lambda rngs: GPT(config, rngs=rngs)


def tokens(rows=16, length=24, **extra):
    rng = np.random.default_rng(0)
    return {"tokens": rng.integers(0, 64, (rows, length + 1)).astype(np.int32), **extra}


def gpt_layout(strategy, sizes, optimizer=None, devices=None, **changes):
    """Everything is split, however small, unless the strategy says from which size on."""
    if strategy.replicate_below is None:
        strategy = strategy.edit(replicate_below=0)
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    return hfjax.layout(gpt(**changes), optimizer or optax.adamw(1e-3), mesh, strategy)
