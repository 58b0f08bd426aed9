"""Operations of a probe in place of `ContextParallelOps`: they record what modules call.

Sequences are whole: nothing is sliced, nothing is sent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import jax

from hfjax.parallel.engine import model_ops
from hfjax.parallel.engine.comm_plan import use_xla
from hfjax.parallel.extensions.context_parallel.comm_kinds import AttentionCall
from hfjax.parallel.extensions.context_parallel.ops import (
    ContextParallelOps,
    attention_operands,
    is_attention,
)
from hfjax.parallel.extensions.kernel_dispatch import batch_stats
from hfjax.parallel.jaxprs.split_backward import zeros_like
from hfjax.parallel.mesh import TENSOR_AXES, size_of


@final
@dataclass(frozen=True, eq=False)
class AttentionRecorder(model_ops.CommonOps):
    """Records the attentions that a model calls.

    Attributes:
        ops: The operations that it replaces.
        length: The sequence length.
        num_batch_shards: Number of devices over which the batch is sharded.
        calls: The attentions.
    """

    ops: ContextParallelOps
    length: int
    num_batch_shards: int
    calls: list[AttentionCall] = field(default_factory=list)

    @contextmanager
    def repeat_calls(self, times: int) -> Iterator[None]:
        """Record the calls of a layer traced within, for as many layers like it."""
        mixtures = self.inputs.mixtures
        num_calls, num_mixtures = len(self.calls), len(mixtures)
        yield
        self.calls[num_calls:] = [replace(call, times=times) for call in self.calls[num_calls:]]
        mixtures[num_mixtures:] *= times

    def attention(self, attend: Callable) -> Callable:
        """Return a function that records an attention and returns zeros like its result."""
        return lambda *args, **kwargs: self._record_and_make_zeros(
            attend, *attention_operands(attend, args, kwargs)
        )

    def _record_and_make_zeros(self, attend: Callable, *operands: Any) -> Any:
        (q, k, v, *rest), shards = operands, size_of(TENSOR_AXES, self.ops.mesh)
        out = jax.eval_shape(attend, *operands)
        if is_attention(operands, jax.tree.leaves(out), self.length):
            call = AttentionCall(
                batch_size=q.shape[0] // self.num_batch_shards,
                seq_len=self.length,
                heads=q.shape[2] // shards,
                key_heads=k.shape[2] // shards,
                width=q.shape[3],
                itemsize=q.dtype.itemsize,
                documents=len(rest) > 0,
                window=getattr(attend, "window", None),
                is_custom=not getattr(attend, "is_causal_attention", False),
                value_width=None if v.shape[3] == q.shape[3] else v.shape[3],
            )
            self.calls.append(call)
        return zeros_like(out)

    def matmul(self, place: Any, between: tuple, multiply: Callable) -> Callable:
        """Return the matmul unchanged."""
        return multiply

    def sum_over_batch(self, x: jax.Array) -> jax.Array:
        """Return sums unchanged."""
        return x

    channel_stats = batch_stats.batch_stats
    outputs, run_length = model_ops.make_logits, model_ops.full_length
    inner_groups, named_groups = model_ops.no_inner_groups, model_ops.no_named_groups
    check_positions, local_sequence_batch = model_ops.skip_position_check, model_ops.unsliced_batch
    lookup, choose_kernel = model_ops.lookup_table, staticmethod(use_xla)
