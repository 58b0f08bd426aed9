"""How a step is built: `train_step` makes the `Execution`, then `build_step` calls, in order:

1. `check_step_arguments`: a layout and a loss (checks/check_step.py).
2. `assign_stages`: puts layers on the stages of the schedule (sharding/stage_assignment.py).
3. `check_execution`: what does not go together, or has no effect (checks/check_step.py).
4. `check_optimizer`: one that packed or separate layers would mislead (checks/optimizers.py).
5. `training_table`: which stage does what in which tick (sharding/stage_assignment.py).
6. `step_spec`, `update_for`: how the state is updated, and the engine that runs the model.
7. `options_for`: XLA's compiler options (sharding/xla_options.py).
8. `check_host_loops`: whether XLA reads host memory back (parallel/offload/check_host_loops.py).

Then `jax.jit`, and `check_deadlock` (checks/deadlock.py), which reads the compiled program. Only
here and in `step_spec` are engines, updates and the operations of modules chosen, and imported once
they are: a step on one axis loads no pipeline.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from hfjax.checks.check_step import check_execution, check_step_arguments
from hfjax.checks.optimizers import check_optimizer
from hfjax.checks.probe_model import probe_model
from hfjax.optimizer_step.sharded import ShardedUpdate
from hfjax.optimizer_step.update import Update
from hfjax.parallel.engine.gradient_engine import AutodiffEngine, GradientEngine
from hfjax.parallel.engine.model_ops import TraceRecord
from hfjax.parallel.engine.step_context import (
    StepContext,
    params_gathered_once,
    scatter_gradients_early,
)
from hfjax.parallel.execution import Execution
from hfjax.parallel.offload.check_host_loops import check_host_loops
from hfjax.parallel.spmd.interpreter import run_partitioned
from hfjax.sharding.layout import Layout
from hfjax.sharding.stage_assignment import assign_stages, training_table
from hfjax.sharding.xla_options import Options, options_for
from hfjax.step.step_spec import StepSpec, module_ops_for, step_spec
from hfjax.utils.paths import Flat


def build_step(
    layout: Layout, loss: Callable, execution: Execution
) -> tuple[StepSpec, Update, Options]:
    """Return a step before it is jitted: its spec, its update, XLA's options."""
    check_step_arguments(layout, loss)
    layout = assign_stages(layout, execution.schedule)
    check_execution(layout, execution, training=True)
    check_optimizer(layout, execution)
    table = training_table(layout, execution.schedule)
    spec = step_spec(layout, loss, execution, table)
    update, options = update_for(spec), options_for(layout, execution)
    if layout.host_memory or execution.offload:
        check_host_loops(layout.mesh, options)
    return spec, update, options


def update_for(spec: StepSpec) -> Update:
    """Return how a step updates its state."""
    layout, execution = spec.layout, spec.execution
    if execution.optimizer_in_backward:
        from hfjax.optimizer_step.in_backward import InBackwardUpdate
        from hfjax.parallel.layerwise.engines import LayerUpdateEngine

        context = step_context(spec, one_microbatch=True, include_kept_unsharded=True)
        layer_engine = LayerUpdateEngine.of(context)
        return InBackwardUpdate(layout, layer_engine.engine, layer_engine)
    engine: Any = engine_for(spec)
    schedule = execution.schedule
    if spec.table is not None and schedule and schedule.asynchronous:
        from hfjax.optimizer_step.async_pipeline import AsynchronousUpdate

        return AsynchronousUpdate.build(layout, engine, schedule)
    if layout.host_memory:
        from hfjax.optimizer_step.cpu_offload import StreamedUpdate

        return StreamedUpdate(layout, engine, spec.is_layerwise)
    return ShardedUpdate(layout, engine)


def engine_for(spec: StepSpec) -> GradientEngine:
    """Return the engine that runs the model forward and backward."""
    layout, table, storage = spec.layout, spec.table, spec.layout.storage
    one_microbatch = spec.execution.gradient_accumulation_steps == 1
    if table is not None:
        from hfjax.parallel.extensions.uneven_stages.stage_units import UnevenStageModel
        from hfjax.parallel.pipeline.engine import PipelineEngine
        from hfjax.parallel.schedules.compile import compile_table

        context = step_context(spec, include_kept_unsharded=True, include_full_gradients=True)
        model_factory = storage.packed and partial(UnevenStageModel, packed=storage.packed)
        assert storage.arrangement is not None
        return PipelineEngine(context, storage.arrangement, compile_table(table), model_factory)
    if layout.host_memory.parameters and layout.template.is_layer_stack and not layout.forward:
        from hfjax.parallel.layerwise.engines import LayerwiseEngine

        return LayerwiseEngine(step_context(spec, one_microbatch, include_kept_unsharded=True))
    context = step_context(spec, one_microbatch, include_full_gradients=True)
    if context.is_layer_stack:
        from hfjax.parallel.layer_stack.model import LayerStackModel

        return AutodiffEngine(context, LayerStackModel(context))
    from hfjax.parallel.whole_model.model import WholeModel

    return AutodiffEngine(context, WholeModel(context))


def probe_engine(
    spec: StepSpec, variables: Flat, batch: Any, mode: str, extra: Any = None
) -> GradientEngine:
    """Return the engine of a pass, which has read the model."""
    engine = engine_for(spec)
    probe_model(engine, variables, batch, mode, extra)
    return engine


def step_context(spec: StepSpec, one_microbatch=False, **gather_options: bool) -> StepContext:
    """Return the context of an engine; `gather_options`: what is gathered once per step."""
    layout, execution, ops = spec.layout, spec.execution, module_ops_for(spec)
    specs = scatter_gradients_early(layout.param_specs) if one_microbatch else layout.param_specs
    trace = TraceRecord.of(ops, execution, layout.mesh, run_partitioned)
    gathered = params_gathered_once(specs, execution, **gather_options)
    template, mesh, forward = layout.template.with_ops(ops), layout.mesh, layout.forward
    return StepContext(
        template, specs, mesh, execution, spec.loss, forward, trace, one_microbatch, gathered
    )
