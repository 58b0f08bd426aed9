"""Which data plane a step or an evaluation runs on: with a table, that of a pipeline."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from hfjax.parallel.activation_offload import Offloaded
from hfjax.parallel.compiler import (
    best_preset,
    compiler_options,
    joined,
    options_of_cpus,
    options_of_host,
)
from hfjax.parallel.engine.gradients import AutodiffPlane, Plane
from hfjax.parallel.engine.local import Dealing, Traced
from hfjax.parallel.engine.sequence import dealt, undealt
from hfjax.parallel.engine.step_context import StepContext, gradients_at_moments
from hfjax.parallel.execution import Execution
from hfjax.parallel.for_models.grid import Grid
from hfjax.parallel.for_models.kernels import Kernels
from hfjax.parallel.for_models.shared_rows import SharedRows
from hfjax.parallel.for_models.spread_experts import SpreadExperts
from hfjax.parallel.heterogeneous.model import HeterogeneousModel
from hfjax.parallel.layerwise.plane import LayerUpdatePlane, LayerwisePlane
from hfjax.parallel.mesh import (
    PIPE_AXIS,
    SAMPLE_AXES,
    SEQUENCE_AXES,
    TENSOR_AXES,
    in_use,
    on_grid,
    platform_of,
)
from hfjax.parallel.pipeline.plane import PipelinePlane
from hfjax.parallel.placement import Placed, entries_of, row_shares
from hfjax.parallel.schedules.compile import compile_table
from hfjax.parallel.schedules.named import Schedule, forward_table
from hfjax.parallel.schedules.table import Table
from hfjax.plan.layout import Layout


def data_plane(
    layout: Layout, loss: Callable, execution: Execution, table: Table | None = None
) -> Plane:
    """Return the data plane of a layout, one that follows a table if there is one.

    Planes differ in which split parameters they gather once for the whole step: those whose
    gradient accumulates whole, and, where our code runs the layers, all of them under
    reshard_after_forward=False.
    """
    once = execution.accumulate == 1
    kept = lambda p: bool(p.split_dims("parameter")) and not execution.reshard_after_forward
    whole = lambda p: bool(p.split_dims("parameter")) and not p.split_dims("gradient")
    if table is not None:
        assert layout.arrangement is not None
        no_ring = _no_ring(layout, execution, table)
        fetched = lambda p: kept(p) or whole(p)
        context = _context(layout, loss, execution, False, fetched, no_ring)
        packed = layout.packed
        unlike = None if packed is None else partial(HeterogeneousModel, packed=packed)
        return PipelinePlane(context, layout.arrangement, compile_table(table), unlike)
    if layout.hosted.parameters and layout.blueprint.three_parts and not layout.forward:
        return LayerwisePlane(_context(layout, loss, execution, once, kept))
    return AutodiffPlane(_context(layout, loss, execution, once, whole))


def _no_ring(layout: Layout, execution: Execution, table: Table) -> str | None:
    """Return why keys and values cannot go around a ring in a pipeline, if layers branch in it."""
    branches = {
        f"schedule {table.name} has branches": table.branches,
        "a pipeline of a list of layers has a branch for each": layout.packed is not None,
        'remat="except_last" has branches': execution.remat.what == "except_last",
    }
    why = next((why for why, so in branches.items() if so), None)
    return why and f"{why}, and a permute in one waits for ever"


def update_plane(layout: Layout, loss: Callable, execution: Execution) -> LayerUpdatePlane:
    """Return the plane of a step that updates each layer in the backward pass.

    No gradient accumulates: it goes straight to where its moments are.
    """
    kept = lambda p: bool(p.split_dims("parameter")) and not execution.reshard_after_forward
    context = _context(layout, loss, execution, True, kept)
    placed = {path: replace(p, gradient=p.moment) for path, p in context.placed.items()}
    return LayerUpdatePlane(LayerwisePlane(replace(context, placed=placed)))


def _context(
    layout: Layout,
    loss: Callable,
    execution: Execution,
    one_microbatch: bool,
    gathered_once: Callable[[Placed], bool],
    no_ring: str | None = None,
) -> StepContext:
    shares = in_use(layout.mesh, SEQUENCE_AXES)
    rows = SharedRows(execution.context, layout.mesh, no_ring) if shares else None
    grid = Grid(layout.mesh, layout.strategy.parameters) if on_grid(layout.mesh) else None
    spread = SpreadExperts(layout.mesh, execution.dispatch)
    kernels = Kernels.of(execution.kernels, layout.mesh, loss, rows, grid, spread)
    placed = gradients_at_moments(layout.placed) if one_microbatch else layout.placed
    return StepContext(
        blueprint=layout.blueprint.equipped(kernels),
        placed=placed,
        mesh=layout.mesh,
        execution=execution,
        loss=loss,
        forward=layout.forward,
        traced=Traced(kernels, Offloaded(execution.offload)),
        dealing=Dealing(dealt, undealt),
        one_microbatch=one_microbatch,
        gathered_for_step=frozenset(path for path, p in placed.items() if gathered_once(p)),
    )


def forward_plane(
    layout: Layout, loss: Callable, run: Execution, schedule: Schedule | None, batch: Any
) -> Plane:
    """Return the plane that evaluates: over stages, as many microbatches as the rows allow."""
    stages = layout.mesh.shape[PIPE_AXIS]
    if stages == 1 and schedule is None:
        return data_plane(layout, loss, run)
    rows = jax.tree.leaves(batch)[0].shape[0] // row_shares(layout.mesh)
    wanted = 4 * stages if schedule is None else schedule.microbatches
    count = max(n for n in range(1, wanted + 1) if rows % n == 0)
    assert layout.arrangement is not None
    return data_plane(layout, loss, run, forward_table(layout.arrangement.homes, count))


def options_of(layout: Layout, execution: Execution) -> dict[str, Any] | None:
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
