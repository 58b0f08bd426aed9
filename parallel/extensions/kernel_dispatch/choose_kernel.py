"""Which of its two forms each capability takes: the kernel or what XLA makes of plain JAX.

`measured.json` has what `benchmarks/gpu.py --record` found: {device: {kernel: [{"shape": {"S": …},
"ratio": time of the rival / time of the kernel, "rival": …, "jax": …, "date": …}]}}. Operands go as
the measured shape does that is nearest to theirs. Where nothing was measured, XLA is taken: a
kernel that was never seen to win is not the default.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hfjax import pallas_kernels
from hfjax.parallel.settings import KernelChoices

HOPPER = "9.0"  # compute capability of what the kernels are written for

MEASURED = Path(pallas_kernels.__file__).parent / "measured.json"
MIN_SPEEDUP = 1.02  # a kernel that takes XLA's place: less is noise


Shape = Mapping[str, int]  # sizes of operands by their letters: S, D; how many numbers is N


def format_shape(shape: Shape | None) -> str:
    """Return a shape as people read it.

    >>> format_shape({"S": 1024, "D": 64})
    'S=1024 D=64'
    """
    return " ".join(f"{letter}={size}" for letter, size in (shape or {}).items())


@dataclass(frozen=True)
class KernelChoice:
    """The form that was taken of a capability, and why."""

    kernel: str
    impl: str  # pallas, xla, or reference: the plain JAX beside the kernel
    why: str
    operands: str = ""  # the operands for which it was taken

    def __str__(self) -> str:
        return f"{self.kernel}: {self.impl} ({self.why})"


def check_kernels(choices: KernelChoices, device: Any) -> None:
    """Refuse kernels that were asked for where none can run."""
    if "pallas" in (choices.rest, *dict(choices.named).values()) and (why := cannot_run(device)):
        raise ValueError(f'kernels="pallas": {why}. Use kernels="auto", or "xla".')


def choose_impl(
    choices: KernelChoices,
    kernel: str,
    device: Any,
    refusal: str | None = None,
    impossible: str | None = None,
    shape: Shape | None = None,
) -> KernelChoice:
    """Return the form to take on a device, for operands of a shape.

    `refusal` says why the kernel cannot take the operands, `impossible` why no form but XLA's
    fits the step. A kernel that was asked for and cannot run is an error.
    """
    setting = choices.choice(kernel)
    if setting == "xla":
        return KernelChoice(kernel, setting, "asked for")
    if setting == "reference":
        return KernelChoice(kernel, "xla" if impossible else setting, impossible or "asked for")
    obstacle = cannot_run(device) or impossible or refusal
    if setting == "pallas":
        if obstacle:
            raise ValueError(
                f'kernels="pallas": {kernel} cannot run here: {obstacle.rstrip(".")}. Use '
                f'kernels="auto", or {choices.without(kernel)}.'
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
    """Return what was measured on devices of a kind ("NVIDIA H100 80GB HBM3" is an NVIDIA H100).

    That is a list of each kernel's shapes.
    """
    names = [name for name in _load_measured() if device_kind.startswith(name)]
    return _load_measured()[max(names, key=len)] if names else {}


@cache
def _load_measured() -> Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]:
    return json.loads(MEASURED.read_text())
