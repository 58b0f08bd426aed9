"""Simulated CPU devices, where a program needs more devices than there are GPUs."""

import importlib.util
import logging
import os

import jax
from jax._src import xla_bridge

from hfjax.distributed.launcher import visible_gpus
from hfjax.utils.keywords import is_int

logger = logging.getLogger(__name__)

PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


def simulate_devices(count: int) -> None:
    """Simulate `count` devices on the CPU, unless this machine has as many GPUs.

    So one program runs on a laptop, on one GPU and on eight. Call it before JAX is first used. It
    does nothing if the environment chooses devices itself, with JAX_PLATFORMS or
    JAX_NUM_CPU_DEVICES: `JAX_PLATFORMS=cuda python program.py` stays on one GPU.

    Args:
        count: The number of devices that the program needs, in each process.

    Raises:
        ValueError: JAX runs already, on fewer devices.

    Example:
        >>> import hfjax, jax
        >>> hfjax.simulate_devices(8)
        >>> jax.device_count()
        8
    """
    if not is_int(count):
        raise ValueError(f"simulate_devices({count!r}): a positive number of devices is expected.")
    if xla_bridge.backends_are_initialized():
        if (available := jax.device_count()) < count:
            raise ValueError(
                f"simulate_devices({count}): JAX runs already, with {available} of them. Call it "
                "before anything that uses JAX's devices."
            )
        return
    if any(os.environ.get(name) for name in ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES")):
        return
    gpus = len(visible_gpus()) if any(map(importlib.util.find_spec, PLUGINS)) else 0
    if gpus >= count:
        return
    if gpus:
        logger.warning(
            "simulating %d devices on the CPU, since this machine has fewer GPUs: %d",
            *(count, gpus),
        )
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", int(count))
