"""Models whose constructor cannot be traced are built for real, and train like any other."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.testing import assert_strategies_agree

RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=(16, 4)).astype(np.float32)}
FOUR = {"DDP": (hfjax.DDP, {"data": 4}), "FSDP": (hfjax.FSDP, {"fsdp": 4})}
forward = lambda model, batch: model(batch["x"])


def loss(outputs, batch):
    return ((outputs - 1) ** 2).mean()


class AsksForAValue(nnx.Module):
    """A scale that Python computes of an array."""

    def __init__(self, rngs):
        self.scale = float(jnp.sqrt(8.0))
        self.map = nnx.Linear(4, 4, rngs=rngs)
        self.drop = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.map(x)) / self.scale


class DrawsFromADefault(nnx.Module):
    """A generator that was made when Python read the class."""

    def __init__(self, rngs: nnx.Rngs = nnx.Rngs(0)):  # noqa: B008  as people write it
        self.map = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.map(x))


class KeepsALayer(nnx.Module):
    """A layer that only a function knows, so that no optimizer of flax finds it."""

    def __init__(self, rngs):
        hidden = nnx.Linear(4, 4, rngs=rngs)
        self.block = lambda x: x + hidden(x)
        self.map = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.map(self.block(x))


def a_tree(rngs):
    return {"w": jax.random.normal(rngs.params(), (4, 4)) / float(jnp.sqrt(8.0))}


MODELS = {
    "asks for a value": (AsksForAValue, forward),
    "keeps a layer": (KeepsALayer, forward),
    "a pytree": (a_tree, lambda params, batch: batch["x"] @ params["w"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_traced_trains_as_on_one_device(name):
    init, run = MODELS[name]
    assert_strategies_agree(init, loss, BATCH, FOUR, steps=2, forward=run)


@pytest.mark.slow
def test_a_generator_of_its_own_is_drawn_from_once():
    init = lambda rngs: DrawsFromADefault()
    assert_strategies_agree(init, loss, BATCH, FOUR, steps=2, forward=forward)


def test_it_is_told_with_its_size_and_why():
    layout = hfjax.layout(AsksForAValue, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
    told = str(layout)
    assert "cannot be traced (Abstract tracer value encountered" in told
    assert "built for real, on the CPU" in told


def test_each_seed_has_parameters_of_its_own_and_those_of_plain_flax():
    layout = hfjax.layout(AsksForAValue, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), hfjax.FSDP)
    for seed in (0, 3):
        key = jax.random.key(seed)
        own = AsksForAValue(nnx.Rngs(key, dropout=jax.random.fold_in(key, 1)))
        found = hfjax.full_array(hfjax.init(layout, seed).params)
        np.testing.assert_array_equal(found["map"]["kernel"], own.map.kernel[...])
        by_hand = hfjax.full_array(layout.create(seed).params)
        np.testing.assert_array_equal(by_hand["map"]["kernel"], own.map.kernel[...])


def test_layers_that_functions_keep_are_told_not_to_train():
    layout = hfjax.layout(KeepsALayer, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
    assert "not trained, since functions keep them: layers of KeepsALayer.block" in str(layout)
    assert sorted(layout.specs) == ["map/bias", "map/kernel"]


def test_what_cannot_be_built_either_is_refused_with_both_reasons():
    class Fails(nnx.Module):
        def __init__(self, rngs):
            del rngs
            if float(jnp.sqrt(8.0)) < 3:
                raise RuntimeError("no such width")

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"cannot be traced.*RuntimeError: no such width"):
            hfjax.layout(Fails, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
