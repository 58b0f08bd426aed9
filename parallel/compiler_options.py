"""XLA options for compiling a step on GPUs: named presets, each one measured.

Measured by `python -m benchmarks.ahead_of_time` (benchmarks/results/ahead_of_time.md), which
compiles GPT-2 medium for 8 H200s and counts the collective bytes that run under a matmul.
"""

from collections.abc import Mapping
from typing import Any

import jax

GPU = ("gpu", "cuda")  # jax calls a device gpu, and a platform to lower for cuda
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
RENAMED = (0, 11, 1)  # from this jax on the pipelining options have other names and values


def _overlap() -> dict[str, Any]:
    """Return options that overlap a loop iteration's collectives with the next iteration.

    The all-gather of the next layer's parameters, the reduction of the last layer's gradients.
    """
    if jax.__version_info__ < RENAMED:
        return {f"xla_gpu_enable_pipelined_{kind}": True for kind in COLLECTIVES}
    on = {f"xla_gpu_pipeline_{kind}": "COLLECTIVE_PIPELINING_MODE_ON" for kind in COLLECTIVES}
    # This pass makes each slice of a stacked array asynchronous; the scheduler then waits for all
    # of them, and for the collectives, before it starts the layer's first matmul.
    return on | {"xla_disable_hlo_passes": "dynamic-slice-copy-fusion-async-wrapper"}


def _tensor_overlap() -> dict[str, Any]:
    """Return options that keep a layer's operations on different batch chunks apart."""
    uncombined = {f"xla_gpu_{kind}_combine_threshold_bytes": 0 for kind in COLLECTIVES}
    return uncombined | {
        "xla_gpu_dot_merger_threshold_mb": 0,  # else matmuls of two chunks become one
        "xla_gpu_experimental_parallel_collective_overlap_limit": 1,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "overlap": _overlap(),
    # Also lets two collectives run at the same time.
    "overlap_two": _overlap() | {"xla_gpu_experimental_parallel_collective_overlap_limit": 2},
    "tensor_overlap_chunks": _tensor_overlap(),
}

# Not tried from this jax on: names of options change.
NOT_TRIED = (0, 13)


def cpu_options(devices: int) -> dict[str, Any]:
    """Return the options that CPU programs need: first, no more precision than is written.

    XLA:CPU computes bfloat16 in float32, and skips roundings as it fuses: others in a program
    for one device than in that for many, whose routers then choose other experts.

    Second, one thread per device if there are several. With more, XLA runs independent operations
    concurrently, in a different order on each device, and collectives may be mismatched: seen in a
    pipeline with FSDP and data, whose losses were wrong in one step of five, or which hung.

    >>> cpu_options(1)
    {'xla_allow_excess_precision': False}
    >>> sorted(cpu_options(8))
    ['xla_allow_excess_precision', 'xla_cpu_multi_thread_eigen']
    """
    if jax.__version_info__ >= NOT_TRIED:
        return {}
    as_written = {"xla_allow_excess_precision": False}
    return as_written | ({"xla_cpu_multi_thread_eigen": False} if devices > 1 else {})


def best_preset(gathered: bool, tensor: bool, with_chunks: bool = False) -> str:
    """Return the preset measured best where parameters are gathered, or sharded over tensor.

    Or where layers run on chunks of the batch (benchmarks/results/ahead_of_time.md: halves).

    >>> best_preset(gathered=True, tensor=False), best_preset(gathered=False, tensor=False)
    ('overlap_two', 'default')
    """
    if jax.__version_info__ >= NOT_TRIED or not (gathered or tensor):
        return "default"
    if with_chunks and not gathered:
        return "tensor_overlap_chunks"
    return "overlap" if gathered and tensor else "overlap_two"


DISABLED = "xla_disable_hlo_passes"

# Parameters in host memory: as many concurrent copies as a layer has arrays. XLA's own limit is
# two, so that all but two have arrived before the layer's first matmul begins.
_PARAMETERS = {"xla_gpu_experimental_parallel_async_compute_limit": 32}

# Before this jax a loop that counts down reads host memory in the wrong order, and its gradients
# are wrong: openxla/xla #46231, seen in programs compiled for an H200. Without this pass a kernel
# reads the slices, by the right index.
COUNTS_DOWN = (0, 11, 1)
_COUNTING = {} if jax.__version_info__ >= COUNTS_DOWN else {DISABLED: "dynamic-slice-annotator"}


def host_options(platform: str, parameters: bool = False) -> dict[str, Any]:
    """Return the options of a program with arrays in host memory, also `parameters` or not."""
    if platform not in GPU:
        return {}
    return _COUNTING | (_PARAMETERS if parameters else {})


def merge_options(*option_sets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the merged options: later ones win; passes that any of them disables are disabled.

    >>> merge_options({DISABLED: "a"}, {DISABLED: "b"}, {"xla_gpu_autotune_level": 0})
    {'xla_disable_hlo_passes': 'a,b', 'xla_gpu_autotune_level': 0}
    """
    merged: dict[str, Any] = {}
    for options in option_sets:
        passes = [x[DISABLED] for x in (merged, options) if x.get(DISABLED)]
        merged = {**merged, **options} | ({DISABLED: ",".join(passes)} if passes else {})
    return merged


def check_options(options: Any) -> None:
    """Refuse what is neither the name of a preset nor a dictionary."""
    named = isinstance(options, str) and options in ("auto", *PRESETS)
    if not named and not isinstance(options, Mapping):
        raise ValueError(
            f"compiler_options={options!r}: one of auto, {', '.join(PRESETS)}, or a dictionary of "
            'XLA options such as {"xla_gpu_all_gather_combine_threshold_bytes": 0}.'
        )


def compiler_options(options: str | Mapping[str, Any], platform: str) -> dict[str, Any]:
    """Return the options to compile with on this platform; a preset gives {} where it is no GPU.

    On other platforms a dictionary keeps options that are not named xla_gpu_…

    >>> compiler_options("overlap", "cpu")
    {}
    """
    check_options(options)
    if platform in GPU:
        return dict(PRESETS[options] if isinstance(options, str) else options)
    if isinstance(options, str):
        return {}
    return {name: value for name, value in options.items() if not name.startswith("xla_gpu_")}
