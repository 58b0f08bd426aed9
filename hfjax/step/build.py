"""What a step is made of, in the order in which it happens: a recipe.

`train_step(…)` checks its keywords and makes the `Execution`, which checks each setting. Then come
these stations, each a call in `training`:

1. `check_given`: a layout and a loss (checks/check_step.py).
2. `on_stages`: the layers go where the schedule wants them (sharding/stage_assignment.py).
3. `check_runs`: what does not go together, or has nothing to do (checks/check_step.py).
4. `check_optimizer`: one that packed or separate layers would mislead (checks/optimizers.py).
5. `table_of`: which stage does what in which tick (sharding/stage_assignment.py).
6. `ingredients`, `update_of`: how the state is updated; in it the plane that runs the model.
7. `options_of`: what XLA is told (sharding/xla_options.py).
8. `check_host_loops`: if the host keeps something, whether XLA brings it back (autodiff).

Then `jax.jit`, and `checked` (checks/deadlock.py) around it, which reads what XLA compiled. Only
here planes, updates and what modules are handed are chosen; again where a `look` at a model told.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

from hfjax.checks.check_step import check_given, check_runs
from hfjax.checks.optimizers import check_optimizer, takes_layers_alone
from hfjax.optimizer_step.async_pipeline import AsynchronousUpdate
from hfjax.optimizer_step.cpu_offload import StreamedUpdate
from hfjax.optimizer_step.in_backward import InBackwardUpdate
from hfjax.optimizer_step.sharded import WholeUpdate
from hfjax.optimizer_step.update import Update
from hfjax.parallel.activation_sharding import Placer
from hfjax.parallel.engine.gradient_engine import AutodiffPlane, Plane
from hfjax.parallel.engine.model_ops import Asked, Local, Traced
from hfjax.parallel.engine.step_context import StepContext, gathered_once, gradients_at_moments
from hfjax.parallel.execution import Execution
from hfjax.parallel.extensions.context_parallel.ops import OnSharedRows
from hfjax.parallel.extensions.expert_parallel.expert_dispatch import SpreadExperts
from hfjax.parallel.extensions.kernel_dispatch.ops import Kernels, WithKernels
from hfjax.parallel.extensions.tensor_grid.ops import OnGrid
from hfjax.parallel.extensions.uneven_stages.stage_units import HeterogeneousModel
from hfjax.parallel.layer_stack.model import InThreeParts
from hfjax.parallel.layerwise.engines import LayerUpdatePlane, LayerwisePlane
from hfjax.parallel.mesh import SEQUENCE_AXES, in_use, sides
from hfjax.parallel.offload.check_host_loops import check_host_loops
from hfjax.parallel.pipeline.engine import PipelinePlane, no_permutes
from hfjax.parallel.schedules.compile import compile_table
from hfjax.parallel.schedules.table import Table
from hfjax.parallel.spmd.interpreter import in_parts
from hfjax.parallel.whole_model.model import CalledAsItIs
from hfjax.sharding.layout import Layout
from hfjax.sharding.stage_assignment import on_stages, table_of
from hfjax.sharding.xla_options import Options, options_of


class Ingredients(NamedTuple):
    """What a step is made of; kernels and experts tell what was chosen, once it is traced."""

    layout: Layout
    loss: Callable
    run: Execution
    table: Table | None
    kernels: Kernels
    experts: SpreadExperts
    layers_alone: Callable[[], bool]


def ingredients(layout: Layout, loss: Callable, run: Execution, table: Table | None) -> Ingredients:
    """Return what a step is made of that follows a table, if there is one."""
    kernels = Kernels.of(run.kernels, layout.mesh, loss)
    experts = SpreadExperts(layout.mesh, run.dispatch)
    alone = cache(partial(takes_layers_alone, layout))
    return Ingredients(layout, loss, run, table, kernels, experts, alone)


def training(layout: Layout, loss: Callable, run: Execution) -> tuple[Ingredients, Update, Options]:
    """Return a step before it is jitted: what it is made of, its update, XLA's options."""
    check_given(layout, loss)
    layout = on_stages(layout, run.schedule)
    check_runs(layout, run, training=True)
    check_optimizer(layout, run)
    table = table_of(layout, run.schedule)
    made_of = ingredients(layout, loss, run, table)
    update, options = update_of(made_of), options_of(layout, run)
    if layout.hosted or run.offload:
        check_host_loops(layout.mesh, options)
    return made_of, update, options


def update_of(made_of: Ingredients, seen: Local | None = None) -> Update:
    """Return the way in which a step updates its state; `seen` is what a look at the model told."""
    layout, run = made_of.layout, made_of.run
    if run.optimizer_in_backward:
        layers = LayerUpdatePlane.of(step_context(made_of, seen, alone=True, kept=True))
        return InBackwardUpdate(layout, layers.plane, layers)
    plane = data_plane(made_of, seen)
    if run.schedule and run.schedule.asynchronous and isinstance(plane, PipelinePlane):
        return AsynchronousUpdate.of(layout, plane, run.schedule)
    if layout.hosted:
        return StreamedUpdate(layout, plane, made_of.layers_alone)
    return WholeUpdate(layout, plane)


def data_plane(made_of: Ingredients, seen: Local | None = None) -> Plane:
    """Return what runs the model forward and backward."""
    layout, run, table, stored = made_of.layout, made_of.run, made_of.table, made_of.layout.storage
    if table is not None:
        context = step_context(made_of, seen, kept=True, whole=True)
        unlike = stored.packed and partial(HeterogeneousModel, packed=stored.packed)
        assert stored.arrangement is not None
        return PipelinePlane(context, stored.arrangement, compile_table(table), unlike)
    if layout.hosted.parameters and layout.blueprint.three_parts and not layout.forward:
        return LayerwisePlane(step_context(made_of, seen, run.accumulate == 1, kept=True))
    context = step_context(made_of, seen, run.accumulate == 1, whole=True)
    return AutodiffPlane(context, (InThreeParts if context.in_parts else CalledAsItIs)(context))


def step_context(
    made_of: Ingredients, seen: Local | None, alone=False, **once: bool
) -> StepContext:
    """Return what a plane knows; `alone`: of one microbatch; `once`: what is gathered once."""
    layout, run, kernels = made_of.layout, made_of.run, seen or handed(made_of)
    placed = gradients_at_moments(layout.placed) if alone else layout.placed
    return StepContext(
        blueprint=layout.blueprint.equipped(kernels),
        placed=placed,
        mesh=layout.mesh,
        execution=run,
        loss=made_of.loss,
        forward=layout.forward,
        traced=Traced.of(kernels, run, layout.mesh, in_parts),
        one_microbatch=alone,
        gathered_for_step=gathered_once(placed, run, **once),
    )


def handed(made_of: Ingredients) -> Local:
    """Return what modules are handed: what they ask of a step on this mesh."""
    layout, loss, run, table, kernels, experts, _ = made_of
    asked = Asked(Placer(layout.mesh, layout.strategy), experts.run, loss)
    if sides(layout.mesh):
        grid = layout.strategy.parameters, kernels.without_logits, run.rows == "own"
        return OnGrid(asked, layout.mesh, *grid)
    if in_use(layout.mesh, SEQUENCE_AXES):
        listed, blueprint = bool(layout.storage.packed), layout.blueprint
        no_ring = table and no_permutes(table, listed, run.remat, blueprint)
        return OnSharedRows(asked, kernels, run.context, no_ring)
    return WithKernels(asked, kernels)
