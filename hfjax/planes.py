"""Which data plane a step or an evaluation runs on: with a table, that of a pipeline."""

from collections.abc import Callable
from typing import Any

import jax

from hfjax.parallel.compiler import (
    best_preset,
    compiler_options,
    joined,
    options_of_cpus,
    options_of_host,
)
from hfjax.parallel.engine.gradients import DataPlane
from hfjax.parallel.engine.kernels import Kernels
from hfjax.parallel.execution import Execution
from hfjax.parallel.layerwise.plane import LayerUpdatePlane, LayerwisePlane
from hfjax.parallel.mesh import PIPE_AXIS, platform_of
from hfjax.parallel.pipeline.plane import PipelinePlane
from hfjax.parallel.placement import batch_devices, entries_of
from hfjax.parallel.schedules.compile import compile_table
from hfjax.parallel.schedules.named import Schedule, forward_table
from hfjax.parallel.schedules.table import Table
from hfjax.plan.layout import Layout


def data_plane(
    layout: Layout, loss: Callable, execution: Execution, table: Table | None = None
) -> DataPlane:
    """Return the data plane of a layout, one that follows a table if there is one."""
    kernels = Kernels.of(execution.kernels, layout.mesh, loss)
    equipped = layout.blueprint.equipped(kernels)
    basic = (equipped, layout.placed, layout.mesh, execution, loss, layout.forward)
    if execution.optimizer_in_backward:
        return LayerUpdatePlane(*basic, kernels=kernels)
    if table is None:
        far = layout.hosted.parameters and layout.blueprint.three_parts and not layout.forward
        return (LayerwisePlane if far else DataPlane)(*basic, kernels=kernels)
    assert layout.arrangement is not None
    stages = (layout.arrangement, compile_table(table), layout.packed)
    return PipelinePlane(*basic, *stages, kernels=kernels)


def forward_plane(
    layout: Layout, loss: Callable, run: Execution, schedule: Schedule | None, batch: Any
) -> DataPlane:
    """Return the plane that evaluates: over stages, as many microbatches as the rows allow."""
    stages = layout.mesh.shape[PIPE_AXIS]
    if stages == 1 and schedule is None:
        return data_plane(layout, loss, run)
    rows = jax.tree.leaves(batch)[0].shape[0] // batch_devices(layout.mesh)
    wanted = 4 * stages if schedule is None else schedule.microbatches
    count = max(n for n in range(1, wanted + 1) if rows % n == 0)
    assert layout.arrangement is not None
    return data_plane(layout, loss, run, forward_table(layout.arrangement.homes, count))


def options_of(layout: Layout, execution: Execution) -> dict[str, Any] | None:
    """Return what XLA is told when it compiles for a layout, if anything."""
    platform, asked = platform_of(layout.mesh), execution.compiler_options
    if asked == "auto":
        asked = best_preset(*(_splits(layout, axis) for axis in ("fsdp", "tensor")))
    options = compiler_options(asked, platform)
    if layout.hosted or execution.offload:
        options = joined(options_of_host(platform, layout.hosted.parameters), options)
    if platform == "cpu":
        options = options_of_cpus(layout.mesh.size) | options
    return options or None


def _splits(layout: Layout, axis: str) -> bool:
    """Return whether an axis splits any parameter."""
    specs = (entries_of(p.parameter, len(p.shape)) for p in layout.placed.values())
    return layout.mesh.shape[axis] > 1 and any(axis in axes for spec in specs for axes in spec)
