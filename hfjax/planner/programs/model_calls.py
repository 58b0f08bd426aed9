"""Records what a model asks of a step through its modules' `kernels`: attention and experts.

Calls are recorded as in a step that shards the sequence (checks/probe_ops.py), so that a plan
counts the same calls, for any model.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

from hfjax.checks.probe import probe_local
from hfjax.checks.probe_model import record_attention_calls
from hfjax.parallel.extensions.context_parallel.comm_kinds import AttentionCall
from hfjax.parallel.extensions.context_parallel.ops import ContextParallelOps
from hfjax.parallel.extensions.expert_parallel.dispatch_kinds import MixtureCall
from hfjax.parallel.extensions.expert_parallel.expert_dispatch import mixture_call
from hfjax.parallel.settings import ContextParallel
from hfjax.planner.programs.planned_run import PlannedRun
from hfjax.utils.paths import flatten
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
    context = run.step.engine.context
    ops, batch_size = context.trace.ops, run.config.global_batch_size
    common_ops = replace(ops.inputs, mixtures=[])
    probe = partial(
        record_attention_calls, ContextParallelOps(common_ops, ops.kernels, ContextParallel())
    )
    variables = flatten(run.layout.abstract_state().variables)
    ops_record, _ = probe_local(context, variables, run.batch, "train", probe)
    mixtures = Counter(mixture_call(1, *args) for args in common_ops.mixtures)
    return ModelCalls(
        batch_size, tuple(count_equal(ops_record.calls, "times")), tuple(mixtures.items())
    )
