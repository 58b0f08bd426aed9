"""The attentions that a model calls, read in its programs: `find_attention_calls`."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import Jaxpr
from jax.sharding import Mesh

from hfjax.parallel.engine.model_ops import Component
from hfjax.parallel.extensions.context_parallel.comm_kinds import AttentionCall
from hfjax.parallel.jaxprs.walk import equations_in
from hfjax.parallel.mesh import TENSOR_AXES, size_of
from hfjax.parallel.spmd.partition_context import PartitionContext
from hfjax.parallel.spmd.rule_calls import RuleCall, call_of


@dataclass(frozen=True, eq=False)
class AttentionRule:
    """The rule of an attention that stays one call in a program of full sequences."""

    run: Callable
    attend: Callable

    def __call__(self, call: RuleCall, ctx: PartitionContext, body: Any, arguments: Any) -> Any:
        return self.run(self.attend, call, ctx, body, arguments)


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
    for equation, count in equations_in(jaxpr, times):
        call = call_of(equation)
        if call and isinstance(call.rule, AttentionRule):
            yield call.rule, call, count


def is_attention(operands: Sequence[Any], results: Sequence[Any], length: int) -> bool:
    """Return whether shapes are those of attention of full sequences: q, k, v [B, S, H, D]."""
    have_heads = all(len(x.shape) == 4 for x in (*operands[:3], *results))
    have_length = all(len(x.shape) > 1 and x.shape[1] == length for x in (*operands, *results))
    is_single = have_heads and have_length and len(results) == 1
    return is_single and results[0].shape[2] == operands[0].shape[2]
