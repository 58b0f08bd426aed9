"""Models of images compute what torchvision's compute, in float64; tests/make_vision.py kept it."""

from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import nnx

import hfjax
from hfjax.models.vision.deeplab import DeepLabConfig
from hfjax.models.vision.losses import classification_loss, segmentation_loss
from hfjax.models.vision.regnet import RegNetConfig
from hfjax.models.vision.resnet import ResNetConfig
from hfjax.models.vision.vit import ViTConfig
from hfjax.testing import assert_strategies_agree
from hfjax.weights.vision_files import named_tensors, read_vision, with_weights
from hfjax.weights.vision_rules import COUNTER, model_factory, vision_table
from tests.model_folders import write_file
from tests.vision_draws import CLASSES, MOMENTUM, RATE, SMOOTHING, STEPS, batch, drawn, of, told

WIDTHS: Any = {"widths": (8, 16, 32, 64), "classes": CLASSES, "norm_groups": 4}
BASIC: Any = {**WIDTHS, "block": "basic"}
SEGMENTS: Any = {**WIDTHS, "pyramid": 16, "rates": (2, 4, 6), "dropout": 0.0}
CONFIGS = {
    "basic": ResNetConfig(**BASIC, stem="small", depths=(1, 2, 1, 1)),
    "bottleneck": ResNetConfig(**WIDTHS, depths=(1, 2, 1, 1)),
    "frozen": ResNetConfig(**WIDTHS, depths=(1, 1, 1, 1), norm="frozen"),
    "group": ResNetConfig(**BASIC, depths=(1, 1, 1, 1), norm="group"),
    "regnet": RegNetConfig.preset("regnet-tiny", classes=CLASSES),
    "deeplab": DeepLabConfig(**SEGMENTS, depths=(1, 1, 2, 1), auxiliary_dropout=0.0),
    "vit": ViTConfig.preset("vit-tiny", classes=CLASSES),
}
NEAR = 1e-8


@cache
def expected() -> dict[str, np.ndarray]:
    held = dict(np.load(Path(__file__).with_name("vision.npz")))
    return held | dict(zip(held.pop("names").tolist(), held.pop("numbers"), strict=True))


def write_drawn(path: Path, config, draw=drawn) -> Path:
    """Write the weights of a model, drawn from their names, as torchvision's would be."""
    shapes = {piece.name: piece.rule.shape for piece in vision_table(config).expand()}
    write_file(path, {name: draw(name, shape) for name, shape in shapes.items()})
    return path


def layout_of(config, optimizer=None) -> hfjax.Layout:
    mesh = hfjax.make_mesh(devices=jax.devices()[:1])
    return hfjax.layout(model_factory(config), optimizer or optax.sgd(RATE), mesh, hfjax.DDP)


def loaded(config, path: Path) -> Any:
    """Return the module with the weights of a file."""
    layout = layout_of(config)
    return hfjax.to_model(layout, with_weights(layout, read_vision(path, config)))


def apart(found, wanted) -> float:
    found, wanted = np.asarray(found), np.asarray(wanted)
    assert found.shape == wanted.shape
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def logits_of(outputs) -> dict[str, np.ndarray]:
    """As tests/make_vision.py keeps them."""
    if not isinstance(outputs, dict):
        return {"logits": np.asarray(outputs)}
    return {name: np.asarray(x) @ np.arange(1, CLASSES + 1) for name, x in outputs.items()}


def of_names(case: str, kind: str, config, arrays) -> dict[str, float]:
    """Return how far tensors are from what is kept of them, beside their own size."""
    found = {k: x for k, x in named_tensors(arrays, config) if not k.endswith(COUNTER)}
    kept = {k.partition(f"{kind}/")[2] for k in expected() if k.startswith(f"{case}/{kind}/")}
    assert kept <= set(found)
    size = lambda x: max(np.linalg.norm(x), 1e-9)
    wanted = lambda name: expected()[f"{case}/{kind}/{name}"]
    return {n: float(abs(told(n, found[n]) - wanted(n)) / size(found[n])) for n in kept}


