"""XLA's compiler options for a layout."""

from collections.abc import Sequence
from typing import Any

from hfjax.parallel.compiler_options import (
    best_preset,
    compiler_options,
    cpu_options,
    host_options,
    merge_options,
)
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import DATA_AXES, TENSOR_AXES, in_use, platform_of
from hfjax.parallel.param_specs import entries_of
from hfjax.sharding.layout import Layout

Options = dict[str, Any] | None  # of XLA, for one program


def options_for(layout: Layout, execution: Execution) -> Options:
    """Return XLA's compiler options for a layout, if any."""
    platform, preset = platform_of(layout.mesh), execution.compiler_options
    if preset == "auto":
        splits = _splits(layout, DATA_AXES), _splits(layout, TENSOR_AXES)
        preset = best_preset(*splits, execution.tensor_overlap_chunks > 1)
    options = compiler_options(preset, platform)
    if layout.host_memory or execution.offload:
        options = merge_options(host_options(platform, layout.host_memory.parameters), options)
    if platform == "cpu":
        options = cpu_options(layout.mesh.size) | options
    return options or None


def _splits(layout: Layout, axes: Sequence[str]) -> bool:
    """Return whether one of these axes shards any parameter."""
    used_axes = set(in_use(layout.mesh, axes))
    specs = (entries_of(p.parameter, len(p.shape)) for p in layout.param_specs.values())
    return any(used_axes.intersection(entry) for spec in specs for entry in spec)
