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
from hfjax.parallel.settings import Wanted

HOPPER = "9.0"  # compute capability of what the kernels are written for

MEASURED = Path(pallas_kernels.__file__).parent / "measured.json"
FASTER = 1.02  # a kernel that takes XLA's place: less is noise


Shape = Mapping[str, int]  # sizes of operands by their letters: S, D; how many numbers is N


def show(shape: Shape | None) -> str:
    """Return a shape as people read it.

    >>> show({"S": 1024, "D": 64})
    'S=1024 D=64'
    """
    return " ".join(f"{letter}={size}" for letter, size in (shape or {}).items())


@dataclass(frozen=True)
class KernelChoice:
    """The form that was taken of a capability, and why."""

    kernel: str
    form: str  # pallas, xla, or reference: the plain JAX beside the kernel
    why: str
    of: str = ""  # the operands for which it was taken

    def __str__(self) -> str:
        return f"{self.kernel}: {self.form} ({self.why})"


def check_kernels(wanted: Wanted, device: Any) -> None:
    """Refuse kernels that were asked for where none can run."""
    if "pallas" in (wanted.rest, *dict(wanted.named).values()) and (why := cannot_run(device)):
        raise ValueError(f'kernels="pallas": {why}. Use kernels="auto", or "xla".')


def choose(
    wanted: Wanted,
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
    word = wanted.word(kernel)
    if word == "xla":
        return KernelChoice(kernel, word, "asked for")
    if word == "reference":
        return KernelChoice(kernel, "xla" if impossible else word, impossible or "asked for")
    obstacle = cannot_run(device) or impossible or refusal
    if word == "pallas":
        if obstacle:
            raise ValueError(
                f'kernels="pallas": {kernel} cannot run here: {obstacle.rstrip(".")}. Use '
                f'kernels="auto", or {wanted.without(kernel)}.'
            )
        return KernelChoice(kernel, "pallas", "asked for")
    return (
        KernelChoice(kernel, "xla", obstacle) if obstacle else _as_measured(kernel, device, shape)
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


def _as_measured(kernel: str, device: Any, shape: Shape | None) -> KernelChoice:
    known = measured(device.device_kind).get(kernel)
    if not known:
        return KernelChoice(
            kernel, "xla", f"not measured on {device.device_kind} yet: `make gpu` measures"
        )
    found = min(known, key=lambda one: (_apart(one["shape"], shape or {}), one["ratio"]))
    at = f"at {where} " if (where := show(found["shape"])) else ""
    told = f"measured {found['ratio']:.2f}x {found['rival']} {at}on {device.device_kind}"
    form = "pallas" if found["ratio"] >= FASTER else "xla"
    return KernelChoice(kernel, form, f"{told}, jax {found['jax']}")


def _apart(one: Shape, other: Shape) -> float:
    """Return how far two shapes are from each other, in doublings of their sizes.

    >>> _apart({"S": 1024, "D": 64}, {"S": 4096, "D": 128})
    3.0
    """
    return sum(abs(math.log2(one[letter] / other[letter])) for letter in one.keys() & other.keys())


def measured(device_kind: str) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return what was measured on devices of a kind ("NVIDIA H100 80GB HBM3" is an NVIDIA H100).

    That is a list of each kernel's shapes.
    """
    names = [name for name in _table() if device_kind.startswith(name)]
    return _table()[max(names, key=len)] if names else {}


@cache
def _table() -> Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]:
    return json.loads(MEASURED.read_text())