@pytest.mark.short("basic", "vit")
@pytest.mark.parametrize("case", CONFIGS)
def test_logits_loss_gradients_and_three_steps_are_those_of_torchvision(case, tmp_path):
    config, errors = CONFIGS[case], {}
    with jax.enable_x64(True):
        model = loaded(config, write_drawn(tmp_path / "a.safetensors", config))
        model.eval()
        for name, x in logits_of(jax.jit(model.__call__)(batch(case, 0))).items():
            errors[f"eval/{name}"] = apart(x, expected()[f"{case}/eval/{name}"])
        model.train()
        graph, parameters, rest = nnx.split(model, nnx.Param, ...)
        segments = isinstance(config, DeepLabConfig)
        loss = segmentation_loss if segments else partial(classification_loss, smoothing=SMOOTHING)

        def run(parameters, rest, batch):
            model = nnx.merge(graph, parameters, rest, copy=True)
            outputs = model(batch)
            mean = loss(outputs, batch)
            return mean.total / mean.weight, (outputs, nnx.split(model, nnx.Param, ...)[2])

        step = jax.jit(jax.value_and_grad(run, has_aux=True))
        optimizer = optax.sgd(RATE, MOMENTUM)
        kept = optimizer.init(parameters)
        by_path = lambda *states: {
            "/".join(map(str, k)): np.asarray(x[...])
            for s in states
            for k, x in nnx.to_flat_state(s)
        }
        for number in range(STEPS):
            (value, (outputs, rest)), gradients = step(parameters, rest, batch(case, number))
            if number == 0:
                errors["loss"] = apart(value, expected()[f"{case}/loss"])
                for name, x in logits_of(outputs).items():
                    errors[f"train/{name}"] = apart(x, expected()[f"{case}/train/{name}"])
                zeros = jax.tree.map(np.zeros_like, rest)
                errors |= of_names(case, "gradient", config, by_path(gradients, zeros))
            updates, kept = optimizer.update(gradients, kept)
            parameters = optax.apply_updates(parameters, updates)
        errors |= of_names(case, "after", config, by_path(parameters, rest))
    assert max(errors.values()) < NEAR, sorted(errors.items(), key=lambda x: -x[1])[:9]


SPLIT = {"replicate_below": 0}
PIPED = (hfjax.PIPE.edit(**SPLIT), {"pipe": 2}, {"schedule": hfjax.Schedule("1f1b", 2)})
FULL = (hfjax.FSDP.edit(**SPLIT), {"fsdp": 2}, {"remat": "names:conv"})
TENSORS = (hfjax.TENSOR | hfjax.SEQUENCE, {"tensor": 2}, {})
TRAINED = {
    "vit": (ViTConfig.preset("vit-tiny", dropout=0.1), {"TENSOR": TENSORS, "PIPE": PIPED}),
    "resnet": (ResNetConfig.preset("resnet-tiny", norm="frozen"), {"FSDP": FULL, "PIPE": PIPED}),
    "regnet": (RegNetConfig.preset("regnet-tiny", norm="group"), {"FSDP": FULL}),
    "deeplab": (DeepLabConfig.preset("deeplabv3-tiny", norm="group"), {"FSDP": FULL}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_split_models_train_as_one_device_trains_them(name):
    """Seventeen positions do not divide; DeepLab hands on features, and drops some of them."""
    config, cases = TRAINED[name]
    draw, segments = of(name), name == "deeplab"
    image = draw.integers(0, 256, (4, 8, 8, 3)).astype(np.uint8)
    label = draw.integers(0, config.classes, (4, 8, 8) if segments else 4)
    loss = segmentation_loss if segments else classification_loss
    batch = {"image": image, "label": label, "mask": np.array([1.0, 1.0, 1.0, 0.0])}
    assert_strategies_agree(model_factory(config), loss, batch, cases, steps=2)
