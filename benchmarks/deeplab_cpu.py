"""A step of DeepLabV3 on two fake CPU devices: hfjax's, plain JAX's and torch's DDP.

Processor time of one step, of all devices and processes, one thread each. The programs take turns
in one run, begin with the same weights and read the same images. Writes results/deeplab_cpu.md.

    python -m benchmarks.deeplab_cpu                            # DeepLabV3-ResNet101
    python -m benchmarks.deeplab_cpu --preset regnet-y-400mf --side 224

torch is left out where it is not installed; plain JAX has DeepLabV3 only.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# One thread a device.
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false "
    "intra_op_parallelism_threads=1"
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import hfjax
from benchmarks import plain_deeplab
from benchmarks.gpu_sections.train_images import NO_DROPOUT, segments, weights_of
from benchmarks.result_rows import put
from benchmarks.torch_ddp_vision import Task, Workers
from hfjax.base.paths import flatten
from hfjax.models.vision.all_presets import PRESETS
from hfjax.models.vision.convolution_forms import convolve
from hfjax.models.vision.image_losses import classification_loss, segmentation_loss
from hfjax.weights.vision_rules import model_of

RESULTS = Path(__file__).parent / "results" / "deeplab_cpu.md"
DEVICES = 2  # as XLA_FLAGS says
RATE, MOMENTUM = 1e-3, 0.9
Step = Callable[[], tuple[float, float]]  # takes one; returns processor seconds and the loss


def timed(step: Callable[[Any], tuple[Any, Any]], state: Any) -> Step:
    """Return what takes a step of a program of JAX."""
    held = [state]

    def once() -> tuple[float, float]:
        start = time.process_time()
        held[0], loss = jax.block_until_ready(step(held[0]))
        return time.process_time() - start, float(loss)

    return once


def batch_of(config: Any, rows: int, side: int) -> dict[str, np.ndarray]:
    """Return random images of bytes and labels, of all devices."""
    draw = np.random.default_rng(0)
    image = draw.integers(0, 256, (DEVICES * rows, side, side, 3), np.uint8)
    shape = image.shape[:3] if segments(config) else image.shape[:1]
    return {"image": image, "label": draw.integers(0, config.classes, shape, np.int32)}


def programs(preset: str, rows: int, side: int) -> tuple[dict[str, Step], Callable[[], None]]:
    """Return the steps by name, and what ends those that run in other processes."""
    config: Any = PRESETS[preset]
    config = replace(config, **NO_DROPOUT) if segments(config) else config
    batch = batch_of(config, rows, side)
    mesh = hfjax.make_mesh(data=DEVICES)
    layout = hfjax.layout(model_of(config), sgd(), mesh, hfjax.DDP)
    weights = weights_of(layout, config.classes)
    found = {"hfjax": of_hfjax(layout, config, weights, batch)}
    if segments(config):
        kept = flatten(hfjax.init(layout).variables)
        start = {name: np.asarray(x) for name, x in kept.items()}
        found["plain JAX"] = of_plain(config, weights, start, batch, plain_deeplab.lax_convolution)
        found["plain JAX, hfjax's convolutions"] = of_plain(config, weights, start, batch, convolve)
    workers = {}
    if find_spec("torch"):
        for name, last in (("torch", False), ("torch, channels last", True)):
            task = Task(config, weights, batch, last, RATE, MOMENTUM)
            workers[name] = Workers(task, DEVICES)
            found[name] = workers[name].step
    return found, lambda: end(workers)


def end(workers: Mapping[str, Workers]) -> None:
    """End torch's processes."""
    for one in workers.values():
        one.end()


def sgd() -> optax.GradientTransformation:
    """Return the optimizer of all."""
    return optax.sgd(RATE, momentum=MOMENTUM)


def of_hfjax(
    layout: Any, config: Any, weights: Mapping[str, np.ndarray], batch: Mapping[str, np.ndarray]
) -> Step:
    """Return hfjax's step, as a user writes it."""
    loss = segmentation_loss if segments(config) else classification_loss
    step = hfjax.train_step(layout, loss)
    state = hfjax.init(layout, parameters=weights)
    placed = hfjax.shard_batch(layout, batch)

    def run(state: Any) -> tuple[Any, Any]:
        state, metrics = step(state, placed)
        return state, metrics["loss"]

    return timed(run, state)


