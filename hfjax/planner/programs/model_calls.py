"""Records what a model asks of a step through its modules' `kernels`: attention and experts.

Calls are recorded as in a step that shards the sequence (extensions/context_parallel), so that a
plan counts the same calls, for any model.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from hfjax.checks.probe import probe_local, trace_components
from hfjax.parallel.engine.model_ops import Component
from hfjax.parallel.engine.step_context import StepContext
from hfjax.parallel.extensions.context_parallel.attention_calls import find_attention_calls
from hfjax.parallel.extensions.context_parallel.comm_kinds import AttentionCall
from hfjax.parallel.extensions.context_parallel.ops import (
    ContextParallelOps,
    sequence_dims,
    sequence_length,
)
from hfjax.parallel.extensions.expert_parallel.dispatch_kinds import MixtureCall
from hfjax.parallel.extensions.expert_parallel.expert_dispatch import mixture_call
from hfjax.parallel.settings import ContextParallel
from hfjax.planner.programs.planned_run import PlannedRun
from hfjax.utils.paths import Flat, flatten
from hfjax.utils.tables import count_equal


@dataclass(frozen=True)
class ModelCalls:
    """The calls of all layers, for `batch_size` examples on one device.

    Attributes:
        batch_size: Number of examples.
        attentions: The attention calls; `times`: number of layers that have each.
        mixtures: The calls of mixtures of experts, and the number of layers that have each.
    """

    batch_size: int = 1
    attentions: tuple[AttentionCall, ...] = ()
    mixtures: tuple[tuple[MixtureCall, int], ...] = ()


def calls_of(run: PlannedRun) -> ModelCalls:
    """Return the calls of a run's model; none where examples have no positions."""
    if run.task.unit != "tokens":
        return ModelCalls()
    context, batch_size = run.step.engine.context, run.config.global_batch_size
    inputs, kernels = context.trace.ops.inputs, context.trace.ops.kernels
    inputs = replace(inputs, mixtures=[])
    ops = ContextParallelOps(inputs, kernels, ContextParallel())
    context = replace(context, template=context.template.with_ops(ops))
    mixtures: Counter[MixtureCall] = Counter()

    def count_mixtures(components: Iterable[Component]) -> Iterator[Component]:
        for component in components:
            for arguments in inputs.mixtures:
                mixtures[mixture_call(1, *arguments)] += component.times
            inputs.mixtures.clear()
            yield component

    def find_calls(context: StepContext, variables: Flat, batch: Any, mode: str) -> list[Any]:
        batch, group = context.template.prepare_batch(batch), context.batch_group
        length = sequence_length(batch, sequence_dims(batch))
        components = count_mixtures(trace_components(context, variables, batch, mode, group))
        return list(find_attention_calls(components, length, group.size, ops.mesh))

    variables = flatten(run.layout.abstract_state().variables)
    attentions = probe_local(context, variables, run.batch, "train", find_calls)
    return ModelCalls(batch_size, tuple(count_equal(attentions, "times")), tuple(mixtures.items()))
