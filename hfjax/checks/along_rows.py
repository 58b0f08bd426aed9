"""What a look at a model hands its modules in place of `OnSharedRows`: it notes what they ask for.

Nothing is dealt and nothing sent: rows are whole, of a length that may be another one.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, final

import jax
import jax.numpy as jnp
from jax.core import Tracer

from hfjax.checks.heads_alike import heads_alike, unlike_heads
from hfjax.parallel.autodiff.program import piece
from hfjax.parallel.engine import local
from hfjax.parallel.mesh import TENSOR_AXES, size_of
from hfjax.parallel.wings.context.forms import AttentionCall
from hfjax.parallel.wings.context.on_shared_rows import OnSharedRows, operands_of


@final
@dataclass(frozen=True, eq=False)
class AlongRows(local.InStep):
    """Notes the attentions that a model asks for.

    Attributes:
        rows: What it stands for.
        real: The length of the rows that will come.
        length: Of the rows that are traced in their place.
        apart: Whether that divides no other dimension.
        tries: Whether attentions of the model's own are tried.
        calls: The attentions.
        closed: Shapes of arrays with positions that attentions of the model's own close over.
    """

    rows: OnSharedRows
    real: int
    length: int
    apart: bool
    tries: bool
    calls: list[AttentionCall] = field(default_factory=list)
    closed: list[tuple[int, ...]] = field(default_factory=list)

    @contextmanager
    def counted(self, times: int) -> Iterator[None]:
        """Note what a layer asks for that is traced within, for so many like it."""
        before = len(self.calls)
        yield
        self.calls[before:] = [replace(call, times=times) for call in self.calls[before:]]

    def positions(self, length: int, names: local.Names = ()) -> jax.Array | None:
        """Return what is shaped as the numbers of positions; None: these are no rows."""
        if length != self.length and length * self.rows.devices == self.real:
            raise ValueError(
                f"{length} positions that are no part of the shared rows are as many as a "
                f"device has of these ({self.real} over {self.rows.devices}): which is meant "
                "cannot be told. Take another number of devices, or of positions."
            )
        return jnp.zeros(length, jnp.int32) if length == self.length else None

    def row_length(self, length: int, names: local.Names = ()) -> int:
        """Return how many positions the rows have that will come."""
        return self.real

    def attention(self, attend: Callable) -> Callable:
        """Return what notes an attention, and makes something of the shape of its result."""
        return lambda *given, **named: self._noted(attend, *operands_of(given, named))

    def _noted(self, plain: Callable, *operands: Any) -> jax.Array:
        """Note what is asked for; return something of the shape of what is attended to."""
        (q, k, v, *rest), shards = operands, self._shards
        if q.shape[1] != self.length or k.shape[1] != self.length:
            raise ValueError(
                f"attention of {self._shown(q.shape[1])} queries to {self._shown(k.shape[1])} "
                f"keys: those are not the {self.real} positions of the rows that devices share. "
                "AttentionCall the attention itself there, not by way of kernels.attention."
            )
        own = not getattr(plain, "is_causal_attention", False)
        if own and self.tries:
            self._try(plain, operands)
        self.calls.append(
            AttentionCall(
                rows=q.shape[0],
                positions=self.real,
                heads=q.shape[2] // shards,
                key_heads=k.shape[2] // shards,
                width=q.shape[3],
                itemsize=q.dtype.itemsize,
                documents=len(rest) > 0,
                window=getattr(plain, "window", None),
                whole_rows_only=own,
                value_width=None if v.shape[3] == q.shape[3] else v.shape[3],
            )
        )
        found = jax.eval_shape(plain, *operands)
        return jnp.zeros(found.shape, found.dtype)

    def _try(self, attend: Callable, operands: Sequence[Any]) -> None:
        """Note what an attention of the model's own closes over; else try its heads."""
        held = piece(attend, *map(jax.typeof, operands)).constants.values()
        closed = [x.shape for x in held if isinstance(x, Tracer) and self._has_positions(x.shape)]
        self.closed.extend(closed)
        if not closed and operands[0].shape[2] % (self.rows.devices * self._shards) == 0:
            self._try_heads(attend, operands)

    def _has_positions(self, shape: tuple[int, ...]) -> bool:
        return self.apart and any(size and size % self.length == 0 for size in shape)

    def _try_heads(self, attend: Callable, operands: Sequence[Any]) -> None:
        """Refuse an attention of the model's own that does not treat heads alike."""
        try:
            alike = heads_alike(attend, operands, self.rows.devices, self._shards)
        except Exception as error:  # a kernel for other devices, an array of this very length
            warnings.warn(
                "hfjax could not try whether the model's own attention treats heads alike "
                f"({type(error).__name__}: {str(error)[:200]}). If it does not, it is wrong here: "
                "Ulysses gives each device some of the heads.",
                UserWarning,
                stacklevel=2,
            )
            return
        if not alike:
            raise unlike_heads(
                "Ulysses", "another axis, or hfjax.Context(check=False) if you know better"
            )

    @property
    def _shards(self) -> int:
        """Over how many devices heads are split besides."""
        return size_of(TENSOR_AXES, self.rows.mesh)

    def _shown(self, size: int) -> int:
        """Return a size of the rows to come, of one of those that are traced in their place."""
        return size // self.length * self.real if size % self.length == 0 else size

    def mixed(self, mix: Callable[[], local.T], left_out: Callable[[], local.T]) -> local.T:
        """Leave out a mixture: positions meet in groups that no device cuts."""
        return left_out()

    def matmul(self, place: Any, between: tuple, multiply: Callable) -> Callable:
        """Return the product as it is."""
        return multiply

    outputs = local.made_logits
    run_length = local.all_here
    sum_over_row = sum_over_batch = counted_once = of_stream = undealt = local.as_it_is
    dealt, sender = local.whole_batch, local.by_xla
    mean, lookup, columns = local.mean_here, local.rows_of_table, local.all_columns
