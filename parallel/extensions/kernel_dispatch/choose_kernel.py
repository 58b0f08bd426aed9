"""Which implementation each capability uses: the kernel, or plain JAX compiled by XLA.

`measured.json` has the results of `benchmarks/gpu.py --record`: {device: {kernel: [{"shape":
{"S": …}, "ratio": time of the rival / time of the kernel, "rival": …, "jax": …, "date": …}]}}.
Operands use the implementation of the nearest measured shape. Where nothing was measured, XLA is
used: a kernel that was never seen to win is not the default.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hfjax import pallas_kernels
from hfjax.parallel.settings import KernelChoices

HOPPER = "9.0"  # compute capability that the kernels are written for

MEASURED = Path(pallas_kernels.__file__).parent / "measured.json"
MIN_SPEEDUP = 1.02  # of a kernel that replaces XLA's: less is noise


IMPLS = ("pallas", "reference")  # those of `tensor_sharded`; xla is the plain program
Refusal = Callable[[], str | None] | None
Shape = Mapping[str, int]  # sizes of operands by their letters: S, D; N: the number of elements


def format_shape(shape: Shape | None) -> str:
    """Return a shape in readable form.

    >>> format_shape({"S": 1024, "D": 64})
    'S=1024 D=64'
    """
    return " ".join(f"{letter}={size}" for letter, size in (shape or {}).items())


@dataclass(frozen=True)
class KernelChoice:
    """The implementation that was chosen for a capability, and why."""

    kernel: str
    impl: str  # pallas, xla, or reference: the plain JAX beside the kernel
    why: str
    operands: str = ""  # the operands for which it was chosen

    def __str__(self) -> str:
        return f"{self.kernel}: {self.impl} ({self.why})"


def check_kernels(requested: KernelChoices, device: Any) -> None:
    """Refuse requested kernels where none can run."""
    if "pallas" in (requested.rest, *dict(requested.named).values()) and (
        why := cannot_run(device)
    ):
        raise ValueError(f'kernels="pallas": {why}. Use kernels="auto", or "xla".')


def choose_impl(
    requested: KernelChoices,
    kernel: str,
    device: Any,
    refusal: Refusal = None,
    impossible: str | None = None,
    shape: Shape | None = None,
) -> KernelChoice:
    """Return the implementation to use on a device, for operands of a shape.

    `refusal()` says why the kernel cannot take the operands, `impossible` why no implementation but
    XLA's fits the step. A requested kernel that cannot run is an error.
    """
    setting = requested.choice(kernel)
    if setting == "xla":
        return KernelChoice(kernel, setting, "asked for")
    if setting == "reference":
        return KernelChoice(kernel, "xla" if impossible else setting, impossible or "asked for")
    obstacle = cannot_run(device) or impossible or (refusal and refusal())
    if setting == "pallas":
        if obstacle:
            raise ValueError(
                f'kernels="pallas": {kernel} cannot run here: {obstacle.rstrip(".")}. Use '
                f'kernels="auto", or {requested.without(kernel)}.'
            )
        return KernelChoice(kernel, "pallas", "asked for")
    return (
        KernelChoice(kernel, "xla", obstacle)
        if obstacle
        else _choose_by_measurement(kernel, device, shape)
    )


def cannot_run(device: Any) -> str | None:
    """Return why no kernel can run on a device, or None."""
    if device.platform not in ("gpu", "cuda"):
        return f"a {device.platform} device runs no kernel; they are written for Hopper GPUs"
    capability = getattr(device, "compute_capability", None)
    if capability != HOPPER:
        return (
            f"{device.device_kind} has compute capability {capability}; the kernels are written "
            f"for Hopper GPUs ({HOPPER}: H100, H200)"
        )
    return None


def _choose_by_measurement(kernel: str, device: Any, shape: Shape | None) -> KernelChoice:
    measurements = measurements_of(device.device_kind).get(kernel)
    if not measurements:
        return KernelChoice(
            kernel, "xla", f"not measured on {device.device_kind} yet: `make gpu` measures"
        )
    nearest = min(
        measurements,
        key=lambda entry: (_shape_distance(entry["shape"], shape or {}), entry["ratio"]),
    )
    at = f"at {shape_text} " if (shape_text := format_shape(nearest["shape"])) else ""
    reason = f"measured {nearest['ratio']:.2f}x {nearest['rival']} {at}on {device.device_kind}"
    impl = "pallas" if nearest["ratio"] >= MIN_SPEEDUP else "xla"
    return KernelChoice(kernel, impl, f"{reason}, jax {nearest['jax']}")


def _shape_distance(one: Shape, other: Shape) -> float:
    """Return how far two shapes are from each other, in doublings of their sizes.

    >>> _shape_distance({"S": 1024, "D": 64}, {"S": 4096, "D": 128})
    3.0
    """
    return sum(abs(math.log2(one[letter] / other[letter])) for letter in one.keys() & other.keys())


def measurements_of(device_kind: str) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return the measurements on devices of a kind ("NVIDIA H100 80GB HBM3" is an NVIDIA H100).

    They are a list per kernel, with an entry for each shape.
    """
    names = [name for name in _load_measured() if device_kind.startswith(name)]
    return _load_measured()[max(names, key=len)] if names else {}


@cache
def _load_measured() -> Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]:
    return json.loads(MEASURED.read_text())
