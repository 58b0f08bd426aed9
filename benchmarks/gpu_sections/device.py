"""The device at hand, the versions of everything, and what a data sheet promises."""

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hfjax.hardware.machine import machine_of

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
PACKAGES += ("torch", "torchvision", "triton")  # of rivals
UNKNOWN = (0.0, 0.0)


def versions() -> dict[str, str | None]:
    """Return the version of each package, None where it is not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def sheet(kind: str) -> tuple[float, float]:
    """Return (operations, bytes) a second of a kind of device by its data sheet, 0 if unknown.

    >>> sheet("NVIDIA H200")
    (989000000000000.0, 4800000000000.0)
    """
    machine = machine_of(kind)
    return (machine.peak, float(machine.bandwidth)) if machine else UNKNOWN


def is_there() -> bool:
    """Return whether this machine seems to have an NVIDIA GPU; starts nothing."""
    return shutil.which("nvidia-smi") is not None or Path("/dev/nvidiactl").exists()


def described() -> dict[str, Any]:
    """Return what jax and the driver say of the device; starts jax."""
    import jax

    device = jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    seen = {"kind": device.device_kind, "platform": device.platform, "bytes": limit}
    return seen | {"cores": os.cpu_count(), "driver": _driver()}


def _driver() -> str | None:
    asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
