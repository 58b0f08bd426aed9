"""The image report of `hfjax data FOLDER`: classes, sizes, modes, labels and broken files."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hfjax.data.images.dataset import ImageSet
from hfjax.data.images.decode import read_with_mode
from hfjax.data.images.pixels import IGNORED
from hfjax.utils.tables import align, quote

Progress = Callable[[str, int, int], None]  # activity, bytes read, total bytes
MAX_CLASSES = 50  # classes listed
LABELS = 256


@dataclass(frozen=True)
class ImageInfo:
    """The properties of one image: mode, size, pixels of each label, or its error."""

    mode: str = ""
    size: tuple[int, int] = (0, 0)
    labels: np.ndarray | None = None
    fault: str = ""


@dataclass(frozen=True)
class ImageReport:
    """Statistics of a set's images. For masks, `image_counts` and `pixel_counts` are by label."""

    data: ImageSet
    sizes: np.ndarray  # [n, 2], by area
    modes: Counter[str]
    image_counts: np.ndarray  # of each class
    pixel_counts: np.ndarray | None  # of each label
    faults: list[str]


def examine(data: ImageSet, progress: Progress | None = None) -> ImageReport:
    """Return the statistics of a set; each image is decoded."""
    infos: list[ImageInfo] = []
    bytes_read, bytes_total = 0, sum(data.sizes)
    for number, info in enumerate(data.each(lambda index: _examine_image(data, index))):
        infos.append(info)
        bytes_read += data.sizes[number]
        if progress is not None:
            progress(f"images of {quote(data.directory.name)}", bytes_read, bytes_total)
    readable = [info for info in infos if not info.fault]
    sizes = np.array([info.size for info in readable], np.int64).reshape(-1, 2)
    labels = [info.labels for info in readable if info.labels is not None]
    pixel_counts = sum(labels, np.zeros(LABELS, np.int64)) if data.kind == "masks" else None
    if pixel_counts is None:
        image_counts = np.bincount(data.labels, minlength=len(data.classes))
    else:
        image_counts = sum((n > 0 for n in labels), np.zeros(LABELS, np.int64))
    return ImageReport(
        data,
        sizes[np.argsort(sizes.prod(1), kind="stable")],
        Counter(info.mode for info in readable),
        image_counts,
        pixel_counts,
        [info.fault for info in infos if info.fault],
    )


def _examine_image(data: ImageSet, index: int) -> ImageInfo:
    try:
        mode, image = read_with_mode(data.path(index), data.most_pixels)
        if data.kind == "classes":
            return ImageInfo(mode, image.size)
        mask = data.mask(index)
        data.check_mask(index, image, mask)
        return ImageInfo(mode, image.size, np.bincount(mask.ravel(), minlength=LABELS))
    except (ValueError, OSError) as error:
        return ImageInfo(fault=str(error))


def format_report(report: ImageReport) -> list[str]:
    """Return a report as lines of text."""
    data = report.data
    table = _class_table(report) if report.pixel_counts is None else _label_table(report)
    head, *entries = align(table, numbers=range(1, len(table[0])))
    lines = [str(data), "", head, *entries, ""]
    if len(data.classes) > MAX_CLASSES:
        lines.insert(-1, f"… {len(data.classes) - MAX_CLASSES} more")
    lines += [*_size_lines(report), *_mode_lines(report)]
    if data.passed_over:
        lines.append(f"other files, not read: {data.passed_over}")
    if report.faults:
        lines.append(f"cannot be used: {len(report.faults)}")
        lines += [f"  {fault}" for fault in report.faults]
    return lines


def _class_table(report: ImageReport) -> list[list[str]]:
    counts = zip(report.data.classes, report.image_counts, strict=True)
    entries = [[quote(name), f"{count:,}"] for name, count in counts]
    return [["class", "images"], *entries[:MAX_CLASSES]]


def _label_table(report: ImageReport) -> list[list[str]]:
    assert report.pixel_counts is not None
    names = dict(enumerate(map(quote, report.data.classes[:MAX_CLASSES]))) | {IGNORED: "(ignored)"}
    num_pixels = max(int(report.pixel_counts.sum()), 1)
    entries = [
        [name, str(n), f"{report.image_counts[n]:,}", f"{report.pixel_counts[n] / num_pixels:.1%}"]
        for n, name in names.items()
    ]
    return [["class", "label", "images", "of all pixels"], *entries]


def _size_lines(report: ImageReport) -> list[str]:
    if not len(report.sizes):
        return []
    middle = len(report.sizes) // 2
    positions = {"smallest": 0, "median": middle, "largest": -1}
    sizes = [f"{name} {report.sizes[i][0]} x {report.sizes[i][1]}" for name, i in positions.items()]
    return [f"sizes: {', '.join(sizes)}"]


def _mode_lines(report: ImageReport) -> list[str]:
    modes = [f"{mode} {count:,}" for mode, count in report.modes.most_common()]
    return [f"modes: {', '.join(modes)}"] if modes else []
