"""What XLA is told when it compiles a step for a GPU: named sets of options, each one measured.

Measured by `python benchmarks/overlap.py` (its table: benchmarks/results/overlap.md), which
compiles GPT-2 medium for 8 H200s and counts the collective bytes that run under a matmul.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

GPU = ("gpu", "cuda")  # jax says gpu of a device, and cuda of a platform to lower for
PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "default": {},
        "overlap": {
            # The gather of the next layer's parameters runs beside this layer: FSDP.
            "xla_gpu_enable_pipelined_all_gather": True,
            # The reduction of a layer's gradients runs beside the next layer's backward.
            "xla_gpu_enable_pipelined_reduce_scatter": True,
            "xla_gpu_enable_pipelined_all_reduce": True,
        },
    }
)


def compiler_options(options: str | Mapping[str, Any], platform: str) -> dict[str, Any]:
    """Return the options for `compile` on this platform; {} where they mean nothing.

    >>> compiler_options("overlap", "cpu")
    {}
    """
    if isinstance(options, str) and options not in PRESETS:
        raise ValueError(
            f"compiler_options={options!r}: one of {', '.join(PRESETS)}, or a dictionary of XLA "
            'options such as {"xla_gpu_enable_pipelined_all_gather": True}.'
        )
    chosen = PRESETS[options] if isinstance(options, str) else options
    return dict(chosen) if platform in GPU else _for_any(chosen)


def _for_any(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are not for GPUs only."""
    return {name: value for name, value in options.items() if not name.startswith("xla_gpu_")}
