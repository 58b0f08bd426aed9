"""The layers that `flax.nnx` exports, each in a small model, under hybrid FSDP as on one device.

docs/any_model.md prints this table; a layer that flax adds fails the last test until it is here.
"""

import inspect
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from hfjax.parallel.strategy import HSDP
from hfjax.testing import assert_strategies_agree

RNG = np.random.default_rng(0)
BATCH = {
    "x": RNG.normal(size=(8, 4, 8)).astype(np.float32),
    "ids": RNG.integers(0, 12, (8, 4)).astype(np.int32),
}
CASES = {"HSDP": (HSDP.edit(replicate_below=0), {"data": 2, "fsdp": 2})}


def linear(rngs):
    return nnx.Linear(8, 8, rngs=rngs)


# Name -> (rngs -> the layer, what it is called on).
LAYERS: dict[str, tuple[Callable[[nnx.Rngs], Any], str]] = {
    "BatchNorm": (lambda rngs: nnx.BatchNorm(8, rngs=rngs), "x"),
    "Bidirectional": (lambda rngs: nnx.Bidirectional(rnn(rngs), rnn(rngs), rngs=rngs), "x"),
    "Conv": (lambda rngs: nnx.Conv(8, 8, (3,), rngs=rngs), "x"),
    "ConvTranspose": (lambda rngs: nnx.ConvTranspose(8, 8, (3,), rngs=rngs), "x"),
    "Dict": (lambda rngs: Called(nnx.Dict({"0": linear(rngs), "b": linear(rngs)}), "0"), "x"),
    "Dropout": (lambda rngs: nnx.Dropout(0.5, deterministic=True, rngs=rngs), "x"),
    "Einsum": (lambda rngs: nnx.Einsum("bsi,io->bso", (8, 8), (8,), rngs=rngs), "x"),
    "Embed": (lambda rngs: nnx.Embed(12, 8, rngs=rngs), "ids"),
    "GRUCell": (lambda rngs: nnx.RNN(nnx.GRUCell(8, 8, rngs=rngs), rngs=rngs), "x"),
    "GroupNorm": (lambda rngs: nnx.GroupNorm(8, num_groups=2, rngs=rngs), "x"),
    "InstanceNorm": (lambda rngs: nnx.InstanceNorm(8, rngs=rngs), "x"),
    "LSTMCell": (lambda rngs: nnx.RNN(nnx.LSTMCell(8, 8, rngs=rngs), rngs=rngs), "x"),
    "LayerNorm": (lambda rngs: nnx.LayerNorm(8, rngs=rngs), "x"),
    "Linear": (linear, "x"),
    "LinearGeneral": (lambda rngs: nnx.LinearGeneral(8, (2, 4), rngs=rngs), "x"),
    "List": (lambda rngs: Called(nnx.List([linear(rngs), linear(rngs)]), 0), "x"),
    "LoRA": (lambda rngs: nnx.LoRA(8, 2, 8, base_module=linear(rngs), rngs=rngs), "x"),
    "LoRALinear": (lambda rngs: nnx.LoRALinear(8, 8, lora_rank=2, rngs=rngs), "x"),
    "MultiHeadAttention": (
        lambda rngs: nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs),
        "x",
    ),
    "OptimizedLSTMCell": (
        lambda rngs: nnx.RNN(nnx.OptimizedLSTMCell(8, 8, rngs=rngs), rngs=rngs),
        "x",
    ),
    "PReLU": (lambda rngs: nnx.PReLU(), "x"),
    "RMSNorm": (lambda rngs: nnx.RMSNorm(8, rngs=rngs), "x"),
    "RNN": (lambda rngs: rnn(rngs), "x"),
    "Sequential": (lambda rngs: nnx.Sequential(linear(rngs), nnx.relu, linear(rngs)), "x"),
    "SimpleCell": (lambda rngs: nnx.RNN(nnx.SimpleCell(8, 8, rngs=rngs), rngs=rngs), "x"),
    "SpectralNorm": (lambda rngs: Updating(nnx.SpectralNorm(linear(rngs), rngs=rngs)), "x"),
    "WeightNorm": (lambda rngs: nnx.WeightNorm(linear(rngs), rngs=rngs), "x"),
}
NO_LAYERS = {"Module", "RNNCellBase"}  # to derive from


def rnn(rngs):
    return nnx.RNN(nnx.SimpleCell(8, 8, rngs=rngs), rngs=rngs)


class Called(nnx.Module):
    """Calls one of the modules that it holds after the others."""

    def __init__(self, held, first):
        self.held, self.first = held, first

    def __call__(self, x):
        return sum(m(x) for m in (self.held.values() if self.first == "0" else self.held))


class Updating(nnx.Module):
    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return self.layer(x, update_stats=True)


class Around(nnx.Module):
    """A layer between two linear maps."""

    def __init__(self, make, field, *, rngs):
        self.field = field
        self.before, self.layer, self.after = linear(rngs), make(rngs), linear(rngs)

    def __call__(self, batch):
        x = batch[self.field] if self.field == "ids" else self.before(batch["x"])
        y = self.layer(x)
        return self.after(y.reshape(*y.shape[:2], -1)[..., :8] + self.before(batch["x"]))


def squares(outputs, batch):
    return jnp.mean((outputs - batch["x"]) ** 2)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.short("WeightNorm")
def test_a_layer_of_flax_trains_as_on_one_device(name):
    init = lambda rngs: Around(*LAYERS[name], rngs=rngs)
    optimizer = optax.sgd(0.1, momentum=0.9)
    assert_strategies_agree(init, squares, BATCH, CASES, optimizer=optimizer, steps=2)


def test_every_layer_that_flax_exports_is_in_the_table():
    classes = {n: c for n, c in vars(nnx).items() if inspect.isclass(c)}
    exported = {n for n, c in classes.items() if issubclass(c, nnx.Module)} - NO_LAYERS
    assert exported - LAYERS.keys() == set()
