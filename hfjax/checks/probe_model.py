"""Reads a model before it runs: `probe_model`.

With context parallelism: which attentions it calls, and so how they communicate. With a precision
by path: whether each matmul is in the dtype that was asked for.
"""

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import jax
from jax.extend.core import Jaxpr
from jax.sharding import Mesh

from hfjax.checks.probe import Component, probe_local, trace_components
from hfjax.checks.upcasts import check_matmuls
from hfjax.parallel.engine.gradient_engine import GradientEngine
from hfjax.parallel.engine.model_ops import ModelOps
from hfjax.parallel.engine.step_context import StepContext
from hfjax.parallel.extensions.context_parallel.comm_kinds import (
    AttentionCall,
    ContextChoice,
    choose_comm_kind,
)
from hfjax.parallel.extensions.context_parallel.ops import (
    AttentionRule,
    ContextParallelOps,
    SequenceProbe,
    is_attention,
    sequence_dims,
)
from hfjax.parallel.jaxprs.program import bodies_of
from hfjax.parallel.mesh import TENSOR_AXES, size_of
from hfjax.parallel.precision.by_path import PrecisionByPath
from hfjax.parallel.spmd.placements import AxisGroup
from hfjax.parallel.spmd.rule_calls import RuleCall, call_of
from hfjax.utils.paths import Flat


def choose_sequence_comms(
    ops: ContextParallelOps, context: StepContext, variables: Flat, batch: Any, mode: str
) -> None:
    """Choose how the devices that share sequences attend, given the attentions of a model.

    Args:
        ops: The operations for modules, which keep the choice.
        context: The context of the step.
        variables: Those of the model, also those that hold random keys.
        batch: With the examples of this device in a microbatch.
        mode: "train", "eval" or "predict".
    """
    batch = context.template.prepare_batch(batch)
    dims = sequence_dims(batch, ops.settings.sequence)
    length, group = sequence_length(batch, dims), context.batch_group
    wide_group = AxisGroup((*group.axes, *ops.axes), group.size * ops.devices)
    ops.forget_choice()
    components = trace_components(context, variables, batch, mode, wide_group)
    calls = list(find_attention_calls(components, length, group.size, ops.mesh))
    choice = choose_comm_kind(ops.settings, ops.devices, calls, ops.ring_refusal)
    choice.seq_layout.check_length(length, "a batch")
    ops.choose(SequenceProbe(choice, length, dims))
    context.trace.set_inner_groups()


def find_attention_calls(
    components: Iterable[Component], length: int, num_batch_shards: int, mesh: Mesh
) -> Iterator[AttentionCall]:
    """Yield the attentions over full sequences of this length that components call."""
    tensor_shards = size_of(TENSOR_AXES, mesh)
    for component in components:
        for rule, call, times in _attentions_in(component.program.jaxpr, component.times):
            _, *operands = call.in_tree.unflatten(call.program.in_avals)
            if not is_attention(operands, call.program.out_avals, length):
                continue
            (q, k, v, *documents), attend = operands, rule.attend
            yield AttentionCall(
                batch_size=q.shape[0] // num_batch_shards,
                seq_len=length,
                heads=q.shape[2] // tensor_shards,
                key_heads=k.shape[2] // tensor_shards,
                width=q.shape[3],
                itemsize=q.dtype.itemsize,
                documents=len(documents) > 0,
                window=getattr(attend, "window", None),
                is_custom=not getattr(attend, "is_causal_attention", False),
                value_width=None if v.shape[3] == q.shape[3] else v.shape[3],
                times=times,
            )


def _attentions_in(jaxpr: Jaxpr, times: int) -> Iterator[tuple[AttentionRule, RuleCall, int]]:
    """Yield the attentions of a program, and how often each runs."""
    for equation in jaxpr.eqns:
        call = call_of(equation)
        if call and isinstance(call.rule, AttentionRule):
            yield call.rule, call, times
            continue
        trips = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for body, _ in bodies_of(equation):
            yield from _attentions_in(body, trips)


def sequence_length(batch: Any, dims: Any) -> int:
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
    probe = ops.probe_or_none if isinstance(ops, ContextParallelOps) else None
    return probe and probe.choice


def probe_model(engine: GradientEngine, variables: Flat, batch: Any, mode: str) -> None:
    """Read the model before it runs: which attentions it calls, in which dtypes it multiplies."""
    context, ops, count = engine.context, engine.context.trace.ops, engine.num_microbatches
    probe = partial(probe_local, context, variables, batch, mode, num_microbatches=count)
    if isinstance(precision := context.execution.precision, PrecisionByPath):
        probe(partial(check_matmuls, precision))
    if isinstance(ops, ContextParallelOps):
        probe(partial(choose_sequence_comms, ops))
