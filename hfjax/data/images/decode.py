"""One image file decoded by Pillow: upright and RGB, or what is wrong with it, by its path."""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hfjax.utils.command_errors import optional
from hfjax.utils.tables import human, named

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 1 << 26  # of one image, 192 MiB as RGB; Pillow warns from a third more on
PLAIN = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV")
LABELS = ("P", "L", "1")
SIXTEEN = "16 or 32 bits for a level"
FULL = 255  # the highest level of 8 bits
FEWER_BITS, SIXTEEN_BITS = re.compile(r"L;([24])"), re.compile(r";16[BLN]")  # of Pillow's rawmodes
GONE = (
    "the image was there when the folder was opened, and is gone (broken='skip' skips none such). "
    "Put it back, or begin anew without it"
)
PHOTOMETRIC = 262  # of TIFF: 0 where 0 is white
ORIENTATION = 274  # of EXIF: how to turn what is stored
TURNS = (
    *("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE"),
    *("ROTATE_270", "TRANSVERSE", "ROTATE_90"),
)


class DamagedImageError(ValueError):
    """A file that is damaged, or no image: it may be skipped."""


@functools.cache
def pillow() -> Any:
    """Return Pillow's module of images, or say how to get it."""
    return optional("PIL.Image", "reading images", "images")


def allow(most_pixels: int) -> None:
    """Raise Pillow's own limit if a larger one is asked for; it holds for the whole program."""
    image = pillow()
    if image.MAX_IMAGE_PIXELS is not None and most_pixels > image.MAX_IMAGE_PIXELS:
        image.MAX_IMAGE_PIXELS = most_pixels


def read_image(path: Path, most_pixels: int = MOST_PIXELS) -> "Image":
    """Return an image upright and as RGB, by Pillow's `convert`: transparency is dropped."""
    return with_mode(path, most_pixels)[1]


def with_mode(path: Path, most_pixels: int = MOST_PIXELS) -> "tuple[str, Image]":
    """Return the mode in which an image is stored, and the image."""
    with _opened(path, most_pixels) as image:
        mode = image.mode
        if _highest(image) > FULL:
            raise ValueError(_not_of_8_bits(path, mode, SIXTEEN))
        return mode, _as_rgb(_loaded(path, image), path)


def read_mask(path: Path, most_pixels: int = MOST_PIXELS) -> np.ndarray:
    """Return the labels of a mask: the indices of a palette, or levels of grey."""
    with _opened(path, most_pixels) as image:
        if image.mode not in LABELS:
            raise ValueError(
                f"{named(path)} has mode {image.mode}: a mask has one label for each pixel, 0 to "
                "255. Write it as PNG with a palette (mode P) or in grey (mode L)."
            )
        if why := _other_labels(image):
            raise ValueError(
                f"{named(path)} {why}: its labels would be others. Write it as PNG with a palette "
                "(mode P) or in grey (mode L)."
            )
        most = _highest(image)
        levels = np.asarray(_loaded(path, image), np.uint8)
        return levels if most == FULL else np.rint(levels * (most / FULL)).astype(np.uint8)


def _other_labels(image: "Image") -> str | None:
    """Return why the pixels of a mask are not those that were written; None: they are."""
    if image.format in ("JPEG", "MPO"):
        return "is a JPEG, which changes pixels"
    inverted = image.format == "TIFF" and getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == 0
    return "is a TIFF in which 0 is white, and is read inverted" if inverted else None


def _highest(image: "Image") -> int:
    """Return the highest level of an image that is opened and not loaded: 3 of 2 bits.

    Pillow stretches levels to 255, or drops the low byte of 16 bits; only how it decodes tells.
    """
    for decoder, _, _, how in getattr(image, "tile", []):
        rawmode, *more = how if isinstance(how, tuple) else (how,)
        if decoder in ("ppm", "ppm_plain") and more:
            return more[0]
        if found := FEWER_BITS.match(str(rawmode)):
            return 2 ** int(found[1]) - 1
        if SIXTEEN_BITS.search(str(rawmode)):
            return 2**16 - 1
    return FULL


@contextmanager
def _opened(path: Path, most_pixels: int) -> Iterator["Image"]:
    """Give an image whose header is read, if its pixels are not too many."""
    library = pillow()
    try:
        image = library.open(path)
    except (library.DecompressionBombError, library.DecompressionBombWarning) as wrong:
        raise ValueError(_too_large(path, str(wrong), most_pixels)) from None
    except FileNotFoundError as wrong:
        raise FileNotFoundError(wrong.errno, GONE, str(path)) from None
    except Exception as wrong:
        raise _damaged(path, wrong) from None
    with image:
        width, height = image.size
        if width * height > most_pixels:
            size = f"{width} x {height} pixels, {human(3 * width * height)} of memory"
            raise ValueError(_too_large(path, size, most_pixels))
        yield image


def _too_large(path: Path, what: str, most: int) -> str:
    return (
        f"{named(path)} is too large to be decoded ({what}): at most {most} pixels are. Make it "
        "smaller or leave it out; if it is meant, give ImageSet(…, most_pixels=…)."
    )


def _damaged(path: Path, wrong: Exception) -> Exception:
    """Return the error of a file that does not decode; what the system says stays as it is."""
    if isinstance(wrong, MemoryError) or getattr(wrong, "errno", None) is not None:
        return wrong
    told = named(str(wrong)).replace(repr(str(path)), "it").rstrip(".")
    return DamagedImageError(
        f"{named(path)} does not decode: {told or type(wrong).__name__}. Copy it again, or take it "
        "out; broken='skip' (--data.broken skip) takes the next image instead."
    )


def _loaded(path: Path, image: "Image") -> "Image":
    """Return an image with its pixels, turned as its EXIF says."""
    try:
        image.load()
    except Exception as wrong:
        raise _damaged(path, wrong) from None
    turn = _turn(image)
    return image if turn is None else image.transpose(turn)


def _turn(image: "Image") -> Any:
    try:
        tag = image.getexif().get(ORIENTATION, 1)
    except Exception:  # EXIF that cannot be read says nothing
        return None
    known = isinstance(tag, int) and 2 <= tag <= 8
    return getattr(pillow().Transpose, TURNS[tag - 2]) if known else None


def _as_rgb(image: "Image", path: Path) -> "Image":
    if image.mode == "RGB":
        return image
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")  # the same colours, without a warning
    if image.mode in PLAIN:
        return image.convert("RGB")
    bits = SIXTEEN if image.mode[0] in "IF" else "no colours of 8 bits"
    raise ValueError(_not_of_8_bits(path, image.mode, bits))


def _not_of_8_bits(path: Path, mode: str, bits: str) -> str:
    return (
        f"{named(path)} has mode {mode}, {bits}: images of 8 bits are read. Convert it, and "
        "choose how its levels become 0 to 255."
    )
