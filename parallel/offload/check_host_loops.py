"""A check, once per kind of device, that gradients of a loop that uses host memory are right.

Some versions of XLA for GPUs read what a loop keeps on the host in the wrong order: gradients are
then silently wrong (openxla/xla #46231, #46308). So before the first step a small loop is run with
and without host memory. It runs on one device, without collectives.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from hfjax.parallel.mesh import platform_of
from hfjax.parallel.offload.activations import ToHost
from hfjax.parallel.offload.host_memory import is_compile_only
from hfjax.parallel.offload.host_residuals import save_residuals_on_host

LAYERS, BATCH, WIDTH = 5, 32, 128  # odd LAYERS: only one layer is right by chance


def check_host_loops(mesh: Mesh, options: Mapping[str, Any] | None = None) -> None:
    """Refuse GPUs on which offloaded gradients are wrong, in programs compiled with `options`.

    Devices that can only be compiled for cannot be checked.
    """
    if platform_of(mesh) == "gpu" and not is_compile_only(mesh):
        _check(mesh.local_devices[0], tuple(sorted((options or {}).items())))


@cache
def _check(device: Any, options: tuple) -> None:
    run = lambda on_host: _gradient(device, dict(options), on_host)
    with ThreadPoolExecutor(1) as executor:  # outside of any trace under way
        host_gradients, device_gradients = executor.map(run, (True, False))
    max_error = max(
        float(np.abs(f - w).max()) for f, w in zip(host_gradients, device_gradients, strict=True)
    )
    if not max_error <= 1e-3 * float(np.abs(device_gradients[0]).max()):
        raise ValueError(
            f"{device.device_kind}: gradients of a loop that keeps tensors in host memory are "
            f"wrong here (by up to {max_error:.2g}, jax {jax.__version__}): a known fault of XLA, "
            "openxla/xla #46231. Use a newer jax; or nothing on the host (remat instead of "
            "offload); or, in a program of your own, disable the pass: "
            "XLA_FLAGS=--xla_disable_hlo_passes=dynamic-slice-annotator."
        )


def _gradient(device: Any, options: dict[str, Any], on_host: bool) -> list[np.ndarray]:
    """Return the gradients of weights and input of a loop over layers."""

    def layer(known: tuple, w: jax.Array, x: jax.Array) -> tuple[jax.Array, tuple]:
        return jnp.tanh(x @ w), ()

    share = (
        (lambda tensors: {i: ToHost() for i in range(len(tensors))}) if on_host else lambda _: {}
    )
    run = save_residuals_on_host(layer, share, barrier=False)

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        y, _ = lax.scan(lambda x, w: (run((), w, x)[0], None), x, weights)
        return (y**2).sum()

    random = np.random.default_rng(0)
    shapes = (LAYERS, WIDTH, WIDTH), (BATCH, WIDTH)
    arrays = [np.float32(random.normal(size=shape) / WIDTH**0.5) for shape in shapes]
    inputs = [jax.device_put(x, device) for x in arrays]
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), compiler_options=options or None)
    return [np.asarray(x) for x in gradient(*inputs)]
