"""What a step is built from (`StepSpec`), and the operations that its modules may call."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from hfjax.checks.optimizers import has_layerwise_update
from hfjax.parallel.activation_sharding import Placer
from hfjax.parallel.engine.model_ops import ModelOps, OpsInputs
from hfjax.parallel.execution import Execution
from hfjax.parallel.extensions.expert_parallel.expert_dispatch import ExpertDispatch
from hfjax.parallel.extensions.kernel_dispatch.ops import Kernels, WholeSequenceOps
from hfjax.parallel.mesh import SEQUENCE_AXES, grid_axes, in_use
from hfjax.parallel.precision.auto import auto_precision, replace_auto
from hfjax.parallel.precision.by_path import parse_precision
from hfjax.parallel.schedules.table import Table
from hfjax.sharding.layout import Layout


class StepSpec(NamedTuple):
    """What a step is built from; kernels and experts report what was chosen, once it is traced."""

    layout: Layout
    loss: Callable
    execution: Execution
    table: Table | None
    kernels: Kernels
    experts: ExpertDispatch
    is_layerwise: Callable[[], bool]


def step_spec(
    layout: Layout, loss: Callable, execution: Execution, table: Table | None
) -> StepSpec:
    """Return what a step is built from; `table` is that of its pipeline."""
    kernels = Kernels.of(execution.kernels, layout.mesh, loss)
    experts = ExpertDispatch(layout.mesh, execution.dispatch)
    is_layerwise = cache(partial(has_layerwise_update, layout))
    return StepSpec(layout, loss, execution, table, kernels, experts, is_layerwise)


def precision_for(layout: Layout, precision: Any) -> Any:
    """Return a precision as `Execution` takes it: "auto" is that of the layout's devices."""
    dtypes = (p.dtype for p in layout.param_specs.values())
    word = auto_precision(layout.mesh.devices.flat[0], dtypes)
    return parse_precision(replace_auto(precision, word))


def module_ops_for(spec: StepSpec) -> ModelOps:
    """Return the operations that modules may call in a step on this mesh."""
    layout, loss, execution, table, kernels, experts, _ = spec
    inputs = OpsInputs(Placer(layout.mesh, layout.strategy), experts.run, loss)
    if grid_axes(layout.mesh):
        from hfjax.parallel.extensions.tensor_grid.ops import GridOps

        is_local = execution.batch_view == "local"
        grid_options = layout.strategy.parameters, kernels.without_logits, is_local
        return GridOps(inputs, layout.mesh, *grid_options)
    if in_use(layout.mesh, SEQUENCE_AXES):
        from hfjax.parallel.extensions.context_parallel.ops import ContextParallelOps
        from hfjax.parallel.pipeline.engine import permute_refusal

        packed, remat = bool(layout.storage.packed), execution.remat
        no_ring = table and permute_refusal(table, packed, remat, layout.template)
        return ContextParallelOps(inputs, kernels, execution.context, no_ring)
    return WholeSequenceOps(inputs, kernels)
