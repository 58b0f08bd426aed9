"""What both programs of a model of images are made of: shape, batches, optimizer, loss, rival."""

import math
from dataclasses import replace
from typing import Any

from benchmarks.gpu_sections.train_worker import Asked, Task

RATE, MOMENTUM = 1e-3, 0.9
# As users write it: products in bfloat16, norms and their statistics in float32.
EXECUTION = {"precision": {"*": "bf16", "*norm*": "fp32"}}
SMALL_SHAPES: dict[str, dict[str, Any]] = {
    "ResNetConfig": {"depths": (1, 1, 1, 1)},
    "DeepLabConfig": {"depths": (1, 1, 1, 1)},
    "RegNetConfig": {"depth": 3, "first": 16, "slope": 8.0, "step": 2.0, "group": 8, "stem": 8},
}
NO_DROPOUT = {"dropout": 0.0, "auxiliary_dropout": 0.0}  # so that both train the same


def task_of(asked: Asked) -> Task:
    """Return what is trained."""
    import jax
    import optax

    import hfjax
    from hfjax.models.vision.losses import classification_loss, segmentation_loss
    from hfjax.weights.vision_rules import model_factory

    config = shape_of(asked)
    mesh = hfjax.make_mesh(devices=jax.devices()[:1], data=1)
    sgd = optax.sgd(RATE, momentum=MOMENTUM)

    def rival(flat: dict[str, Any]) -> Any:
        from benchmarks.torch_vision import of_images

        return of_images(config, flat, RATE, MOMENTUM)

    layout = hfjax.layout(model_factory(config), sgd, mesh, hfjax.DDP)
    return Task(
        layout=layout,
        loss=segmentation_loss if segments(config) else classification_loss,
        batch=lambda number: drawn(asked, config, number),
        execution=EXECUTION,
        rival=rival,
        weights=lambda: weights_of(layout, config.classes),
    )


def shape_of(asked: Asked) -> Any:
    """Return the shape of the model."""
    from hfjax.models.vision.preset_table import PRESETS

    config: Any = PRESETS[asked.preset]
    if segments(config):
        config = replace(config, **NO_DROPOUT)
    if asked.tiny:
        config = replace(config, classes=10, **SMALL_SHAPES[type(config).__name__])
    return config


def segments(config: Any) -> bool:
    """Return whether a model of this shape says what each pixel shows."""
    from hfjax.models.vision.deeplab import DeepLabConfig

    return isinstance(config, DeepLabConfig)


def drawn(asked: Asked, config: Any, number: int) -> dict[str, Any]:
    """Return a batch of random bytes and labels."""
    import numpy as np

    draw, side = np.random.default_rng(number), asked.length
    image = draw.integers(0, 256, (asked.rows, side, side, 3), np.uint8)
    shape = image.shape[:3] if segments(config) else image.shape[:1]
    return {"image": image, "label": draw.integers(0, config.classes, shape, np.int32)}


def weights_of(layout: Any, classes: int) -> dict[str, Any]:
    """Return first parameters by path: normal numbers as torchvision has them, ones and zeros.

    What has the classes as a dimension begins small: losses are near the logarithm of their number.
    """
    import numpy as np

    draw, found = np.random.default_rng(0), {}
    for path, x in layout.arrays.items():
        if path.endswith("/kernel"):
            usual = math.sqrt(2 / math.prod((*x.shape[:-2], x.shape[-1])))
            deviation = 0.01 if x.shape[-1] == classes else usual
            found[path] = deviation * draw.standard_normal(x.shape, np.float32)
        else:
            found[path] = np.full(x.shape, path.endswith("/scale"), np.float32)
    return found
