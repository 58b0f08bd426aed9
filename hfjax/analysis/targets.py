"""GPUs that are not here: devices to compile for, so that a plan is checked before it runs.

The packages that compile for CUDA are in a separate folder (`ASIDE`), where JAX does not look: JAX
would start them in every program and report that it finds no GPU.
"""

import importlib
import importlib.util
import os
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import jax
from jax._src import lib, xla_bridge
from jax.experimental import topologies

from hfjax.hardware.machine import MACHINES, Machine

PLUGINS = {"jax_cuda12_plugin": "xla_cuda12", "jax_cuda13_plugin": "xla_cuda13"}
ASIDE = Path(sys.prefix) / "cuda"  # `make wheels` fills it


GPUS = {key: MACHINES[key] for key in ("h100", "h200")}  # what `_config` describes


FRACTION, OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


def memory_fraction() -> float:
    """Return the fraction of a GPU's memory that JAX takes: 0.75, if no variable says otherwise."""
    env = {name: text for name in (FRACTION, OLD_FRACTION) if (text := os.environ.get(name))}
    if len(env) > 1:
        raise ValueError(f"{FRACTION} and {OLD_FRACTION} are both set: JAX refuses. Unset one.")
    if os.environ.get("XLA_PYTHON_CLIENT_ALLOCATOR", "").lower() == "platform":
        return 1.0  # it allocates what is asked for
    for name, text in env.items():
        try:
            fraction = float(text)
        except ValueError:
            fraction = 0.0
        if not fraction > 0:
            raise ValueError(
                f"{name}={text}: a part of the memory of a GPU is expected, as in 0.9."
            )
        return min(fraction, 1.0)
    return 0.75


def wheels() -> list[str]:
    """Return what pip has to install, with --no-deps, to compile for CUDA beside this jax."""
    version = jax.__version__
    if jax.__version_info__ < (0, 11):
        return [
            f"jax-cuda12-plugin=={version}",
            f"jax-cuda12-pjrt=={version}",
            "nvidia-cuda-nvcc-cu12",
        ]
    plugin = [f"jax-cuda13-plugin=={version}", f"jax-cuda13-pjrt=={version}"]
    return [*plugin, "nvidia-cuda-nvcc", "nvidia-nvvm"]


def how_to_install() -> str:
    """Return the command that installs the CUDA compiler in a folder apart from other packages."""
    return f"pip install --no-deps --target {ASIDE} {' '.join(wheels())}"


def can_compile_for_gpus() -> bool:
    """Return whether the wheels that compile for CUDA are installed (no GPU is needed)."""
    return _installed() or _aside() is not None


def _installed() -> bool:
    """Return whether they are among all other packages, as on a machine with a GPU."""
    return any(importlib.util.find_spec(name) for name in PLUGINS)


def _aside() -> str | None:
    """Return the name of the plugin in the separate folder, if one is there."""
    return next((name for name in PLUGINS if (ASIDE / name).is_dir()), None)


@cache
def _take_aside() -> None:
    """Let this process compile for CUDA with the packages in `ASIDE`; JAX does not run on it."""
    plugin = _aside()
    if plugin is None or _installed():
        return
    xla_bridge._discover_and_register_pjrt_plugins()  # JAX's own, and not this one
    sys.path.append(str(ASIDE))
    importlib.invalidate_caches()
    lib.cuda_path = os.environ["MOSAIC_GPU_CUDA_ROOT"] = str(lib._cuda_path())
    _take_runtime_of_kernels(plugin)
    for name in [name for name in sys.modules if name.startswith("jaxlib.gpu_")]:
        _take_calls(importlib.reload(sys.modules[name]))
    with mock.patch.dict(os.environ, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1"):  # no GPU, no driver
        importlib.import_module(f"jax_plugins.{PLUGINS[plugin]}").initialize()
    xla_bridge._backend_factories.pop("cuda", None)


def _take_runtime_of_kernels(plugin: str) -> None:
    """Set the path of Mosaic's runtime, as JAX does if it finds the plugin when it starts."""
    runtime = ASIDE / plugin / "libmosaic_gpu_runtime.so"
    if runtime.exists():
        os.environ["MOSAIC_GPU_RUNTIME_LIB_PATH"] = str(runtime)


def _take_calls(module: ModuleType) -> None:
    """Register the functions that CUDA programs call, as JAX does when it starts."""
    registrations = getattr(module, "registrations", dict)()
    for name, value, version in registrations.get("CUDA", []):
        jax.ffi.register_ffi_target(name, value, platform="CUDA", api_version=version)


def target_devices(gpu: str = "h200", count: int = 8) -> list[Any]:
    """Return devices to build a mesh of and compile for; nothing can run on them.

    With a mesh of them, `layout`, `train_step` and `step.lower(batch).compile()` give the real
    scheduled program, its memory and its collectives. It needs the wheels that compile for CUDA,
    but no GPU.

    Args:
        gpu: GPU to compile for: "h100" or "h200".
        count: Number of GPUs: up to 8 (one host), or a multiple of 8 (whole hosts).

    Raises:
        ValueError: The wheels are missing (the message says what to install), or `count` is not
            a number of whole hosts.

    Example:
        >>> import hfjax
        >>> devices = hfjax.analysis.target_devices("h200", 512)  # doctest: +SKIP
        >>> mesh = hfjax.make_mesh(devices=devices, data=64, fsdp=8)  # doctest: +SKIP
    """
    if gpu not in GPUS:
        raise ValueError(f"gpu {gpu!r}: one of {', '.join(GPUS)}.")
    if not can_compile_for_gpus():
        raise ValueError(
            f"compiling for a {gpu} needs the wheels that compile for CUDA (no GPU): "
            f"{how_to_install()}"
        )
    node_size = GPUS[gpu].per_node
    per_host = min(count, node_size)
    if count < 1 or count % per_host:
        raise ValueError(
            f"count={count}: up to {node_size}, or a multiple of {node_size} (whole hosts)."
        )
    _take_aside()
    topology = topologies.get_topology_desc(
        "",
        platform="cuda",
        topology=f"1x{count // per_host}x{per_host}",
        target_config=_config(GPUS[gpu]),
    )
    return list(topology.devices)


def _config(gpu: Machine) -> str:
    """Return the compiler's description of a Hopper SXM part (stream_executor, protocol text)."""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  core_count: {gpu.sms} fpus_per_core: 128 clock_rate_ghz: 1.98
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  memory_bandwidth: {gpu.bandwidth} l2_cache_size: 52428800 device_memory_size: {gpu.memory}
  cuda_compute_capability {{ major: 9 feature_extension: ACCELERATED_FEATURES }}
  device_vendor: "NVIDIA Corporation" name: "{gpu.name}" device_address_bits: 64
  driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0" device_interconnect_info {{ active_links: 18 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{gpu.name}"
"""
