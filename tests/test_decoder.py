"""Families of pretrained models: as transformers has them, to float32's rounding.

tests/pretrained holds what it made of tiny models; make_fixtures.py there writes it anew. Weights
come in from files, and gradients go out as tensors of files, under every strategy that applies.
"""

import json
import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.loss import next_token_loss
from hfjax.weights.pretrained import Pretrained
from hfjax.weights.tensor_files import read_rows
from tests.model_folders import write_file
from tests.pretrained.weights_of import drawn, told

FOLDER = Path(__file__).with_name("pretrained")
FAMILIES = sorted(path.parent.name for path in FOLDER.glob("*/config.json"))
WITH_EXPERTS = {"mixtral", "qwen3_moe"}
SPLIT = hfjax.FSDP.edit(replicate_below=0)
STRATEGIES = {
    "FSDP": (SPLIT, {"fsdp": 2}, {"remat": "full"}),
    "TENSOR+SEQUENCE": (hfjax.TENSOR | hfjax.SEQUENCE, {"tensor": 2}, {}),
    "PIPE": (hfjax.PIPE, {"pipe": 2}, {"schedule": hfjax.Schedule("1f1b", 2)}),
    "CONTEXT": (SPLIT | hfjax.CONTEXT, {"context": 2}, {}),
    "EXPERT": (SPLIT | hfjax.EXPERT, {"expert": 2}, {}),
}
RATE = 1e3  # so large that what an update makes of a parameter is its gradient


def pretrained_of(family: str, folder: Path) -> Pretrained:
    """Return the model of a fixture, its weights drawn and written to a folder."""
    folder.mkdir(exist_ok=True)
    shutil.copy(FOLDER / family / "config.json", folder)
    shapes = json.loads((FOLDER / family / "tensors.json").read_text())["tensors"]
    write_file(
        folder / "model.safetensors",
        {name: drawn(name, tuple(shape)) for name, (shape, _) in shapes.items()},
    )
    return hfjax.pretrained(folder, pad_vocab_to=2)


@cache
def expected(family: str) -> dict[str, np.ndarray]:
    return dict(np.load(FOLDER / family / "expected.npz"))


def in_files(model, layout, state, folder: Path) -> dict[str, np.ndarray]:
    """Return the parameters of a state by the names of a file: it goes out as one."""
    hfjax.export(folder, layout, state, like=model)
    found = {
        k: read_rows(t, 0, t.num_rows) for k, t in hfjax.pretrained(folder).folder.tensors.items()
    }
    shutil.rmtree(folder)
    return found


def apart(found, wanted) -> float:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def of_gradients(family: str, gradients: dict[str, np.ndarray]) -> dict[str, float]:
    """Return how far gradients are from those of transformers: all of them, and the worst."""
    found = {name: told(name, x) for name, x in gradients.items()}
    wanted = {name: expected(family)[f"gradient/{name}"] for name in found}
    joined = lambda x: np.concatenate([x[name].ravel() for name in found])
    worst = max(apart(found[name], wanted[name]) for name in found)
    return {"gradients": apart(joined(found), joined(wanted)), "one gradient": worst}


@pytest.mark.short("qwen3_moe")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_loss_and_gradients_are_those_of_transformers(family, tmp_path):
    model, wanted = pretrained_of(family, tmp_path / "in"), expected(family)
    mesh = hfjax.make_mesh(devices=jax.devices()[:1])
    layout = hfjax.layout(model.create, optax.sgd(RATE), mesh, hfjax.DDP)
    state = hfjax.init(layout, parameters=model.weights)
    batch: Any = {"tokens": wanted["tokens"]}
    graph, parameters, rest = nnx.split(hfjax.to_model(layout, state), nnx.Param, ...)

    def loss(parameters):
        logits = nnx.merge(graph, parameters, rest)(batch)
        mean = next_token_loss(logits, batch)
        return mean.total / mean.weight, logits

    (found, logits), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters)
    rows = np.asarray(logits[..., : wanted["logits"].shape[-1]] - wanted["logits"])
    at = np.linalg.norm(rows, axis=-1) / np.linalg.norm(wanted["logits"], axis=-1)
    as_state = replace(state, params=nnx.to_pure_dict(gradients))
    by_name = in_files(model, layout, as_state, tmp_path / "out")
    errors = {"logits": float(at.max()), "loss": apart(found, wanted["loss"])}
    errors |= of_gradients(family, by_name)
    assert max(errors.values()) < 1e-5, errors


def cases():
    for family in FAMILIES:
        for name in STRATEGIES:
            if name != "EXPERT" or family in WITH_EXPERTS:
                yield pytest.param(family, name, id=f"{family}-{name}")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), list(cases()))
def test_under_every_strategy_losses_and_gradients_are_those_of_transformers(
    family, name, tmp_path
):
    model, (strategy, sizes, execution) = pretrained_of(family, tmp_path / "in"), STRATEGIES[name]
    mesh = hfjax.make_mesh(devices=jax.devices()[:2], **sizes)
    layout = hfjax.layout(model.create, optax.sgd(RATE), mesh, strategy)
    step = hfjax.train_step(layout, next_token_loss, **execution)
    state = hfjax.init(layout, parameters=model.weights, schedule=execution.get("schedule"))
    before = in_files(model, layout, state, tmp_path / "before")
    state, metrics = step(state, {"tokens": expected(family)["tokens"]})
    after = in_files(model, layout, state, tmp_path / "after")
    errors = of_gradients(family, {k: (x - after[k]) / RATE for k, x in before.items()})
    errors["loss"] = apart(metrics["loss"], expected(family)["loss"])
    assert max(errors["gradients"], errors["loss"]) < 1e-5, errors
