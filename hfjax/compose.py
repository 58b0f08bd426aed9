"""What a step is made of, in the order in which it happens: a recipe.

Between `train_step(…)` and `jax.jit` lie these stations, each a call in `training`:

1. `check_given`: a layout and a loss.
2. `on_stages`: the layers go where the schedule wants them.
3. `check_runs`: what does not go together, or has nothing to do.
4. `check_packed_rows`, `check_padding`: an optimizer that layers on stages would mislead.
5. `warn_of_mixed_experts`, `warn_of_gathered_experts`.
6. `check_in_backward`: an optimizer that cannot update layer by layer.
7. `table_of`: which stage does what in which tick.
8. `update_of`: how the state is updated; with it the data plane, which runs the model.
9. `options_of`: what XLA is told.
10. `check_host_loops`: whether XLA brings back what the host keeps.

This file alone chooses among planes and updates, and what the modules of a model are handed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from hfjax.check_step import check_given, check_runs
from hfjax.parallel.activation_offload import Offloaded
from hfjax.parallel.autodiff.check_host_loops import check_host_loops
from hfjax.parallel.engine.gradients import AutodiffPlane, Plane
from hfjax.parallel.engine.local import Dealing, Local, Traced
from hfjax.parallel.engine.sequence import dealt, undealt
from hfjax.parallel.engine.step_context import StepContext, gradients_at_moments
from hfjax.parallel.execution import Execution
from hfjax.parallel.for_models.grid import Grid
from hfjax.parallel.for_models.kernels import Kernels
from hfjax.parallel.for_models.shared_rows import SharedRows
from hfjax.parallel.for_models.spread_experts import SpreadExperts
from hfjax.parallel.heterogeneous.model import HeterogeneousModel
from hfjax.parallel.layerwise.plane import LayerUpdatePlane, LayerwisePlane
from hfjax.parallel.mesh import PIPE_AXIS, SEQUENCE_AXES, in_use, on_grid
from hfjax.parallel.pipeline.plane import PipelinePlane, no_permutes
from hfjax.parallel.placement import Placed
from hfjax.parallel.schedules.compile import compile_table
from hfjax.parallel.schedules.named import Schedule
from hfjax.parallel.schedules.table import Table
from hfjax.plan.check_layout import warn_of_gathered_experts
from hfjax.plan.layout import Layout
from hfjax.plan.on_stages import on_stages, table_of
from hfjax.plan.xla_options import options_of
from hfjax.update.asynchronous import AsynchronousUpdate
from hfjax.update.in_backward import InBackwardUpdate, check_in_backward
from hfjax.update.separable import check_packed_rows, check_padding, warn_of_mixed_experts
from hfjax.update.streamed import StreamedUpdate
from hfjax.update.update import Update
from hfjax.update.whole import WholeUpdate


def training(
    layout: Layout, loss: Callable, execution: Execution
) -> tuple[Layout, Update, dict[str, Any] | None]:
    """Return a step before it is jitted: layout with layers on stages, update, XLA's options."""
    check_given(layout, loss)
    layout = on_stages(layout, execution.schedule)
    check_runs(layout, execution, training=True)
    check_packed_rows(layout)
    check_padding(layout)
    warn_of_mixed_experts(layout)
    warn_of_gathered_experts(layout)
    if execution.optimizer_in_backward:
        check_in_backward(layout)
    table = table_of(layout, execution.schedule)
    update = update_of(layout, loss, execution, table)
    options = options_of(layout, execution)
    if layout.hosted or execution.offload:
        check_host_loops(layout.mesh, options)
    return layout, update, options


def update_of(layout: Layout, loss: Callable, run: Execution, table: Table | None) -> Update:
    """Return the way in which a step updates its state."""
    if run.optimizer_in_backward:
        layers = LayerUpdatePlane.of(context_of(layout, loss, run, True, kept_gathered(run)))
        return InBackwardUpdate(layout, layers.plane, layers)
    plane, schedule = data_plane(layout, loss, run, table), run.schedule
    stages = layout.mesh.shape[PIPE_AXIS]
    versions = schedule.versions(stages) if isinstance(schedule, Schedule) else None
    if versions is not None and isinstance(plane, PipelinePlane):
        return AsynchronousUpdate.of(layout, plane, versions)
    return (StreamedUpdate if layout.hosted else WholeUpdate)(layout, plane)


def data_plane(
    layout: Layout, loss: Callable, execution: Execution, table: Table | None = None
) -> Plane:
    """Return the data plane of a layout, one that follows a table if there is one.

    Planes differ in which split parameters they gather once for the whole step: those whose
    gradient accumulates whole, and, where our code runs the layers, all of them under
    reshard_after_forward=False.
    """
    once = execution.accumulate == 1
    kept = kept_gathered(execution)
    whole = lambda p: bool(p.split_dims("parameter")) and not p.split_dims("gradient")
    if table is not None:
        packed, fetched = layout.packed, lambda p: kept(p) or whole(p)
        no_ring = no_permutes(table, packed is not None, execution.remat)
        context = context_of(layout, loss, execution, False, fetched, no_ring)
        unlike = None if packed is None else partial(HeterogeneousModel, packed=packed)
        assert layout.arrangement is not None
        return PipelinePlane(context, layout.arrangement, compile_table(table), unlike)
    if layout.hosted.parameters and layout.blueprint.three_parts and not layout.forward:
        return LayerwisePlane(context_of(layout, loss, execution, once, kept))
    return AutodiffPlane(context_of(layout, loss, execution, once, whole))


def kept_gathered(run: Execution) -> Callable[[Placed], bool]:
    """Return whether a parameter stays gathered from its forward to its backward pass."""
    return lambda p: bool(p.split_dims("parameter")) and not run.reshard_after_forward


def context_of(
    layout: Layout,
    loss: Callable,
    execution: Execution,
    one_microbatch: bool,
    gathered_once: Callable[[Placed], bool],
    no_ring: str | None = None,
) -> StepContext:
    """Return what every plane knows of a step."""
    kernels = handed(layout, loss, execution, no_ring)
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


def handed(layout: Layout, loss: Callable, execution: Execution, no_ring: str | None) -> Local:
    """Return what modules are handed."""
    mesh = layout.mesh
    rows = SharedRows(execution.context, mesh, no_ring) if in_use(mesh, SEQUENCE_AXES) else None
    grid = Grid(mesh, layout.strategy.parameters) if on_grid(mesh) else None
    spread = SpreadExperts(mesh, execution.dispatch)
    return Kernels.of(execution.kernels, mesh, loss, rows, grid, spread)
