"""What comes before the first use of JAX: devices, processes, the cache of compiled programs."""

import os
import warnings
from pathlib import Path

import jax

from hfjax.processes.distributed import Cluster, init_distributed
from hfjax.processes.speech import speaks
from hfjax.run.config import Train


def start(config: Train) -> Cluster:
    """Set JAX up as a configuration says; return the processes that run it."""
    if config.cpu_devices is not None:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", config.cpu_devices)
    keep_programs(config.cache)
    cluster = init_distributed(timeout=config.init_timeout)
    if not speaks():  # the first process tells of skipped steps
        warnings.simplefilter("ignore", RuntimeWarning)
    return cluster


def keep_programs(place: Path | None = None) -> None:
    """Keep compiled programs in a directory, so that a second start need not compile them."""
    if os.environ.get("JAX_COMPILATION_CACHE_DIR") and place is None:
        return
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    jax.config.update("jax_compilation_cache_dir", str(place or home / "hfjax" / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
