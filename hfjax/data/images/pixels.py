"""The pixels of a row: cut, resized and filled up, uint8, as Pillow and torchvision do it."""

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hfjax.data.images.decode import pillow
from hfjax.utils.command_errors import optional

if TYPE_CHECKING:
    from PIL.Image import Image

IGNORED = 255  # the label of pixels that do not count
FILL = (124, 116, 104)  # the mean colour of ImageNet: about 0 once a model has normalised it
Box = tuple[int, int, int, int]  # left, top, right, bottom


def array(image: "Image") -> np.ndarray:
    """Return the pixels [height, width, 3]."""
    return np.asarray(image, np.uint8)


def resized_crop(image: "Image", box: Box, size: int) -> "Image":
    """Return a part of an image as a square: cut, then resized."""
    return image.crop(box).resize((size, size), pillow().Resampling.BILINEAR)


def shorter_to(width: int, height: int, size: int) -> tuple[int, int]:
    """Return width and height when the shorter side becomes `size`.

    >>> shorter_to(500, 375, 256)
    (341, 256)
    """
    if width <= height:
        return size, size * height // width
    return size * width // height, size


def longer_to(width: int, height: int, size: float) -> tuple[int, int]:
    """Return width and height when the longer side becomes `size`, at least 1.

    >>> longer_to(500, 375, 256)
    (256, 192)
    """
    scale = size / max(width, height)
    return max(round(width * scale), 1), max(round(height * scale), 1)


def centre(width: int, height: int, size: int) -> Box:
    """Return the square in the middle, as torchvision's CenterCrop.

    >>> centre(341, 256, 224)
    (58, 16, 282, 240)
    """
    left, top = round((width - size) / 2), round((height - size) / 2)
    return left, top, left + size, top + size


def resized_part(image: "Image", whole: tuple[int, int], box: Box) -> "Image":
    """Return a part of an image resized to `whole`; the rest is not computed."""
    left, top, right, bottom = box
    x, y = image.width / whole[0], image.height / whole[1]
    at = left * x, top * y, min(right * x, image.width), min(bottom * y, image.height)
    return image.resize((right - left, bottom - top), pillow().Resampling.BILINEAR, box=at)


def nearest_part(
    labels: np.ndarray, whole: tuple[int, int], box: Box, flip: bool = False
) -> np.ndarray:
    """Return a part of labels resized to `whole`: each place has the label nearest to it."""
    left, top, right, bottom = box
    rows = _nearest(top, bottom, labels.shape[0], whole[1])
    columns = _nearest(left, right, labels.shape[1], whole[0])
    return labels.take(rows, 0).take(columns[::-1] if flip else columns, 1)


def _nearest(start: int, stop: int, before: int, after: int) -> np.ndarray:
    return (2 * np.arange(start, stop) + 1) * before // (2 * after)


def flipped(image: "Image") -> "Image":
    """Return an image with left and right exchanged."""
    return image.transpose(pillow().Transpose.FLIP_LEFT_RIGHT)


def filled_up(part: "Image", size: int) -> "Image":
    """Return a square with a part at its top left; the rest has the mean colour."""
    if part.size == (size, size):
        return part
    square = pillow().new("RGB", (size, size), FILL)
    square.paste(part, (0, 0))
    return square


def ignored_up(labels: np.ndarray, size: int) -> np.ndarray:
    """Return a square with labels at its top left; the rest does not count."""
    if labels.shape == (size, size):
        return labels
    square = np.full((size, size), IGNORED, labels.dtype)
    square[: labels.shape[0], : labels.shape[1]] = labels
    return square


def coloured(image: "Image", changes: Iterable[tuple[str, float]]) -> "Image":
    """Return an image with changed colours, as torchvision's ColorJitter on Pillow's images."""
    for name, factor in changes:
        image = getattr(_enhance(), name)(image).enhance(factor)
    return image


@cache
def _enhance() -> Any:
    return optional("PIL.ImageEnhance", "changing colours", "images")
