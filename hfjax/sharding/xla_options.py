"""What XLA is told when it compiles for a layout."""

from collections.abc import Sequence
from typing import Any

from hfjax.parallel.compiler_options import (
    best_preset,
    compiler_options,
    joined,
    options_of_cpus,
    options_of_host,
)
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import SAMPLE_AXES, TENSOR_AXES, in_use, platform_of
from hfjax.parallel.param_specs import entries_of
from hfjax.sharding.layout import Layout

Options = dict[str, Any] | None  # of XLA, for one program


def options_of(layout: Layout, execution: Execution) -> Options:
    """Return what XLA is told when it compiles for a layout, if anything."""
    platform, asked = platform_of(layout.mesh), execution.compiler_options
    if asked == "auto":
        splits = _splits(layout, SAMPLE_AXES), _splits(layout, TENSOR_AXES)
        asked = best_preset(*splits, execution.split_rows > 1)
    options = compiler_options(asked, platform)
    if layout.hosted or execution.offload:
        options = joined(options_of_host(platform, layout.hosted.parameters), options)
    if platform == "cpu":
        options = options_of_cpus(layout.mesh.size) | options
    return options or None


def _splits(layout: Layout, axes: Sequence[str]) -> bool:
    """Return whether one of these axes splits any parameter."""
    used = set(in_use(layout.mesh, axes))
    specs = (entries_of(p.parameter, len(p.shape)) for p in layout.placed.values())
    return any(used.intersection(entry) for spec in specs for entry in spec)
