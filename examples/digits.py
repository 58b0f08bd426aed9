"""A small ResNet reads handwritten digits, under FSDP on 8 fake CPU devices.

    python examples/digits.py             # half a minute on two cores; needs scikit-learn
    python examples/digits.py --epochs 2

It prints where each array lies; after each epoch the accuracy on images that are not trained on;
where rows of the batch meet (in each BatchNorm, whose statistics are those of all rows, not of one
device's) and what is sent for it; and how far the first losses are from those of one device. The
1,797 images of 8 x 8 pixels come with scikit-learn: nothing is downloaded.
"""

import argparse
from typing import Any

import jax
import numpy as np
import optax

import hfjax
from hfjax.models.vision.losses import classification_loss
from hfjax.models.vision.resnet import ResNet, ResNetConfig

hfjax.simulate_devices(8)  # unless there are 8 GPUs

ROWS, HELD_OUT, COMPARED = 64, 360, 10
CONFIG = ResNetConfig.preset("resnet-tiny")  # the stem keeps 8 x 8 pixels; two blocks


def digits() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return what to train on and what is held out, as {"image": [rows, 8, 8, 3], "label"}."""
    from sklearn.datasets import load_digits

    data: Any = load_digits()
    grey = (data.images / 8 - 1).astype(np.float32)  # from -1 to 1
    found = {"image": np.repeat(grey[..., None], 3, axis=3), "label": data.target.astype(np.int32)}
    order = np.random.default_rng(0).permutation(len(grey))
    part = lambda rows: {name: x[rows] for name, x in found.items()}
    return part(order[HELD_OUT:]), part(order[:HELD_OUT])


def batches(data: dict[str, np.ndarray], epoch: int) -> list[dict[str, np.ndarray]]:
    """Return the batches of an epoch; the rows that fill no batch are left out."""
    order = np.random.default_rng([1, epoch]).permutation(len(data["label"]))
    starts = range(0, len(order) - ROWS + 1, ROWS)
    return [{name: x[order[i : i + ROWS]] for name, x in data.items()} for i in starts]


def trainer(mesh: jax.sharding.Mesh, strategy: hfjax.Strategy, steps: int) -> Any:
    """Return a step of training on a mesh, and the state that it begins with."""
    rate = hfjax.lr_schedule(1e-2, warmup_steps=steps // 10, steps=steps)
    init = lambda rngs: ResNet(CONFIG, rngs=rngs)
    layout = hfjax.layout(init, optax.adamw(rate, weight_decay=1e-2), mesh, strategy)
    return hfjax.train_step(layout, classification_loss), hfjax.init(layout, seed=0)


def main(epochs: int = 10) -> tuple[float, float]:
    train, unseen = digits()
    steps = epochs * len(batches(train, 0))
    split = hfjax.FSDP.edit(replicate_below=500)  # FSDP itself splits arrays of 16384 numbers
    step, state = trainer(hfjax.make_mesh(fsdp=8), split, steps)
    evaluate = hfjax.eval_step(step.layout, classification_loss)
    print(step.layout)
    losses, accuracy = [], 0.0
    for epoch in range(epochs):
        for batch in batches(train, epoch):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        accuracy = float(evaluate(state, unseen)["top1"])
        told = f"loss {losses[-1]:.4f}, {accuracy:.1%} of {HELD_OUT} are right"
        print(f"epoch {epoch + 1}: {told}", flush=True)
    print(f"\n{step.batch_comms}\n")

    one, state = trainer(hfjax.make_mesh(devices=jax.devices()[:1]), hfjax.DDP, steps)
    of_one = []
    for batch in batches(train, 0)[:COMPARED]:
        state, metrics = one(state, batch)
        of_one.append(float(metrics["loss"]))
    apart = max(abs(a - b) for a, b in zip(of_one, losses, strict=False))
    told = f"{losses[COMPARED - 1]:.6f} on eight devices, {of_one[-1]:.6f} on one"
    print(f"loss of step {COMPARED}: {told}; the first {COMPARED} differ by at most {apart:.1e}")
    return accuracy, apart


if __name__ == "__main__":
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    parser.add_argument("--epochs", type=int, default=10)
    main(**vars(parser.parse_args()))
