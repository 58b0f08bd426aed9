"""Probes a model before it is run: `probe_model_ops`.

With context parallelism: which attentions it calls, and so how they communicate.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import jax

from hfjax.checks.probe import probe_jaxpr, probe_local
from hfjax.checks.probe_ops import AttentionRecorder
from hfjax.checks.upcasts import check_matmuls
from hfjax.parallel.adapters.model_template import ModelTemplate
from hfjax.parallel.engine.gradient_engine import GradientEngine
from hfjax.parallel.engine.model_ops import ModelOps
from hfjax.parallel.engine.step_context import StepContext
from hfjax.parallel.extensions.context_parallel.comm_kinds import ContextChoice, choose_comm_kind
from hfjax.parallel.extensions.context_parallel.ops import (
    ContextParallelOps,
    SequenceProbe,
    sequence_dims,
)
from hfjax.parallel.precision.by_path import PrecisionByPath
from hfjax.parallel.spmd.placements import AxisGroup
from hfjax.utils.paths import Flat


def probe_context_parallel(
    ops: ContextParallelOps, context: StepContext, variables: Flat, batch: Any, mode: str
) -> ContextParallelOps:
    """Return the operations for modules, given the attentions that the model calls.

    Args:
        ops: The operations for modules.
        context: The context of the step.
        variables: Those of the model, also those that hold random keys.
        batch: With the examples of this device.
        mode: "train" or "eval"; "predict" is "eval" here.
    """
    recorder, dims = record_attention_calls(ops, context, variables, batch, mode)
    choice = choose_comm_kind(ops.settings, ops.devices, recorder.calls, ops.ring_refusal)
    choice.seq_layout.check_length(recorder.length, "a batch")
    return replace(ops, probe_or_none=SequenceProbe(choice, recorder.length, dims))


def record_attention_calls(
    ops: ContextParallelOps, context: StepContext, variables: Flat, batch: Any, mode: str
) -> tuple[AttentionRecorder, Any]:
    """Return a model's attention calls, and the sequence dimension of each array of a batch.

    The arguments are those of `probe_context_parallel`.
    """
    global_batch = context.template.prepare_batch(batch)
    dims = sequence_dims(global_batch, ops.settings.sequence)
    length = _sequence_length(global_batch, dims)
    recorder = AttentionRecorder(ops.inputs, ops, length, context.batch_group.size)
    recording_context, group = (
        replace(context, template=context.template.with_ops(recorder)),
        context.batch_group,
    )
    wide_group = AxisGroup((*group.axes, *ops.axes), group.size * ops.devices)
    probe_jaxpr(recording_context, variables, global_batch, mode, wide_group, recorder.repeat_calls)
    return recorder, dims


def _sequence_length(batch: Any, dims: Any) -> int:
    """Return the sequence length of a batch."""
    lengths = {
        jax.tree_util.keystr(keys, simple=True, separator="/"): x.shape[dim]
        for (keys, x), dim in zip(
            jax.tree_util.tree_leaves_with_path(batch),
            jax.tree.leaves(dims, is_leaf=lambda x: x is None),
            strict=True,
        )
        if dim is not None
    }
    if len(set(lengths.values())) != 1:
        lengths_text = ", ".join(f"{path} {size}" for path, size in lengths.items()) or "none"
        raise ValueError(
            "the devices of context share sequences, so that all arrays of a batch have the same "
            f"number of positions; found {lengths_text} (dimension 1). Which dimension is the "
            'sequence can be said: hfjax.ContextParallel(sequence={"tokens": 1, "image": None}).'
        )
    return next(iter(lengths.values()))


def context_choice(ops: ModelOps) -> ContextChoice | None:
    """Return how devices that share sequences work together; None: none do, or not probed."""
    choices = ops.probe_or_none if isinstance(ops, ContextParallelOps) else None
    return choices and choices.choice


def probe_model_ops(
    engine: GradientEngine, template: ModelTemplate, variables: Flat, batch: Any, mode: str
) -> ModelOps | None:
    """Probe a model and return the operations for its modules; None: they do not change.

    `template` is the model as it was given, whose modules have no operations.
    """
    context, ops = engine.context, engine.context.trace.ops
    if isinstance(precision := context.execution.precision, PrecisionByPath):
        probe_local(context, variables, batch, mode, partial(check_matmuls, precision, template))
    probe = partial(probe_context_parallel, ops) if isinstance(ops, ContextParallelOps) else None
    return probe and probe_local(context, variables, batch, mode, probe)
