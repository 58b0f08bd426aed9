"""Losses of images: what counts, what is right, and counts that are exact."""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.vision.losses import (
    classification_loss,
    confusion_counts,
    segmentation_eval_loss,
    segmentation_loss,
)

RNG = np.random.default_rng(0)


def mean(made, name=None):
    made = made if name is None else made.metrics[name]
    return float(made.total / made.weight)


def test_a_smoothed_loss_is_torchs_and_accuracies_count_the_greatest():
    logits = RNG.normal(size=(64, 11))
    labels: Any = RNG.integers(0, 11, 64)
    made = classification_loss(jnp.array(logits), {"label": labels}, smoothing=0.1)
    logs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    wanted = -(0.9 * logs[range(64), labels] + 0.1 * logs.mean(1)).mean()
    assert math.isclose(mean(made), wanted, rel_tol=1e-6)
    order = np.argsort(-logits, axis=1)
    for name, n in (("top1", 1), ("top5", 5)):
        assert mean(made, name) == np.mean((order[:, :n] == labels[:, None]).any(1))


def test_of_few_classes_there_is_no_top5_and_the_first_of_equal_logits_counts():
    made = classification_loss(jnp.zeros((4, 5)), {"label": jnp.array([0, 0, 1, 2])})
    assert sorted(made.metrics) == ["top1"]
    assert mean(made, "top1") == 0.5


def test_rows_that_are_masked_and_labels_below_zero_count_nothing():
    logits, labels = jnp.array(RNG.normal(size=(4, 6))), jnp.array([1, 2, 99, -1])
    mask = jnp.array([1.0, 1.0, 0.0, 1.0])
    made = classification_loss(logits, {"label": labels, "mask": mask})
    alone = classification_loss(logits[:2], {"label": labels[:2]})
    assert float(made.weight) == 2
    assert math.isclose(mean(made), mean(alone), rel_tol=1e-6)
    assert mean(made, "top5") == mean(alone, "top5")
    assert math.isnan(mean(classification_loss(logits, {"label": labels})))


@pytest.mark.parametrize("dtype", ["uint8", "int32"])
def test_pixels_of_no_class_and_masked_rows_count_nothing(dtype):
    logits = jnp.array(RNG.normal(size=(3, 4, 5, 7)))
    labels = RNG.integers(0, 7, (3, 4, 5))
    labels[0, 0] = 255
    batch = {"label": labels.astype(dtype), "mask": np.array([True, True, False])}
    made = segmentation_loss({"out": logits, "aux": 2 * logits}, batch)
    counts = (labels != 255) & batch["mask"][:, None, None]
    loss = lambda x: optax.softmax_cross_entropy_with_integer_labels(x, labels % 255)[counts]
    wanted = (loss(logits) + 0.5 * loss(2 * logits)).mean()
    assert math.isclose(mean(made), wanted, rel_tol=1e-6)
    assert float(made.weight) == counts.sum() == 35
    assert mean(made, "pixels") == np.float32((logits.argmax(-1) == labels)[counts].mean())


class Bias(nnx.Module):
    """Its logits are the image."""

    def __init__(self, rngs):
        self.bias = nnx.Param(jnp.zeros(()))

    def __call__(self, batch):
        return {"out": batch["image"] + self.bias[...]}


def confusion(logits, labels, counts) -> np.ndarray:
    classes = logits.shape[-1]
    pairs = labels[counts] * classes + logits.argmax(-1)[counts]
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


@pytest.mark.parametrize("devices", [1, 4])
def test_counts_of_pixels_are_exact_on_any_devices(devices):
    """Of 300x300 pixels in 12 rows, which no power of two divides."""
    logits = RNG.normal(size=(12, 300, 300, 3)).astype(np.float32)
    labels = RNG.choice([0, 1, 1, 1, 1, 2, 255], (12, 300, 300))
    mask = np.arange(12) < 11
    mesh = hfjax.make_mesh(devices=jax.devices()[:devices], data=devices)
    layout = hfjax.layout(Bias, optax.sgd(0.1), mesh, hfjax.DDP)
    batch = {"image": logits, "label": labels.astype(np.uint8), "mask": mask}
    found = hfjax.eval_step(layout, segmentation_eval_loss)(hfjax.init(layout), batch)
    counts = (labels != 255) & mask[:, None, None]
    wanted = confusion(logits, labels, counts)
    np.testing.assert_array_equal(confusion_counts(found["confusion"], 12), wanted)
    assert wanted.sum() == float(found["weight"])


def test_counts_come_back_from_the_largest_sums_whatever_the_division_rounds():
    """Of 4096 rows of 2**24 - 1 pixels of one class; a division is off by up to four units."""
    rows, pixels = 4096, 2**24 - 1
    digits = np.array([rows * ((pixels >> shift) & 255) for shift in (0, 8, 16)], np.float32)
    for rows_here in (rows, 4095, 3001):
        sums = digits // rows * rows_here
        told = np.float32(sums) / np.float32(rows_here)
        for off in (-4, 0, 4):
            near = told + np.float32(off) * np.spacing(told)
            found = confusion_counts(near.reshape(3, 1, 1), rows_here)
            assert found.item() == rows_here * pixels


LOGITS = jnp.zeros((2, 3))
PIXELS: Any = {"out": jnp.zeros((2, 4, 4, 3))}


@pytest.mark.parametrize(
    ("loss", "outputs", "batch", "match"),
    [
        (
            classification_loss,
            LOGITS,
            {"label": jnp.zeros((2, 1), int)},
            r"labels int32\[2, 1\] be",
        ),
        (
            classification_loss,
            LOGITS,
            {"label": jnp.zeros(2)},
            r"float32\[2\] .* one class for eac",
        ),
        (
            partial(classification_loss, smoothing=1.0),
            *(LOGITS, {"label": jnp.zeros(2, int)}),
            r"smoothing=1.0\): the part .* from 0 to below 1",
        ),
        (
            classification_loss,
            *(LOGITS, {"label": jnp.zeros(2, int), "mask": jnp.ones(3)}),
            r"mask float32\[3\] beside 2 rows: what each",
        ),
        (
            segmentation_loss,
            LOGITS,
            {"label": jnp.zeros(2, int)},
            "found ArrayImpl.*classification_",
        ),
        (
            segmentation_loss,
            PIXELS,
            {"label": jnp.zeros((2, 8, 8), int)},
            "one for each pixel, are",
        ),
    ],
)
def test_what_does_not_fit_is_refused(loss, outputs, batch, match):
    with pytest.raises(ValueError, match=match):
        loss(outputs, batch)


@pytest.mark.parametrize("rows", [0, 4097])
def test_more_rows_than_are_exact_are_refused(rows):
    with pytest.raises(ValueError, match=rf"rows={rows}\): from 1 to 4096 rows"):
        confusion_counts(np.zeros((3, 2, 2)), rows)


def test_what_is_no_number_is_never_right():
    logits, labels = jnp.full((4, 7), jnp.nan), jnp.arange(4)
    made = classification_loss(logits, {"label": labels})
    assert float(made.metrics["top1"].total) == float(made.metrics["top5"].total) == 0
    one = jnp.zeros((1, 7)).at[0, 3].set(jnp.nan)
    made = classification_loss(one, {"label": jnp.array([0])})
    assert float(made.metrics["top1"].total) == 0
