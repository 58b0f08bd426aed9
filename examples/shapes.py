"""DeepLabV3 finds circles, squares and triangles, under DDP on 8 fake CPU devices.

    python examples/shapes.py                     # a minute on two cores
    python examples/shapes.py --out shapes.png    # where the picture goes; else a folder of its own

The example draws its images of 48 x 48 pixels itself: shapes on a background, with much noise.
While it trains it prints the loss and how many pixels are right; then, of images that it has not
seen, who is taken for whom and the intersection over union of each class. The last line is the
name of a picture of images, truth and prediction.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import optax

import hfjax
from hfjax.models.vision.deeplab import DeepLab, DeepLabConfig
from hfjax.models.vision.losses import confusion_counts, segmentation_eval_loss, segmentation_loss
from hfjax.trainer.tasks.images import intersection_over_union
from hfjax.utils.tables import align

hfjax.simulate_devices(8)  # unless there are 8 GPUs

CLASSES = ("background", "circle", "square", "triangle")
COLOURS = ("#dddddd", "#4477aa", "#ee6677", "#228833")
SIZE, ROWS, UNSEEN = 48, 32, 8  # pixels of a side, images of a batch, batches to evaluate

# A quarter of each side, 12 x 12 positions: enough for shapes of 16 pixels and more.
CONFIG = DeepLabConfig.preset(
    "deeplabv3-tiny",
    classes=len(CLASSES),
    block="basic",
    widths=(8, 16, 32),
    output_stride=4,
    pyramid=32,
    dropout=0.1,
)


def inside(kind: int, radius: float, column: float, row: float) -> np.ndarray:
    """Return which pixels are inside a shape with this centre [SIZE, SIZE]."""
    down, right = np.mgrid[:SIZE, :SIZE] + 0.5
    down, right = down - row, right - column
    if CLASSES[kind] == "circle":
        return np.hypot(down, right) < radius
    if CLASSES[kind] == "square":
        return np.maximum(abs(down), abs(right)) < 0.85 * radius
    return (down < 0.8 * radius) & (abs(right) < 0.6 * (down + radius))


def drawn(*seed: int) -> dict[str, np.ndarray]:
    """Return a batch: images of bytes [ROWS, SIZE, SIZE, 3], and the class of each pixel."""
    rng = np.random.default_rng(seed)
    image = np.empty((ROWS, SIZE, SIZE, 3))
    label = np.zeros((ROWS, SIZE, SIZE), np.int32)
    for pixels, classes in zip(image, label, strict=True):
        pixels[:] = rng.uniform(0, 110, 3)  # shapes are lighter
        for kind in rng.integers(1, len(CLASSES), rng.integers(1, 6)):
            where = inside(kind, rng.uniform(8, 13), *rng.uniform(8, SIZE - 8, 2))
            if not classes[where].any():  # no shape covers another
                pixels[where], classes[where] = rng.uniform(110, 255, 3), kind
    noisy = image + rng.normal(0, 25, image.shape)
    return {"image": noisy.clip(0, 255).astype(np.uint8), "label": label}


def picture(batch: dict[str, np.ndarray], found: np.ndarray, out: Path, columns: int = 8) -> None:
    """Write a picture: in each column an image, what it shows, and what the model sees there."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(1.3 * columns, 4.4), layout="constrained")
    axes = figure.subplots(3, columns)
    shown = {"image": batch["image"], "truth": batch["label"], "prediction": found}
    how = {"cmap": ListedColormap(COLOURS), "vmin": 0, "vmax": len(CLASSES) - 1}
    for line, (name, images) in zip(axes, shown.items(), strict=True):
        line[0].set_ylabel(name)
        for axis, x in zip(line, images, strict=False):
            axis.imshow(x, interpolation="nearest", **({} if name == "image" else how))
            axis.set(xticks=[], yticks=[])
    patches = [Patch(color=c, label=name) for c, name in zip(COLOURS, CLASSES, strict=True)]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(CLASSES), frameon=False)
    figure.savefig(out, dpi=120)


def main(steps: int = 200, out: Path | None = None) -> float:
    rate = hfjax.lr_schedule(1e-2, warmup_steps=steps // 10, steps=steps)
    init = lambda rngs: DeepLab(CONFIG, rngs=rngs)
    layout = hfjax.layout(init, optax.adam(rate), hfjax.make_mesh(data=8), hfjax.DDP)
    step, state = hfjax.train_step(layout, segmentation_loss), hfjax.init(layout)
    for number in range(steps):
        state, metrics = step(state, drawn(0, number))
        if number % 20 == 19:
            told = f"loss {metrics['loss']:.3f}, {metrics['pixels']:.1%} of the pixels are right"
            print(f"step {number + 1}: {told}", flush=True)

    evaluate = hfjax.eval_step(
        layout, segmentation_eval_loss
    )  # each batch tells the counts of its own pixels
    seen = [evaluate(state, drawn(1, number)) for number in range(UNSEEN)]
    counts = np.sum([confusion_counts(metrics["confusion"], ROWS) for metrics in seen], axis=0)
    union = [x or 0.0 for x in intersection_over_union(counts)]
    of_each = zip(CLASSES, counts, union, strict=True)
    lines = [[name, *map(str, row), f"{x:.1%}"] for name, row, x in of_each]
    print(f"\n{UNSEEN * ROWS} images that it has not seen: pixels of (line) taken for (column)")
    print("\n".join(align([["", *CLASSES, "IoU"], *lines], numbers=range(1, 6))))
    mean = float(np.mean(union))
    print(f"mean IoU {mean:.1%}")

    batch = drawn(1, 0)
    found = np.asarray(hfjax.predict_step(layout)(state, batch)["out"]).argmax(-1)
    out = out or Path(tempfile.mkdtemp(prefix="hfjax-")) / "shapes.png"
    picture(batch, found, out)
    print(out)
    return mean


if __name__ == "__main__":
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, help="a name that ends in .png")
    main(**vars(parser.parse_args()))
