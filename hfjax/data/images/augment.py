"""Random crop, flip and colours of an example, drawn from seed, epoch and example number."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hfjax.utils.keywords import is_real, strict_fields

ATTEMPTS = 10  # to find a crop inside the image, as torchvision


@strict_fields
@dataclass(frozen=True)
class Augment:
    """Random augmentation of training images.

    Attributes:
        scale: For classes: the range of the fraction of the area that a crop takes. For masks: the
            range of the scale, where at 1 the longer side is `size`. None: 0.08 to 1, and 0.5 to
            2.
        ratio: The range of a crop's aspect ratio, width / height; unused for masks.
        flip: The probability of a horizontal flip, from 0 to 1.
        brightness: 0.4 draws a factor from 0.6 to 1.4; 0 changes nothing.
        contrast: As `brightness`.
        saturation: As `brightness`.

    Example:
        >>> from hfjax.data.images import Augment
        >>> Augment(scale=(0.35, 1.0), brightness=0.4).flip
        0.5
    """

    scale: tuple[float, float] | None = None
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    def __post_init__(self) -> None:
        for name, most in (("scale", math.inf), ("ratio", math.inf)):
            self._check_pair(name, most)
        if not is_real(self.flip, 0, 1):
            raise ValueError(f"flip={self.flip!r}: how often, from 0 to 1.")
        for name in ("brightness", "contrast", "saturation"):
            if not is_real(getattr(self, name), 0, math.inf):
                raise ValueError(f"{name}={getattr(self, name)!r}: a number from 0 on.")

    def _check_pair(self, name: str, most: float) -> None:
        pair = getattr(self, name)
        if name == "scale" and pair is None:
            return
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2
        if not is_pair or not all(is_real(x, 0, most) and 0 < x < most for x in pair):
            raise ValueError(f"{name}={pair!r}: the least and the largest, both above 0.")
        if pair[0] > pair[1]:
            raise ValueError(f"{name}={pair!r}: the least comes first.")

    def of_kind(self, kind: str) -> "Augment":
        """Return a copy with the default scale of a kind of data, if none was given.

        Args:
            kind: classes, or masks.

        Example:
            >>> from hfjax.data.images import Augment
            >>> Augment().of_kind("masks").scale
            (0.5, 2.0)
        """
        usual = (0.08, 1.0) if kind == "classes" else (0.5, 2.0)
        scale = usual if self.scale is None else self.scale
        if kind == "classes" and scale[1] > 1:
            raise ValueError(f"scale={scale!r}: of classes a part of the area, at most 1.")
        return Augment(**{**asdict(self), "scale": scale})

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def generator(seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return the random generator of an example in an epoch, the same on every machine.

    >>> round(generator(0, 0, 5).random(), 6), round(generator(0, 1, 5).random(), 6)
    (0.915996, 0.60108)
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, index])))


def uniform(u: float, low: float, high: float) -> float:
    """Return a number from 0 to 1 mapped to the range [low, high]."""
    return low + (high - low) * u


def uniform_int(u: float, high: int) -> int:
    """Return a number from 0 to 1 mapped to an integer from 0 to `high`, uniformly."""
    return min(int(u * (high + 1)), high)


def random_crop(
    rng: np.random.Generator, width: int, height: int, augment: Augment
) -> tuple[int, int, int, int]:
    """Return left, top, right, bottom of a random crop, as torchvision's RandomResizedCrop."""
    assert augment.scale is not None
    sizes, (x, y) = rng.random((ATTEMPTS, 2)), rng.random(2)
    for area, ratio in sizes:
        size = width * height * uniform(area, *augment.scale)
        aspect_ratio = math.exp(uniform(ratio, *map(math.log, augment.ratio)))
        w, h = round(math.sqrt(size * aspect_ratio)), round(math.sqrt(size / aspect_ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = uniform_int(x, width - w), uniform_int(y, height - h)
            return left, top, left + w, top + h
    return central_crop(width, height, augment.ratio)


def central_crop(width: int, height: int, ratio: tuple[float, float]) -> tuple[int, int, int, int]:
    """Return the largest central crop whose aspect ratio is allowed.

    >>> central_crop(200, 100, (3 / 4, 4 / 3))
    (33, 0, 166, 100)
    """
    w, h = width, height
    if width / height < ratio[0]:
        h = max(round(w / ratio[0]), 1)
    elif width / height > ratio[1]:
        w = max(round(h * ratio[1]), 1)
    left, top = (width - w) // 2, (height - h) // 2
    return left, top, left + w, top + h


def color_factors(rng: np.random.Generator, augment: Augment) -> Iterator[tuple[str, float]]:
    """Yield each colour property to change and its factor, in random order."""
    amounts = augment.brightness, augment.contrast, augment.saturation
    if not any(amounts):
        return
    factors, ranks = rng.random(3), rng.random(3)
    for i in np.argsort(ranks, kind="stable"):
        if amount := amounts[i]:
            enhancer = ("Brightness", "Contrast", "Color")[i]
            yield enhancer, uniform(float(factors[i]), max(0.0, 1 - amount), 1 + amount)
