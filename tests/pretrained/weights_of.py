"""Weights that are drawn, not kept: of each tensor from its name, in both environments alike."""

import hashlib

import numpy as np

KEPT = 600  # numbers of a gradient that are written down; of larger ones a product is


def _of(name: str) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return the tensor of a name: norms around 0.6, biases and matrices around 0."""
    normal = _of(name).normal(size=shape).astype(np.float32)
    if len(shape) == 1:
        middle = 0.0 if name.endswith("bias") else 0.6
        return np.float32(middle) + np.float32(0.2) * normal
    return np.float32(1.5 / np.sqrt(max(shape))) * normal


def told(name: str, gradient: np.ndarray) -> np.ndarray:
    """Return what is written down of a gradient: itself, or its product with a fixed vector."""
    if gradient.size <= KEPT:
        return gradient
    vector = _of(f"vector of {name}").normal(size=gradient.shape[-1]).astype(np.float32)
    return gradient @ vector


def tokens(vocab: int, rows: int, length: int) -> np.ndarray:
    """Return rows of tokens."""
    return _of("tokens").integers(0, vocab, (rows, length + 1), np.int32)
