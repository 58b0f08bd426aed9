"""Convolutions of known networks on a CPU, layer by layer: XLA's, hfjax's and torch's.

Value and both gradients in one program, processor time in one thread, the quickest of rounds in
which the programs take turns. Writes a row for each layer to results/convolution_forms.md.

    python -m benchmarks.convolution_forms                       # all layers
    python -m benchmarks.convolution_forms --only DeepLabV3      # those whose name has this in it

torch is left out where it is not installed.
"""

import argparse
import ctypes
import os
import re
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

# One thread.
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.result_rows import put
from hfjax.models.vision.convolution_forms import Window, as_one, convolve, quickest

RESULTS = Path(__file__).parent / "results" / "convolution_forms.md"
ROWS = 4
# network: layers, each "size of the map, channels in > out, kernel, and what else it has"
NETWORKS = {
    "DeepLabV3-ResNet101, 129 px": (
        "17 256>256 k3 d2",
        "17 512>512 k3 d4",
        "17 256>1024 k1",
        "17 1024>256 k1",
        "17 1024>2048 k1",
        "17 2048>512 k1",
        "17 2048>256 k3 d12",
        "17 2048>256 k3 d24",
        "17 2048>256 k3 d36",
        "17 2048>256 k1",
        "17 1280>256 k1",
        "17 256>256 k3",
    ),
    "RegNet-Y 400MF, 224 px": (
        "224 3>32 k3 s2",
        "112 32>48 k1",
        "112 48>48 k3 s2 g6",
        "56 104>104 k3 s2 g13",
        "28 104>104 k3 g13",
        "28 104>104 k1",
        "28 208>208 k3 s2 g26",
        "14 208>208 k3 g26",
        "14 208>208 k1",
        "14 440>440 k3 s2 g55",
        "7 440>440 k3 g55",
        "7 440>440 k1",
    ),
    "RegNet-Y 3.2GF, 224 px": (
        "112 72>72 k3 s2 g3",
        "56 72>72 k3 g3",
        "56 216>216 k3 s2 g9",
        "28 216>216 k3 g9",
        "28 216>216 k1",
        "14 576>576 k3 g24",
        "14 576>576 k1",
        "14 1512>1512 k3 s2 g63",
    ),
    "ResNet-50, 224 px": (
        "224 3>64 k7 s2",
        "56 64>64 k3",
        "56 64>256 k1",
        "56 256>64 k1",
        "56 128>128 k3 s2",
        "56 256>512 k1 s2",
        "28 128>128 k3",
        "28 128>512 k1",
        "28 256>256 k3 s2",
        "14 256>256 k3",
        "14 1024>256 k1",
        "14 512>512 k3 s2",
        "7 512>512 k3",
        "7 512>2048 k1",
    ),
    "others, 224 px": (
        "56 128>128 k3 g32",
        "14 512>512 k3 g32",
        "28 96>96 k7 g96",
        "56 144>144 k3 s2 g144",
        "28 192>192 k3 g192",
        "14 192>192 k3 g192",
    ),
}
COLUMNS = ("jax", "network", "layer", "form", "XLA", "hfjax", "torch", "of XLA's", "of torch's")


