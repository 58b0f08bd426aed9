"""Reads a model before it runs: `probe_model`."""

from functools import partial
from typing import Any

from hfjax.parallel.engine.gradient_engine import GradientEngine
from hfjax.parallel.engine.step_context import StepContext
from hfjax.parallel.precision.by_path import PrecisionByPath
from hfjax.utils.paths import Flat


def probe_model(
    engine: GradientEngine, variables: Flat, batch: Any, mode: str, extra: Any = None
) -> None:
    """Check the dtypes of a model's matmuls, and let the operations of its modules read it."""
    context = engine.context
    context.trace.extra = extra
    precision, ops = context.execution.precision, context.trace.ops
    if not (ops.reads_model() or isinstance(precision, PrecisionByPath)):
        return
    from hfjax.checks.probe import probe_local, trace_components
    from hfjax.checks.upcasts import check_matmuls

    def let_ops_read(context: StepContext, variables: Flat, batch: Any, mode: str) -> None:
        trace = lambda batch, group: trace_components(context, variables, batch, mode, group)
        ops.read_model(context.template.prepare_batch(batch), context.batch_group, trace)

    count = engine.num_microbatches
    probe = partial(probe_local, context, variables, batch, mode, num_microbatches=count)
    if ops.reads_model():  # first: what a module asks of them depends on it
        probe(let_ops_read)
        context.trace.set_inner_groups()
    if isinstance(precision, PrecisionByPath):
        probe(partial(check_matmuls, precision))
