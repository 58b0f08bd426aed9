"""What a model asks of a step through its modules' `kernels`: attentions, mixtures of experts.

They are noted as a step notes them that shares rows (checks/probe_ops.py), so that a plan counts
the same calls, whosever the model is.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

from hfjax.checks.probe import looked
from hfjax.checks.probe_model import noted_along_rows
from hfjax.parallel.extensions.context_parallel.comm_kinds import AttentionCall
from hfjax.parallel.extensions.context_parallel.ops import OnSharedRows
from hfjax.parallel.extensions.expert_parallel.dispatch_kinds import MixtureCall
from hfjax.parallel.extensions.expert_parallel.expert_dispatch import mixture_call
from hfjax.parallel.settings import Context
from hfjax.planner.programs.planned_run import Planned
from hfjax.utils.paths import flatten
from hfjax.utils.tables import counted


@dataclass(frozen=True)
class ModelCalls:
    """The calls of all layers, for `rows` rows on one device.

    Attributes:
        rows: How many rows.
        attentions: The attentions; `times`: of how many layers each is.
        mixtures: The mixtures, and of how many layers each is.
    """

    rows: int = 1
    attentions: tuple[AttentionCall, ...] = ()
    mixtures: tuple[tuple[MixtureCall, int], ...] = ()


def calls_of(parts: Planned) -> ModelCalls:
    """Return what the model of a run asks for; none where rows have no positions."""
    if parts.task.unit != "tokens":
        return ModelCalls()
    context = parts.step.plane.context
    handed, rows = context.traced.kernels, parts.config.batch
    asked = replace(handed.step, mixtures=[])
    look = partial(noted_along_rows, OnSharedRows(asked, handed.kernels, Context()))
    variables = flatten(parts.layout.abstract_state().variables)
    noted, _ = looked(context, variables, parts.batch, "train", look)
    mixtures = Counter(mixture_call(1, *given) for given in asked.mixtures)
    return ModelCalls(rows, tuple(counted(noted.calls, "times")), tuple(mixtures.items()))
