"""Folders of small images, drawn: of classes, and with masks."""

from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("cat", "dog", "owl")


def smooth(seed: int, width: int, height: int) -> Image.Image:
    """Return an image whose neighbouring pixels are alike, as those of photographs."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)


def sides(seed: int) -> tuple[int, int]:
    """Return a width and a height."""
    width, height = np.random.default_rng([seed, 1]).integers(20, 60, 2).tolist()
    return width, height


def photos(folder: Path, each: int = 5, classes: tuple[str, ...] = CLASSES) -> Path:
    """Make a folder of classes; half of the files are JPEG."""
    for c, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(each):
            kind = ("jpg", "png")[i % 2]
            smooth(10 * c + i, *sides(10 * c + i)).save(folder / name / f"{i}.{kind}")
    return folder


def street(folder: Path, count: int = 7, classes: int = 4) -> Path:
    """Make a folder of images and masks; masks have a palette, and ignored pixels at the left."""
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for i in range(count):
        width, height = sides(i)
        smooth(i, width, height).save(folder / "images" / f"{i}.jpg")
        labels = np.arange(width * height).reshape(height, width) // 7 % classes
        labels[:, :2] = 255
        mask = Image.fromarray(labels.astype(np.uint8))
        mask.putpalette(np.random.default_rng(i).integers(0, 256, 768, np.uint8).tobytes())
        mask.save(folder / "masks" / f"{i}.png")
    return folder
