"""Images per second and core: hfjax's loader beside a plain loop over Pillow that does the same.

JPEGs of 500 x 375 pixels are drawn in a temporary folder, about 90 kB each, as ImageNet's; each has
several names, so that a pass is long. Once over all of them, in turn: by a plain loop (open,
convert, cut, resize, flip, into a batch), one process for each core, and by an `ImageLoader` with
one thread for each core. Writes one row for each case to results/image_decoding.md.

    python -m benchmarks.image_decoding [--images N] [--rounds N] [--only NAME]
"""

import argparse
import math
import multiprocessing
import os
import platform
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import PIL
from PIL import Image

from benchmarks.result_rows import put
from hfjax.images import ImageLoader, ImageSet
from hfjax.images.image_set import cores

RESULTS = Path(__file__).parent / "results" / "image_decoding.md"
GOAL = 0.85
ROWS, NAMES = 16, 8
WIDTH, HEIGHT = 500, 375
COLUMNS = (
    *("case", "cores", "plain, images/s and core", "hfjax, images/s and core", "ratio"),
    *("plain, CPU ms an image", "hfjax, CPU ms an image", "CPU ratio", "load"),
)
HEAD = f"""# Decoding of images

`python -m benchmarks.image_decoding` (last rows: {{date}}). JPEGs of {WIDTH} x {HEIGHT} in batches
of {ROWS}, with all transforms. *plain* is a loop over Pillow that does the same, a process for each
core; *hfjax* an `ImageLoader` in one process with a thread for each core. Both go over all images
once, in turn; a ratio is hfjax's speed over that of the plain loop, the median of rounds. CPU time
counts all threads and feels less of what else runs on the machine. *load* is how many programs
waited for cores in the last minute: where it is well above *cores*, others ran, speeds are too low
and ratios on the clock uncertain. The goal is {GOAL}.
"""


def draw(folder: Path, count: int, masks: bool) -> None:
    """Write images that compress like photographs: smooth, with some noise."""
    places = ("images", "masks") if masks else ("a", "b")
    for name in places:
        (folder / name).mkdir(parents=True)
    for i in range(count):
        random_ = np.random.default_rng(i)
        coarse = Image.fromarray(random_.integers(0, 256, (12, 16, 3), np.uint8))
        smooth = np.asarray(coarse.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.float32)
        noisy = smooth + random_.normal(0, 12, (HEIGHT, WIDTH, 1))
        image = Image.fromarray(noisy.clip(0, 255).astype(np.uint8))
        linked(folder / (places[0] if masks else places[i % 2]) / f"{i}.jpg", image)
        if masks:
            labels = random_.integers(0, 21, (12, 16), np.uint8)
            big = Image.fromarray(labels).resize((WIDTH, HEIGHT), Image.Resampling.NEAREST)
            linked(folder / "masks" / f"{i}.png", big)


def linked(path: Path, image: Image.Image) -> None:
    """Write an image under several names; the file is there once."""
    image.save(path, quality=88)  # of JPEG
    for number in range(1, NAMES):
        os.link(path, path.with_name(f"{number}-{path.name}"))


# -- the plain loop -----------------------------------------------------------------------