def of_plain(
    config: Any,
    weights: Mapping[str, np.ndarray],
    kept: Mapping[str, np.ndarray],
    batch: Mapping[str, np.ndarray],
    convolution: plain_deeplab.Convolution,
) -> Step:
    """Return plain JAX's step."""
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    step = plain_deeplab.train_step(config, mesh, sgd(), convolution)
    whole, split = (NamedSharding(mesh, spec) for spec in (P(), P("data")))
    params = jax.device_put(dict(weights), whole)
    state = jax.device_put((params, dict(kept), sgd().init(params)), whole)
    placed = jax.device_put(dict(batch), split)

    def run(state: Any) -> tuple[Any, Any]:
        *state, loss = step(*state, placed)
        return state, loss

    return timed(run, state)


def measure(steps: Mapping[str, Step], rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """Return the processor seconds of each program's steps, and all first losses."""
    first = []
    for name, step in steps.items():
        seconds, loss = step()
        first.append(loss)
        print(f"{name}: first step {seconds:.1f} s, loss {loss:.4f}", flush=True)
    found: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            found[name].append(step()[0])
            print(f"{name}: {found[name][-1]:.2f} s", flush=True)
    return found, first


COLUMNS = (
    *("jax", "model", "hfjax", "plain JAX", "plain JAX, hfjax's convolutions", "torch"),
    *("torch, channels last", "of plain JAX", "of that with our convolutions", "of torch"),
    *("losses differ by", "rounds"),
)
HEAD = f"""# A step of models of images on {DEVICES} fake CPU devices

`python -m benchmarks.deeplab_cpu` (last rows: {{date}}). Seconds of the processor that all devices
take for one step, one thread each: the least of the rounds in which the programs take turns, the
median in brackets. float32, SGD with momentum, nothing dropped, first weights and images alike.

*hfjax*: `train_step` under DDP, BatchNorm over all devices. *Plain JAX*: by hand with `shard_map`,
BatchNorm over all devices (benchmarks/plain_deeplab.py); the same with `convolve` of
hfjax.models.vision.convolution_forms in place of `lax.conv_general_dilated` compares all but
convolutions. *torch*: torchvision's model under DistributedDataParallel over gloo, BatchNorm in
each process; *of torch* is of the quicker order of its dimensions. Losses are the first ones, of
the programs of JAX.
"""


def cells(model: str, found: Mapping[str, list[float]], first: list[float]) -> tuple[str, ...]:
    """Return the row of a model."""
    names = COLUMNS[2:7]
    least = {name: min(seconds) for name, seconds in found.items()}
    best = min((s for name, s in least.items() if name.startswith("torch")), default=None)
    shown = lambda name: f"{least[name]:.2f} ({statistics.median(found[name]):.2f})"
    of = lambda rival: "-" if rival is None else f"{least['hfjax'] / rival:.2f}"
    losses = first[: sum(not name.startswith("torch") for name in found)]
    return (
        *(jax.__version__, model),
        *(shown(name) if name in found else "-" for name in names),
        *(of(least.get(names[1])), of(least.get(names[2])), of(best)),
        f"{max(losses) - min(losses):.0e}" if len(losses) > 1 else "-",
        str(len(found["hfjax"])),
    )


def main() -> None:
    """Measure, and write the row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--preset", default="deeplabv3-resnet101", choices=[*PRESETS])
    parser.add_argument("--rows", type=int, default=4, help="images a device")
    parser.add_argument("--side", type=int, default=129, help="pixels of an image")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    steps, finish = programs(given.preset, given.rows, given.side)
    found, first = measure(steps, given.rounds)
    finish()
    size = f"{given.rows} x {given.side} x {given.side} a device"
    row = cells(f"{given.preset}, {size}", found, first)
    print(" | ".join(row))
    put(RESULTS, HEAD, COLUMNS, row)


if __name__ == "__main__":
    main()
