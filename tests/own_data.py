"""Data sets and models of a user's, for `--data.factory` and `--model.factory` in tests."""

import os
from typing import Any

import grain
import jax.numpy as jnp
import numpy as np

import hfjax
from hfjax.data import Loader

LENGTH, COUNTS = 16, {"train": 40, "valid": 11}


def numbered(split: str, example: Any) -> grain.MapDataset:
    return grain.MapDataset.range(COUNTS[split]).map(example)


def library(split: str, seed: int) -> grain.MapDataset:
    """The examples of a folder of tokens in the order of the text task."""
    folder, trains = f"{os.environ['OWN_DATA_FOLDER']}/{split}", split == "train"
    loader = Loader(folder, 1, LENGTH, seed=seed, shuffle=trains, epochs=None if trains else 1)
    read = lambda index, _: {"tokens": loader.at(index)["tokens"][0].astype(np.int64)}
    return grain.MapDataset.range(loader.examples_per_epoch).map_with_index(read)


def tokens(split: str, seed: int) -> grain.MapDataset:
    return numbered(split, lambda i: {"tokens": np.full(LENGTH + 1, i)})


def images(split: str, seed: int) -> grain.MapDataset:
    pixels = lambda i: np.random.default_rng(i).integers(0, 255, (16, 16, 3)).astype(np.uint8)
    return numbered(split, lambda i: {"image": pixels(i), "label": i % 3})


def points(split: str, seed: int) -> grain.MapDataset:
    x = lambda i: np.random.default_rng(i).normal(size=3).astype(np.float32)
    example = lambda i: {"x": x(i), "y": x(i).sum(keepdims=True)}
    return numbered(split, example).shuffle(seed=seed)


# -- with a fault -------------------------------------------------------------------------


def train_only(split: str, seed: int) -> Any:
    return points(split, seed) if split == "train" else None


def endless(split: str, seed: int) -> Any:
    return points(split, seed).repeat()


def listed(split: str, seed: int) -> Any:
    return [{"x": 0}]


def iterated(split: str, seed: int) -> Any:
    return iter(points(split, seed))


def nothing(split: str, seed: int) -> Any:
    pass


def unlike(split: str, seed: int) -> Any:
    return numbered(split, lambda i: {"tokens": np.zeros(LENGTH + 1 + (i == 7), np.int32)})


def renamed(split: str, seed: int) -> Any:
    return tokens(split, seed).map(lambda x: {"input_ids": x["tokens"]})


def longer(split: str, seed: int) -> Any:
    return numbered(split, lambda i: {"tokens": np.zeros(LENGTH + 2, np.int32)})


def floats(split: str, seed: int) -> Any:
    return numbered(split, lambda i: {"tokens": np.zeros(LENGTH + 1, np.float32)})


def more(split: str, seed: int) -> Any:
    return tokens(split, seed).map(lambda x: x | {"id": 0})


def negative(split: str, seed: int) -> Any:
    return tokens(split, seed).map(lambda x: {"tokens": 3 - x["tokens"]})


def large(split: str, seed: int) -> Any:
    return numbered(split, lambda i: {"x": np.zeros(3), "id": 1 << (30 + i)})


def of_split(split: str) -> Any:
    return points(split, 0)


# -- models and losses --------------------------------------------------------------------


def linear(example: Any) -> Any:
    return lambda rngs: {"w": jnp.zeros((example["x"].shape[0], 1))}


def squares(params: Any, batch: Any) -> Any:
    """The mean square, in which examples of mask 0 count."""
    return ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()


def masked_squares(params: Any, batch: Any) -> Any:
    mask = batch.get("mask", jnp.ones(len(batch["x"])))
    losses = ((batch["x"] @ params["w"] - batch["y"]) ** 2)[:, 0]
    far = hfjax.Mean(((losses > 1) * mask).sum(), mask.sum())
    return hfjax.Mean((losses * mask).sum(), mask.sum(), metrics={"far": far})


def labelled(params: Any, batch: Any) -> Any:
    return (params["w"].sum() * batch["label"]).mean()
