"""Decode one image file with Pillow: upright and RGB. Errors name its path."""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hfjax.utils.command_errors import import_optional
from hfjax.utils.tables import human, quote

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 1 << 26  # of one image, 192 MiB as RGB; Pillow warns from a third more on
PLAIN = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBX", "RGBa", "CMYK", "YCbCr", "HSV")
LABELS = ("P", "L", "1")
SIXTEEN = "16 or 32 bits for a level"
FULL = 255  # the highest 8-bit level
FEWER_BITS, SIXTEEN_BITS = re.compile(r"L;([24])"), re.compile(r";16[BLN]")  # of Pillow's rawmodes
GONE = (
    "the image was there when the folder was opened, and is gone (broken='skip' skips none such). "
    "Put it back, or begin anew without it"
)
PHOTOMETRIC = 262  # TIFF tag: 0 where 0 is white
ORIENTATION = 274  # EXIF tag: how to rotate the stored image
EXIF_TRANSPOSES = (
    *("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE"),
    *("ROTATE_270", "TRANSVERSE", "ROTATE_90"),
)


class DamagedImageError(ValueError):
    """Raised for a damaged file or one that is no image: it may be skipped."""


@functools.cache
def pillow() -> Any:
    """Return Pillow's Image module; if it is missing, the error says how to install it."""
    return import_optional("PIL.Image", "reading images", "images")


def raise_pixel_limit(most_pixels: int) -> None:
    """Raise Pillow's own limit if `most_pixels` is larger; it applies to the whole program."""
    image = pillow()
    if image.MAX_IMAGE_PIXELS is not None and most_pixels > image.MAX_IMAGE_PIXELS:
        image.MAX_IMAGE_PIXELS = most_pixels


def read_image(path: Path, most_pixels: int = MOST_PIXELS) -> "Image":
    """Return an image, upright and as RGB by Pillow's `convert`: transparency is dropped."""
    return read_with_mode(path, most_pixels)[1]


def read_with_mode(path: Path, most_pixels: int = MOST_PIXELS) -> "tuple[str, Image]":
    """Return the mode in which an image is stored, and the image."""
    with _open_image(path, most_pixels) as image:
        mode = image.mode
        if _max_level(image) > FULL:
            raise ValueError(_bit_depth_message(path, mode, SIXTEEN))
        return mode, _to_rgb(_load_upright(path, image), path)


def read_mask(path: Path, most_pixels: int = MOST_PIXELS) -> np.ndarray:
    """Return the labels of a mask: palette indices or grey levels."""
    with _open_image(path, most_pixels) as image:
        if image.mode not in LABELS:
            raise ValueError(
                f"{quote(path)} has mode {image.mode}: a mask has one label for each pixel, 0 to "
                "255. Write it as PNG with a palette (mode P) or in grey (mode L)."
            )
        if why := _label_problem(image):
            raise ValueError(
                f"{quote(path)} {why}: its labels would be others. Write it as PNG with a palette "
                "(mode P) or in grey (mode L)."
            )
        max_level = _max_level(image)
        levels = np.asarray(_load_upright(path, image), np.uint8)
        return (
            levels if max_level == FULL else np.rint(levels * (max_level / FULL)).astype(np.uint8)
        )


def _label_problem(image: "Image") -> str | None:
    """Return why a mask's pixels differ from those that were written, or None if they do not."""
    if image.format in ("JPEG", "MPO"):
        return "is a JPEG, which changes pixels"
    inverted = image.format == "TIFF" and getattr(image, "tag_v2", {}).get(PHOTOMETRIC) == 0
    return "is a TIFF in which 0 is white, and is read inverted" if inverted else None


def _max_level(image: "Image") -> int:
    """Return the highest level of an image that is opened but not loaded: 3 for 2 bits.

    Pillow stretches levels to 255, or drops the low byte of 16 bits; only its decoder mode shows
    this.
    """
    for decoder, _, _, args in getattr(image, "tile", []):
        rawmode, *more = args if isinstance(args, tuple) else (args,)
        if decoder in ("ppm", "ppm_plain") and more:
            return more[0]
        if match := FEWER_BITS.match(str(rawmode)):
            return 2 ** int(match[1]) - 1
        if SIXTEEN_BITS.search(str(rawmode)):
            return 2**16 - 1
    return FULL


@contextmanager
def _open_image(path: Path, most_pixels: int) -> Iterator["Image"]:
    """Yield an image of which only the header is read; refuse too many pixels."""
    library = pillow()
    try:
        image = library.open(path)
    except (library.DecompressionBombError, library.DecompressionBombWarning) as error:
        raise ValueError(_too_large_message(path, str(error), most_pixels)) from None
    except FileNotFoundError as error:
        raise FileNotFoundError(error.errno, GONE, str(path)) from None
    except Exception as error:
        raise _decode_error(path, error) from None
    with image:
        width, height = image.size
        if width * height > most_pixels:
            size = f"{width} x {height} pixels, {human(3 * width * height)} of memory"
            raise ValueError(_too_large_message(path, size, most_pixels))
        yield image


def _too_large_message(path: Path, reason: str, max_pixels: int) -> str:
    return (
        f"{quote(path)} is too large to be decoded ({reason}): at most {max_pixels} pixels are. "
        "Make it smaller or leave it out; if it is meant, give ImageSet(…, most_pixels=…)."
    )


def _decode_error(path: Path, error: Exception) -> Exception:
    """Return the error for a file that does not decode; OS errors are returned unchanged."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) is not None:
        return error
    message = quote(str(error)).replace(repr(str(path)), "it").rstrip(".")
    return DamagedImageError(
        f"{quote(path)} does not decode: {message or type(error).__name__}. Copy it again, or take "
        "it out; broken='skip' (--data.on-broken-image skip) takes the next image instead."
    )


def _load_upright(path: Path, image: "Image") -> "Image":
    """Return a loaded image, rotated as its EXIF says."""
    try:
        image.load()
    except Exception as error:
        raise _decode_error(path, error) from None
    transpose = _exif_transpose(image)
    return image if transpose is None else image.transpose(transpose)


def _exif_transpose(image: "Image") -> Any:
    try:
        tag = image.getexif().get(ORIENTATION, 1)
    except Exception:  # unreadable EXIF is ignored
        return None
    is_known = isinstance(tag, int) and 2 <= tag <= 8
    return getattr(pillow().Transpose, EXIF_TRANSPOSES[tag - 2]) if is_known else None


def _to_rgb(image: "Image", path: Path) -> "Image":
    if image.mode == "RGB":
        return image
    if image.mode == "P" and "transparency" in image.info:
        return image.convert("RGBA").convert("RGB")  # the same colours, without a warning
    if image.mode in PLAIN:
        return image.convert("RGB")
    bits = SIXTEEN if image.mode[0] in "IF" else "no colours of 8 bits"
    raise ValueError(_bit_depth_message(path, image.mode, bits))


def _bit_depth_message(path: Path, mode: str, bits: str) -> str:
    return (
        f"{quote(path)} has mode {mode}, {bits}: images of 8 bits are read. Convert it, and "
        "choose how its levels become 0 to 255."
    )
