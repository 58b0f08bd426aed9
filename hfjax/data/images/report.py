"""What `hfjax data FOLDER` tells of images: classes, sizes, modes, labels, and what is broken."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hfjax.data.images.dataset import ImageSet
from hfjax.data.images.decode import with_mode
from hfjax.data.images.pixels import IGNORED
from hfjax.utils.tables import aligned, named

Tell = Callable[[str, int, int], None]  # what, bytes read, of how many
LINES = 50  # of classes
LABELS = 256


@dataclass(frozen=True)
class Looked:
    """What was found of one image: mode, size, pixels of each label, or what is wrong with it."""

    mode: str = ""
    size: tuple[int, int] = (0, 0)
    labels: np.ndarray | None = None
    fault: str = ""


@dataclass(frozen=True)
class ImageReport:
    """What all images of a set are. Of masks `images` and `pixels` count by label, 255 the last."""

    data: ImageSet
    sizes: np.ndarray  # [n, 2], by area
    modes: Counter[str]
    images: np.ndarray  # of each class
    pixels: np.ndarray | None  # of each label
    faults: list[str]


def examined(data: ImageSet, tell: Tell | None = None) -> ImageReport:
    """Return what all images of a set are; each is decoded."""
    found: list[Looked] = []
    read, total = 0, sum(data.sizes)
    for number, looked in enumerate(data.each(lambda index: _looked(data, index))):
        found.append(looked)
        read += data.sizes[number]
        if tell is not None:
            tell(f"images of {named(data.directory.name)}", read, total)
    whole = [looked for looked in found if not looked.fault]
    sizes = np.array([looked.size for looked in whole], np.int64).reshape(-1, 2)
    labels = [looked.labels for looked in whole if looked.labels is not None]
    pixels = sum(labels, np.zeros(LABELS, np.int64)) if data.kind == "masks" else None
    if pixels is None:
        images = np.bincount(data.labels, minlength=len(data.classes))
    else:
        images = sum((n > 0 for n in labels), np.zeros(LABELS, np.int64))
    return ImageReport(
        data,
        sizes[np.argsort(sizes.prod(1), kind="stable")],
        Counter(looked.mode for looked in whole),
        images,
        pixels,
        [looked.fault for looked in found if looked.fault],
    )


def _looked(data: ImageSet, index: int) -> Looked:
    try:
        mode, image = with_mode(data.path(index), data.most_pixels)
        if data.kind == "classes":
            return Looked(mode, image.size)
        mask = data.mask(index)
        data.check_mask(index, image, mask)
        return Looked(mode, image.size, np.bincount(mask.ravel(), minlength=LABELS))
    except (ValueError, OSError) as wrong:
        return Looked(fault=str(wrong))


def lines(report: ImageReport) -> list[str]:
    """Return the lines that tell a report."""
    data = report.data
    table = _classes(report) if report.pixels is None else _labels(report)
    head, *rows = aligned(table, numbers=range(1, len(table[0])))
    told = [str(data), "", head, *rows, ""]
    if len(data.classes) > LINES:
        told.insert(-1, f"… {len(data.classes) - LINES} more")
    told += [*_sizes(report), *_modes(report)]
    if data.passed_over:
        told.append(f"other files, not read: {data.passed_over}")
    if report.faults:
        told.append(f"cannot be used: {len(report.faults)}")
        told += [f"  {fault}" for fault in report.faults]
    return told


def _classes(report: ImageReport) -> list[list[str]]:
    counts = zip(report.data.classes, report.images, strict=True)
    rows = [[named(name), f"{count:,}"] for name, count in counts]
    return [["class", "images"], *rows[:LINES]]


def _labels(report: ImageReport) -> list[list[str]]:
    assert report.pixels is not None
    names = dict(enumerate(map(named, report.data.classes[:LINES]))) | {IGNORED: "(ignored)"}
    total = max(int(report.pixels.sum()), 1)
    rows = [
        [name, str(n), f"{report.images[n]:,}", f"{report.pixels[n] / total:.1%}"]
        for n, name in names.items()
    ]
    return [["class", "label", "images", "of all pixels"], *rows]


def _sizes(report: ImageReport) -> list[str]:
    if not len(report.sizes):
        return []
    middle = len(report.sizes) // 2
    shown = {"smallest": 0, "median": middle, "largest": -1}
    told = [f"{name} {report.sizes[i][0]} x {report.sizes[i][1]}" for name, i in shown.items()]
    return [f"sizes: {', '.join(told)}"]


def _modes(report: ImageReport) -> list[str]:
    told = [f"{mode} {count:,}" for mode, count in report.modes.most_common()]
    return [f"modes: {', '.join(told)}"] if told else []