def plain_train(path: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    image = Image.open(path).convert("RGB")
    width, height = image.size
    box = 0, 0, width, height
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            box = left, top, left + w, top + h
            break
    image = image.crop(box).resize((size, size), Image.Resampling.BILINEAR)
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.asarray(image), np.zeros((), np.int32)


def plain_evaluate(path: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    image = Image.open(path).convert("RGB")
    short = round(size * 256 / 224)
    scale = short / min(image.size)
    w, h = int(image.width * scale), int(image.height * scale)
    left, top = (w - size) // 2, (h - size) // 2
    box = left / scale, top / scale, (left + size) / scale, (top + size) / scale
    image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return np.asarray(image), np.zeros((), np.int32)


def plain_masks(path: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    image = Image.open(path).convert("RGB")
    mask = Image.open(path.replace("images", "masks").replace(".jpg", ".png"))
    scale = size / max(image.size) * random.uniform(0.5, 2)
    whole = round(image.width * scale), round(image.height * scale)
    w, h = min(whole[0], size), min(whole[1], size)
    left, top = random.randint(0, whole[0] - w), random.randint(0, whole[1] - h)
    box = left / scale, top / scale, (left + w) / scale, (top + h) / scale
    box = box[0], box[1], min(box[2], image.width), min(box[3], image.height)
    part = image.resize((w, h), Image.Resampling.BILINEAR, box=box)
    labels = mask.resize((w, h), Image.Resampling.NEAREST, box=box)
    if random.random() < 0.5:
        part = part.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        labels = labels.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    pixels = np.full((size, size, 3), 124, np.uint8)
    square = np.full((size, size), 255, np.int32)
    pixels[:h, :w], square[:h, :w] = np.asarray(part), np.asarray(labels)
    return pixels, square


def plain_loop(case: str, paths: list[str], size: int) -> None:
    """Go over images once, in batches."""
    read = CASES[case].plain
    for start in range(0, len(paths), ROWS):
        rows = [read(path, size) for path in paths[start : start + ROWS]]
        _ = [np.stack(column) for column in zip(*rows, strict=True)]


class Case(NamedTuple):
    """What is measured: the plain function of an image, its size, and whether hfjax trains."""

    plain: Callable[[str, int], tuple[np.ndarray, np.ndarray]]
    size: int
    train: bool
    masks: bool


CASES = {
    "classes, training, 224": Case(plain_train, 224, True, False),
    "classes, evaluation, 224": Case(plain_evaluate, 224, False, False),
    "masks, training, 384": Case(plain_masks, 384, True, True),
}


# -- one beside the other -----------------------------------------------------------------


class Took(NamedTuple):
    """Seconds on the clock, and of processors."""

    wall: float
    cpu: float


def took(run: Callable[[], float]) -> Took:
    """Return what a run takes; it returns the processor time that other processes took for it."""
    start, own = time.perf_counter(), time.process_time()
    others = run()
    return Took(time.perf_counter() - start, time.process_time() - own + others)


def in_a_process(case: str, paths: list[str], size: int) -> float:
    """Run the plain loop; return its processor time."""
    start = resource.getrusage(resource.RUSAGE_SELF)
    plain_loop(case, paths, size)
    end = resource.getrusage(resource.RUSAGE_SELF)
    return end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime


def measured(name: str, rounds: int, workers: int, place: Path) -> tuple[str, ...]:
    """Return the cells of one case."""
    case = CASES[name]
    data = ImageSet(place, classes=21 if case.masks else None)
    count, paths = len(data), [str(data.path(i)) for i in range(len(data))]
    random.Random(0).shuffle(paths)
    loader = ImageLoader(data, ROWS, case.size, case.train, epochs=1, threads=workers)
    parts = [paths[i::workers] for i in range(workers)]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        each = lambda: [pool.submit(in_a_process, name, part, case.size) for part in parts]
        plain = lambda: sum(future.result() for future in each())
        ours = lambda: float(sum(0 for _ in loader.rewind()))
        for run in (plain, ours):  # so that files are in memory and processes have started
            run()
        seen = [(took(plain), took(ours)) for _ in range(rounds)]
    speed = lambda i: statistics.median(count / times[i].wall for times in seen) / workers
    cpu = lambda i: 1e3 * statistics.median(times[i].cpu for times in seen) / count
    ratio = statistics.median(a.wall / b.wall for a, b in seen)
    of_cpu = statistics.median(a.cpu / b.cpu for a, b in seen)
    return (
        *(name, str(workers), f"{speed(0):.0f}", f"{speed(1):.0f}", f"**{ratio:.2f}**"),
        *(f"{cpu(0):.2f}", f"{cpu(1):.2f}", f"{of_cpu:.2f}"),
        f"{os.getloadavg()[0]:.0f}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Images per second and core beside plain Pillow.")
    parser.add_argument("--images", type=int, default=256, help="files")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", help="one case", choices=list(CASES))
    parser.add_argument("--dry", action="store_true", help="writes no result")
    given = parser.parse_args()
    versions = (
        f"Pillow {PIL.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores"
    )
    with tempfile.TemporaryDirectory() as folder:
        for masks in (False, True):
            draw(Path(folder, str(masks)), given.images, masks)
        for name in [given.only] if given.only else CASES:
            for workers in sorted({1, cores()}):
                place = Path(folder, str(CASES[name].masks))
                row = measured(name, given.rounds, workers, place)
                print(*row, sep=" | ", flush=True)
                if not given.dry:
                    put(RESULTS, f"{HEAD}\n{versions}.\n", COLUMNS, row)


if __name__ == "__main__":
    main()
