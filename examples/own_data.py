"""Data of one's own for `hfjax train`: two spirals, told apart by a small network.

hfjax train --data.factory examples/own_data.py:data --model.factory examples/own_data.py:make \
    --model.loss examples/own_data.py:loss --steps 300 --run-dir runs/spirals
"""

from collections.abc import Mapping
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hfjax

COUNTS = {"train": 1000, "valid": 200}


def point(index: int, rng: np.random.Generator) -> dict[str, Any]:
    """A point on one of two spirals, a little off it, and which of them."""
    label, angle = index % 2, rng.uniform(1, 7)
    direction = np.array([np.cos(angle + np.pi * label), np.sin(angle + np.pi * label)])
    x = (angle * direction + rng.normal(0, 0.1, 2)).astype(np.float32)
    return {"x": x, "label": np.int32(label)}


def data(split: str, seed: int) -> grain.MapDataset:
    """The data set of a split, train or valid; None would mean that there is none."""
    if split == "valid":
        return grain.MapDataset.range(COUNTS[split]).random_map(point, seed=1)
    points = grain.MapDataset.range(COUNTS[split]).random_map(point, seed=0)
    return points.shuffle(seed=seed)  # each epoch is shuffled anew


class Network(nnx.Module):
    """Whether a point is on the second spiral, as logits."""

    def __init__(self, inputs: int, *, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(inputs, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)])
        self.head = nnx.Linear(64, 2, rngs=rngs)

    def __call__(self, batch: Mapping[str, jax.Array]) -> jax.Array:
        x = batch["x"]
        for layer in self.layers:
            x = nnx.gelu(layer(x))
        return self.head(x)


def make(example: Mapping[str, jax.ShapeDtypeStruct]):
    """A model for examples of these shapes."""
    return lambda rngs: Network(example["x"].shape[0], rngs=rngs)


def loss(logits: jax.Array, batch: Mapping[str, jax.Array]) -> hfjax.Mean:
    """The cross entropy; examples that pad the last batch of a validation have a mask of 0."""
    mask = batch.get("mask", jnp.ones(len(logits)))
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    right = (logits.argmax(-1) == batch["label"]).astype(jnp.float32)
    accuracy = hfjax.Mean((right * mask).sum(), mask.sum())
    return hfjax.Mean((losses * mask).sum(), mask.sum(), metrics={"accuracy": accuracy})
