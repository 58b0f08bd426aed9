"""The devices that a program is traced for: those of the current mesh.

They may differ from JAX's default devices: a program may be compiled ahead of time for a GPU, or
run on the CPUs of a machine that has one.
"""

from typing import Any

import jax


def platform() -> str:
    """Return their platform: cpu, gpu or tpu; without a mesh, JAX's default."""
    device = _device()
    return jax.default_backend() if device is None else device.platform


def processors() -> int | None:
    """Return the number of multiprocessors of each GPU; None: no GPU, or unknown."""
    device = _device()
    if device is None:
        return getattr(jax.devices()[0], "core_count", None)
    return device.num_cores


def _device() -> Any:
    """Return a device of the current mesh, or None without a mesh."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
