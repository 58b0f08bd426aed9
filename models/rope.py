"""Frequencies of rotary positions, optionally stretched to sequences longer than trained on.

Stretched frequencies are computed by NumPy, with the same steps as in `transformers`: at position
100,000 the last bit of a frequency is a hundredth of a radian.
"""

import math
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from hfjax.utils.keywords import is_real

KINDS = ("default", "linear", "llama3", "yarn")
ABOVE_ZERO = {"base": 0, "factor": 0, "original": 1, "low": 0, "high": 0, "fast": 0, "slow": 0}


@dataclass(frozen=True)
class Rope:
    """Rotary positions: base ** (-2i / D) radians per position for dimensions i and i + D/2.

    Attributes:
        base: The base of the wavelengths.
        kind: default: these frequencies. linear: all divided by `factor`. llama3: low ones divided
            by `factor`, high ones unchanged, and interpolated between. yarn: the same with other
            bounds, and queries and keys are scaled by `attention`.
        factor: The factor by which sequences may be longer.
        original: The original maximum length, relative to which llama3 and yarn measure waves.
        low: llama3: waves with fewer rotations than this in `original` positions are low.
        high: llama3: waves with more rotations than this are high.
        fast: yarn: dimensions with more rotations than this in `original` positions are high.
        slow: yarn: dimensions with fewer rotations than this are low.
        attention: yarn: the factor of queries and keys. None: 1 + log(factor) / 10.
        truncate: yarn: whether bounds are rounded to whole dimensions.

    Example:
        >>> from hfjax.models.rope import Rope
        >>> Rope(10000.0, "linear", factor=8.0).frequencies(2, "float32").tolist()
        [0.125, 0.0012499999720603228]
    """

    base: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original: int = 8192
    low: float = 1.0
    high: float = 4.0
    fast: float = 32.0
    slow: float = 1.0
    attention: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Rope(kind={self.kind!r}): one of {', '.join(KINDS)}.")
        numbers = ABOVE_ZERO if self.attention is None else {**ABOVE_ZERO, "attention": 0}
        for name, least in numbers.items():
            number = getattr(self, name)
            if not is_real(number, least or sys.float_info.min, sys.float_info.max):
                raise ValueError(
                    f"Rope({name}={number!r}): a finite number is expected, "
                    f"{'at least 1' if least else 'above 0'}."
                )
        if self.low >= self.high:
            raise ValueError(
                f"Rope(low={self.low}, high={self.high}): waves that turn fewer than `low` times "
                "are slow, more than `high` times fast. Choose a low below high."
            )
        if not isinstance(self.truncate, bool):
            raise ValueError(f"Rope(truncate={self.truncate!r}): true or false.")
        if self.kind == "default" and self.factor != 1:
            raise ValueError(
                f"Rope(factor={self.factor}): the kind default stretches nothing. Choose kind= "
                f"from {', '.join(KINDS[1:])}, or leave factor out."
            )

    @property
    def attention_scaling(self) -> Any:
        """The factor of cosines and sines; 1.0 except for yarn."""
        if self.kind != "yarn":
            return 1.0
        if self.attention is not None:
            return self.attention
        return 1.0 if self.factor <= 1 else 0.1 * math.log(self.factor) + 1.0

    def frequencies(self, half: int, dtype: DTypeLike) -> Any:
        """Return the radians per position of each pair of dimensions.

        Args:
            half: The number of pairs.
            dtype: The dtype of the computation.
        """
        if self.kind == "default":
            return self.base ** (-jnp.arange(half, dtype=dtype) / half)
        dimensions = np.arange(0, 2 * half, 2).astype(dtype) / (2 * half)
        waves = np.asarray(self.base**dimensions, dtype)
        stretched = {"linear": self._linear, "llama3": self._llama3, "yarn": self._yarn}[self.kind](
            waves
        )
        return stretched.astype(dtype)

    def _linear(self, waves: np.ndarray) -> np.ndarray:
        return 1.0 / waves / self.factor

    def _llama3(self, waves: np.ndarray) -> np.ndarray:
        frequencies = 1.0 / waves
        lengths = 2 * math.pi / frequencies
        smooth = (self.original / lengths - self.low) / (self.high - self.low)
        between = (1 - smooth) * frequencies / self.factor + smooth * frequencies
        slow, fast = lengths > self.original / self.low, lengths < self.original / self.high
        return np.where(slow, frequencies / self.factor, np.where(fast, frequencies, between))

    def _yarn(self, waves: np.ndarray) -> np.ndarray:
        half = len(waves)
        first, last = self._correction_dim(self.fast, half), self._correction_dim(self.slow, half)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, 2 * half - 1)
        last = last + 0.001 if first == last else last
        ramp = np.clip((np.arange(half).astype(waves.dtype) - first) / (last - first), 0, 1)
        extrapolation = 1 - ramp
        return 1.0 / (self.factor * waves) * (1 - extrapolation) + 1.0 / waves * extrapolation

    def _correction_dim(self, rotations: float, half: int) -> float:
        """Return the pair of dimensions with so many rotations in the original length."""
        return half * math.log(self.original / (rotations * 2 * math.pi)) / math.log(self.base)


@dataclass(frozen=True)
class EitherRope:
    """The rotary positions of a layer whose kind is data.

    Attributes:
        condition: Whether the layer uses `if_true`.
        if_true: Its rotary positions if `condition` is true.
        if_false: Its rotary positions otherwise.
    """

    condition: jax.Array
    if_true: Rope
    if_false: Rope

    @property
    def attention_scaling(self) -> Any:
        """The factor of cosines and sines."""
        if_true, if_false = self.if_true.attention_scaling, self.if_false.attention_scaling
        return if_true if if_true == if_false else jnp.where(self.condition, if_true, if_false)

    def frequencies(self, half: int, dtype: DTypeLike) -> jax.Array:
        """Return the radians per position of each pair of dimensions."""
        return jnp.where(
            self.condition,
            self.if_true.frequencies(half, dtype),
            self.if_false.frequencies(half, dtype),
        )
