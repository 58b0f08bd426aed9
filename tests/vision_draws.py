"""Weights, images and labels that are drawn from their names, in both environments alike."""

import hashlib
import math

import numpy as np

STEPS, RATE, MOMENTUM = 3, 0.05, 0.9
CLASSES, SMOOTHING = 10, 0.1
SIZES = {"deeplab": (2, 33, 25), "vit": (3, 8, 8)}  # of images; of others:
SIZE = (4, 33, 25)


def of(name: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the tensor of a name: factors and variances around 1, others around 0."""
    normal, last = of(name).normal(size=shape), name.rpartition(".")[2]
    if last == "running_var":
        return 0.5 + normal**2
    if len(shape) == 1:
        return 0.2 * normal + (1.0 if last == "weight" else 0.0)
    return normal * math.sqrt(2 / max(math.prod(shape[1:]), 1))


def told(name: str, x: np.ndarray) -> float:
    """Return what is written down of a tensor: its product with one of its name."""
    return float((x * of(f"vector of {name}").normal(size=x.shape)).sum())


def batch(case: str, number: int) -> dict[str, np.ndarray]:
    """Return the images [B, H, W, 3] and labels of a step; some pixels are of no class."""
    rows, height, width = SIZES.get(case, SIZE)
    random = of(f"{case} {number}")
    image = random.normal(size=(rows, height, width, 3))
    if case != "deeplab":
        return {"image": image, "label": random.integers(0, CLASSES, rows)}
    labels = random.integers(0, CLASSES, (rows, height, width))
    labels[random.random(labels.shape) < 0.1] = 255
    return {"image": image, "label": labels}
