"""Convolutions of known networks on a CPU, layer by layer: XLA's, hfjax's and torch's.

Value and all gradients in one program, processor time in one thread, the quickest of rounds in
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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
    "whole blocks": (
        "17 1024>256 d2",
        "17 2048>512 d4",
        "56 256>64",
        "28 512>128",
        "14 1024>256",
        "7 2048>512",
        "28 104>104 g13",
        "14 208>208 g26",
        "7 440>440 g55",
        "28 216>216 g9",
        "14 576>576 g24",
    ),
}
COLUMNS = ("jax", "network", "layer", "form", "XLA", "hfjax", "torch", "of XLA's", "of torch's")


def keep_memory() -> None:
    """Let the process keep what it frees: else each new page of a large array costs a fault."""
    of_c = ctypes.CDLL(None)
    of_c.mallopt(-4, 0)  # M_MMAP_MAX: take nothing from the system that goes back when freed
    of_c.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def numbers(text: str) -> tuple[int, ...]:
    """Return size, channels in and out, kernel (0: it is a block), stride, dilation and groups."""
    found = re.fullmatch(r"(\d+) (\d+)>(\d+)(?: k(\d+))?(?: s(\d+))?(?: d(\d+))?(?: g(\d+))?", text)
    assert found, text
    return tuple(int(n or at != 3) for at, n in enumerate(found.groups()))


def shapes(text: str) -> list[tuple[int, ...]]:
    """Return the shapes of images and kernels."""
    size, inside, outside, kernel, _, _, groups = numbers(text)
    images = (ROWS, size, size, inside)
    if kernel:
        return [images, (kernel, kernel, inside // groups, outside)]
    middle = (3, 3, outside // groups, outside)
    return [images, (1, 1, inside, outside), middle, (1, 1, outside, inside)]


def computed(text: str, convolution: Callable, after: Callable, x: Any, *kernels: Any) -> Any:
    """Return what a layer makes of images; or a block, by what is done after each convolution."""
    _, _, _, kernel, stride, dilation, groups = numbers(text)
    if kernel:
        return convolution(x, *kernels, stride, dilation * (kernel - 1) // 2, dilation, groups)
    first, second, third = kernels
    y = after(convolution(x, first, 1, 0, 1, 1))
    y = after(convolution(y, second, 1, dilation, dilation, groups))
    return x + after(convolution(y, third, 1, 0, 1, 1))


def by_xla(x: Any, k: Any, stride: int, pad: int, dilation: int, groups: int) -> Any:
    """Return XLA's convolution."""
    return as_one(x, k, Window((stride,) * 2, ((pad, pad),) * 2, (dilation,) * 2, groups))


def normed(x: Any) -> Any:
    """Return what is positive of channels less their mean, over their deviation."""
    mean = x.mean((0, 1, 2), keepdims=True)
    variance = jnp.square(x - mean).mean((0, 1, 2), keepdims=True)
    return jax.nn.relu((x - mean) * jax.lax.rsqrt(variance + 1e-5))


def programs(text: str) -> Iterator[tuple[str, Callable]]:
    """Yield what computes a value and all gradients: XLA's way and ours, and torch's in two."""
    draw = np.random.default_rng(1).standard_normal
    arrays = [draw(shape, np.float32) for shape in shapes(text)]
    given = tuple(map(jnp.asarray, arrays))
    for name, convolution in (("XLA", by_xla), ("hfjax", convolve)):
        form = partial(computed, text, convolution, normed)

        def whole(back: Any, *given: Any, form: Callable = form) -> Any:
            y, pull = jax.vjp(form, *given)
            return y, pull(back)

        out = jax.eval_shape(form, *given)
        back = jnp.asarray(np.random.default_rng(2).standard_normal(out.shape, np.float32))
        run = jax.jit(whole).lower(back, *given).compile()
        yield name, lambda run=run, back=back: jax.block_until_ready(run(back, *given))
    if find_spec("torch"):
        yield from of_torch(text, arrays)


def of_torch(text: str, arrays: Sequence[np.ndarray]) -> Iterator[tuple[str, Callable]]:
    """Yield torch's programs, of channels that come first and last."""
    import torch  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    call = torch.nn.functional
    orders = {"torch": torch.contiguous_format, "torch, channels last": torch.channels_last}
    convolution = lambda x, k, *how: call.conv2d(x, k, None, *how)
    after = lambda x: call.relu(call.batch_norm(x, None, None, training=True), inplace=True)
    for name, order in orders.items():
        turned = [
            a.transpose(3, 2, 0, 1) if at else a.transpose(0, 3, 1, 2)
            for at, a in enumerate(arrays)
        ]
        given = [
            torch.tensor(np.ascontiguousarray(a)).contiguous(memory_format=order) for a in turned
        ]
        given = [a.requires_grad_() for a in given]
        back = torch.randn_like(computed(text, convolution, after, *given))

        def run(given: Any = given, back: Any = back) -> None:
            for array in given:
                array.grad = None
            computed(text, convolution, after, *given).backward(back)

        yield name, run


def measure(text: str, seconds: float) -> dict[str, float]:
    """Return the processor seconds of each program: the least of its turns."""
    runs = dict(programs(text))
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
        *(jax.__version__, network, text, chosen(text)),
        *map(ms, (found["XLA"], ours, torch)),
        f"{ours / found['XLA']:.2f}",
        "-" if torch is None else f"{ours / torch:.2f}",
    )


def chosen(text: str) -> str:
    """Return the form that hfjax takes for a layer."""
    _, _, _, kernel, stride, dilation, groups = numbers(text)
    pad = dilation * (kernel - 1) // 2
    window = Window((stride,) * 2, ((pad, pad),) * 2, (dilation,) * 2, groups)
    images, of_kernel, *_ = shapes(text)
    return quickest(images, of_kernel, window) if kernel else "-"


HEAD = """# Convolutions on a CPU, by layer

`python -m benchmarks.convolution_forms` (last rows: {date}). Value and all gradients, float32,
4 images; processor time in one thread, the least of rounds in which the programs take turns, with
memory that stays with the process, as it does from layer to layer in a whole step.
A layer is: size of the map, channels in > out, [k]ernel, [s]tride, [d]ilation, [g]roups. torch's is
the quicker of both orders of its dimensions. *form* is what hfjax chooses
(models/vision/convolution_forms.py). A whole block is 1x1, 3x3 and 1x1, each with a batch norm and
a ReLU after it, and what went in added.
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
