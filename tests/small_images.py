"""Folders of small images, drawn: of classes, and with masks."""

import struct
import zlib
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


def png(levels: np.ndarray, bits: int) -> bytes:
    """Return a PNG of levels [height, width, channels] of so many bits, which Pillow cannot write.

    One channel is grey, two have alpha, three are colours.
    """
    height, width, channels = levels.shape
    of_part = lambda name, data: (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    )
    kind = {1: 0, 2: 4, 3: 2, 4: 6}[channels]
    head = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    rows = b"".join(b"\0" + row for row in packed(levels, bits))
    parts = {b"IHDR": head, b"IDAT": zlib.compress(rows), b"IEND": b""}
    return b"\x89PNG\r\n\x1a\n" + b"".join(of_part(*part) for part in parts.items())


def packed(levels: np.ndarray, bits: int) -> list[bytes]:
    """Return the rows of an image, each level in so many bits, the highest first."""
    each = levels.reshape(len(levels), -1, 1) >> np.arange(bits)[::-1] & 1
    return [row.tobytes() for row in np.packbits(each.reshape(len(levels), -1), 1)]


def tiff(levels: np.ndarray, bits: int) -> bytes:
    """Return a TIFF of grey levels [height, width, 1], or of three colours, big-endian."""
    height, width, channels = levels.shape
    data = b"".join(packed(levels, bits))
    begin = 8 + 2 + 9 * 12 + 4 + 2 * channels
    short = lambda tag, x: struct.pack(">HHIHH", tag, 3, 1, x, 0)
    depth = struct.pack(">HHII", 258, 3, 3, begin - 6) if channels == 3 else short(258, bits)
    entries = [
        *(short(256, width), short(257, height), depth, short(259, 1)),
        *(short(262, 2 if channels == 3 else 1), struct.pack(">HHII", 273, 4, 1, begin)),
        *(short(277, channels), short(278, height), struct.pack(">HHII", 279, 4, 1, len(data))),
    ]
    head = b"MM" + struct.pack(">HIH", 42, 8, len(entries))
    return head + b"".join(entries) + bytes(4) + struct.pack(">H", bits) * channels + data
