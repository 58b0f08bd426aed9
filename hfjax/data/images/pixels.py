"""Crop, resize and pad the pixels of an example, uint8, as Pillow and torchvision do it."""

from collections.abc import Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from hfjax.data.images.decode import pillow
from hfjax.utils.command_errors import import_optional

if TYPE_CHECKING:
    from PIL.Image import Image

IGNORED = 255  # the label of ignored pixels
FILL = (124, 116, 104)  # the mean colour of ImageNet: about 0 after normalisation
Box = tuple[int, int, int, int]  # left, top, right, bottom


def to_array(image: "Image") -> np.ndarray:
    """Return the pixels [height, width, 3]."""
    return np.asarray(image, np.uint8)


def crop_and_resize(image: "Image", box: Box, size: int) -> "Image":
    """Return a box of an image, cropped and then resized to a square."""
    return image.crop(box).resize((size, size), pillow().Resampling.BILINEAR)


def size_by_shorter_side(width: int, height: int, size: int) -> tuple[int, int]:
    """Return width and height when the shorter side becomes `size`.

    >>> size_by_shorter_side(500, 375, 256)
    (341, 256)
    """
    if width <= height:
        return size, size * height // width
    return size * width // height, size


def size_by_longer_side(width: int, height: int, size: float) -> tuple[int, int]:
    """Return width and height when the longer side becomes `size`, at least 1.

    >>> size_by_longer_side(500, 375, 256)
    (256, 192)
    """
    scale = size / max(width, height)
    return max(round(width * scale), 1), max(round(height * scale), 1)


def center_box(width: int, height: int, size: int) -> Box:
    """Return the central square, as torchvision's CenterCrop.

    >>> center_box(341, 256, 224)
    (58, 16, 282, 240)
    """
    left, top = round((width - size) / 2), round((height - size) / 2)
    return left, top, left + size, top + size


def resize_and_crop(image: "Image", scaled_size: tuple[int, int], box: Box) -> "Image":
    """Return a box of an image resized to `scaled_size`; the rest is not computed."""
    left, top, right, bottom = box
    x, y = image.width / scaled_size[0], image.height / scaled_size[1]
    source_box = left * x, top * y, min(right * x, image.width), min(bottom * y, image.height)
    return image.resize((right - left, bottom - top), pillow().Resampling.BILINEAR, box=source_box)


def resize_labels(
    labels: np.ndarray, scaled_size: tuple[int, int], box: Box, flip: bool = False
) -> np.ndarray:
    """Return a box of labels resized to `scaled_size`, by nearest neighbour."""
    left, top, right, bottom = box
    row_indices = _nearest_indices(top, bottom, labels.shape[0], scaled_size[1])
    column_indices = _nearest_indices(left, right, labels.shape[1], scaled_size[0])
    return labels.take(row_indices, 0).take(column_indices[::-1] if flip else column_indices, 1)


def _nearest_indices(start: int, stop: int, old_size: int, new_size: int) -> np.ndarray:
    return (2 * np.arange(start, stop) + 1) * old_size // (2 * new_size)


def flip_horizontal(image: "Image") -> "Image":
    """Return an image flipped horizontally."""
    return image.transpose(pillow().Transpose.FLIP_LEFT_RIGHT)


def pad_image(image: "Image", size: int) -> "Image":
    """Return a square with the image at its top left, padded with the mean colour."""
    if image.size == (size, size):
        return image
    square = pillow().new("RGB", (size, size), FILL)
    square.paste(image, (0, 0))
    return square


def pad_labels(labels: np.ndarray, size: int) -> np.ndarray:
    """Return a square with the labels at its top left, padded with the ignored label."""
    if labels.shape == (size, size):
        return labels
    square = np.full((size, size), IGNORED, labels.dtype)
    square[: labels.shape[0], : labels.shape[1]] = labels
    return square


def adjust_colors(image: "Image", changes: Iterable[tuple[str, float]]) -> "Image":
    """Return an image with changed colours, as torchvision's ColorJitter on Pillow's images."""
    for name, factor in changes:
        image = getattr(_enhance_module(), name)(image).enhance(factor)
    return image


@cache
def _enhance_module() -> Any:
    return import_optional("PIL.ImageEnhance", "changing colours", "images")
