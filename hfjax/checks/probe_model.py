"""Reads a model before it runs: `probe_model`."""

from functools import partial
from typing import Any

from hfjax.checks.probe import probe_local, trace_components
from hfjax.checks.upcasts import check_matmuls
from hfjax.parallel.engine.gradient_engine import GradientEngine
from hfjax.parallel.engine.step_context import StepContext
from hfjax.parallel.precision.by_path import PrecisionByPath
from hfjax.utils.paths import Flat


def probe_model(engine: GradientEngine, variables: Flat, batch: Any, mode: str) -> None:
    """Check the dtypes of a model's matmuls, and let the operations of its modules read it."""
    context, count = engine.context, engine.num_microbatches
    probe = partial(probe_local, context, variables, batch, mode, num_microbatches=count)
    if isinstance(precision := context.execution.precision, PrecisionByPath):
        probe(partial(check_matmuls, precision))
    if context.trace.ops.reads_model:
        probe(_let_ops_read)
        context.trace.set_inner_groups()


def _let_ops_read(context: StepContext, variables: Flat, batch: Any, mode: str) -> None:
    """Let the operations of modules read the components of the model."""
    trace = lambda batch, group: trace_components(context, variables, batch, mode, group)
    batch = context.template.prepare_batch(batch)
    context.trace.ops.read_model(batch, context.batch_group, trace)
