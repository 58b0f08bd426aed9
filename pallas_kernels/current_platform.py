"""The devices that a program is traced for: those of the mesh around it.

They need not be those that JAX runs on by default: a program may be compiled ahead for a GPU, or
run on the CPUs of a machine that has one.
"""

from typing import Any

import jax


def platform() -> str:
    """Return what they are: cpu, gpu, tpu; where no mesh is around, what JAX runs on by default."""
    device = _device()
    return jax.default_backend() if device is None else device.platform


def processors() -> int | None:
    """Return how many processors each GPU has; None: it is none, or does not say."""
    device = _device()
    if device is None:
        return getattr(jax.devices()[0], "core_count", None)
    return device.num_cores


def _device() -> Any:
    """Return what JAX knows of a device of the mesh around; None: there is no mesh."""
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
