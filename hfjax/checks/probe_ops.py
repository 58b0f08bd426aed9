"""What a look at a model hands its modules in place of `OnSharedRows`: it notes what they ask for.

Rows are whole, nothing is dealt and nothing sent.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import jax

from hfjax.parallel.engine import model_ops
from hfjax.parallel.engine.comm_plan import by_xla
from hfjax.parallel.extensions.context_parallel.comm_kinds import AttentionCall
from hfjax.parallel.extensions.context_parallel.ops import OnSharedRows, is_attention, operands_of
from hfjax.parallel.extensions.kernel_dispatch import batch_stats
from hfjax.parallel.jaxprs.split_backward import zeros_like
from hfjax.parallel.mesh import TENSOR_AXES, size_of


@final
@dataclass(frozen=True, eq=False)
class AlongRows(model_ops.InStep):
    """Notes the attentions that a model asks for.

    Attributes:
        rows: What it stands for.
        length: That of the rows.
        parts: On how many devices other rows lie.
        calls: The attentions.
    """

    rows: OnSharedRows
    length: int
    parts: int
    calls: list[AttentionCall] = field(default_factory=list)

    @contextmanager
    def counted(self, times: int) -> Iterator[None]:
        """Note what a layer asks for that is traced within, for so many like it."""
        mixtures = self.step.mixtures
        before, mixed = len(self.calls), len(mixtures)
        yield
        self.calls[before:] = [replace(call, times=times) for call in self.calls[before:]]
        mixtures[mixed:] *= times

    def attention(self, attend: Callable) -> Callable:
        """Return what notes an attention, and makes something of the shape of its result."""
        return lambda *given, **named: self._noted(attend, *operands_of(attend, given, named))

    def _noted(self, attend: Callable, *operands: Any) -> Any:
        (q, k, v, *rest), shards = operands, size_of(TENSOR_AXES, self.rows.mesh)
        found = jax.eval_shape(attend, *operands)
        if is_attention(operands, jax.tree.leaves(found), self.length):
            call = AttentionCall(
                rows=q.shape[0] // self.parts,
                positions=self.length,
                heads=q.shape[2] // shards,
                key_heads=k.shape[2] // shards,
                width=q.shape[3],
                itemsize=q.dtype.itemsize,
                documents=len(rest) > 0,
                window=getattr(attend, "window", None),
                own=not getattr(attend, "is_causal_attention", False),
                value_width=None if v.shape[3] == q.shape[3] else v.shape[3],
            )
            self.calls.append(call)
        return zeros_like(found)

    def matmul(self, place: Any, between: tuple, multiply: Callable) -> Callable:
        """Return the product as it is."""
        return multiply

    def sum_over_batch(self, x: jax.Array) -> jax.Array:
        """Return sums as they are."""
        return x

    moments = batch_stats.of_rows
    outputs, run_length = model_ops.made_logits, model_ops.all_here
    inner_sides, named_sides = model_ops.no_sides, model_ops.no_names
    check_positions, dealt = model_ops.none_joined, model_ops.whole_batch
    lookup, sender = model_ops.rows_of_table, staticmethod(by_xla)