def keep_memory() -> None:
    """Let the process keep what it frees: else each new page of a large array costs a fault."""
    of_c = ctypes.CDLL(None)
    of_c.mallopt(-4, 0)  # M_MMAP_MAX: take nothing from the system that goes back when freed
    of_c.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def layer(text: str) -> tuple[tuple[int, ...], tuple[int, ...], Window]:
    """Return the shapes of images and kernel, and how it moves."""
    numbers = re.fullmatch(r"(\d+) (\d+)>(\d+) k(\d+)(?: s(\d+))?(?: d(\d+))?(?: g(\d+))?", text)
    assert numbers, text
    size, inside, outside, kernel, stride, dilation, groups = (
        int(n or 1) for n in numbers.groups()
    )
    pad = dilation * (kernel - 1) // 2
    window = Window((stride,) * 2, ((pad, pad),) * 2, (dilation,) * 2, groups)
    return (ROWS, size, size, inside), (kernel, kernel, inside // groups, outside), window


def programs(x: np.ndarray, k: np.ndarray, window: Window) -> Iterator[tuple[str, Callable]]:
    """Yield what computes a value and both gradients: XLA's way and ours, and torch's in two."""
    out = jax.eval_shape(lambda x, k: as_one(x, k, window), x, k).shape
    back = np.random.default_rng(2).standard_normal(out, np.float32)
    ours = (window.stride, window.padding, window.dilation, window.groups)
    given = tuple(map(jnp.asarray, (x, k, back)))
    forms = {"XLA": lambda x, k: as_one(x, k, window), "hfjax": lambda x, k: convolve(x, k, *ours)}
    for name, form in forms.items():

        def whole(x: Any, k: Any, back: Any, form: Callable = form) -> Any:
            y, pull = jax.vjp(form, x, k)
            return y, pull(back)

        run = jax.jit(whole).lower(*given).compile()
        yield name, lambda run=run: jax.block_until_ready(run(*given))
    if find_spec("torch"):
        yield from of_torch(x, k, back, window)


def of_torch(
    x: np.ndarray, k: np.ndarray, back: np.ndarray, window: Window
) -> Iterator[tuple[str, Callable]]:
    """Yield torch's programs, of channels that come first and last."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    pads = [before for before, _ in window.padding]
    how = (window.stride, pads, window.dilation, window.groups)
    orders = {"torch": torch.contiguous_format, "torch, channels last": torch.channels_last}
    for name, order in orders.items():
        of = lambda a, *dims: torch.tensor(np.ascontiguousarray(a.transpose(*dims)))
        given = [of(a, 0, 3, 1, 2).contiguous(memory_format=order) for a in (x, back)]
        kernel = of(k, 3, 2, 0, 1).contiguous(memory_format=order).requires_grad_()
        image = given[0].requires_grad_()

        def run(image: Any = image, kernel: Any = kernel, back: Any = given[1]) -> None:
            image.grad = kernel.grad = None
            torch.nn.functional.conv2d(image, kernel, None, *how).backward(back)

        yield name, run


def measure(text: str, seconds: float) -> dict[str, float]:
    """Return the processor seconds of each program: the least of its turns."""
    images, kernel, window = layer(text)
    draw = np.random.default_rng(1).standard_normal
    runs = dict(programs(draw(images, np.float32), draw(kernel, np.float32), window))
    for run in runs.values():
        run()
    best, start, rounds = dict.fromkeys(runs, float("inf")), time.monotonic(), 0
    while rounds < 3 or (time.monotonic() - start < seconds and rounds < 200):
        for name, run in runs.items():
            before = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - before)
        rounds += 1
    return best


def row(network: str, text: str, found: dict[str, float]) -> tuple[str, ...]:
    """Return the cells of one layer."""
    names = [name for name in found if name.startswith("torch")]
    torch = min((found[name] for name in names), default=None)
    ms = lambda seconds: "-" if seconds is None else f"{seconds * 1e3:.1f} ms"
    ours = found["hfjax"]
    return (
        *(jax.__version__, network, text, quickest(*layer(text))),
        *map(ms, (found["XLA"], ours, torch)),
        f"{ours / found['XLA']:.2f}",
        "-" if torch is None else f"{ours / torch:.2f}",
    )


HEAD = """# Convolutions on a CPU, by layer

`python -m benchmarks.convolution_forms` (last rows: {date}). Value and both gradients, float32,
4 images; processor time in one thread, the least of rounds in which the programs take turns, with
memory that stays with the process, as it does from layer to layer in a whole step.
A layer is: size of the map, channels in > out, [k]ernel, [s]tride, [d]ilation, [g]roups. torch's is
the quicker of both orders of its dimensions. *form* is what hfjax chooses
(models/vision/convolution_forms.py).
"""


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="part of a layer's name")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each layer")
    given = parser.parse_args()
    keep_memory()
    print(" | ".join(COLUMNS))
    for network, layers in NETWORKS.items():
        for text in layers:
            if given.only in f"{network}: {text}":
                cells = row(network, text, measure(text, given.seconds))
                print(" | ".join(cells), flush=True)
                put(RESULTS, HEAD, COLUMNS, cells, key=3)


if __name__ == "__main__":
    main()
