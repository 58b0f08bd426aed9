"""A grid of devices: each linear map is split over `row` and over `tensor` (strategy GRID).

Agarwal's product of matrices in three dimensions, as AxoNN has it (Singh et al., 2023), with any
sides: fsdp x row x tensor. What flows lies in one of two ways:

- the stream, [B, S/tensor, D/row]: between the layers' parts; norms, dropout, additions;
- inside of attention and MLP, [B/row, S, F/tensor]: whole sequences, some rows, some heads.

A linear map leads from one to the other. Weights are [D/row, F/tensor] on each device; fsdp splits
them further, and they are gathered over it like all others. JAX derives the backward passes: every
scatter becomes a gather, every gather a scatter.

A model sees whole arrays. It is run on parts along `tensor` first, then along `row`
(parallel/in_parts). What a module asks for is kept by name and has a rule here; whatever else a
model does is run by its equations.

[B]atch: the rows of one place along data and fsdp. [S]equence, [D] embed, [F]: heads or mlp,
[V]ocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.sharding import Mesh

from hfjax.pallas_kernels.capabilities import Projection
from hfjax.parallel.engine import model_ops
from hfjax.parallel.engine.comm_plan import by_xla
from hfjax.parallel.extensions.kernel_dispatch import batch_stats
from hfjax.parallel.mesh import COLUMN_AXIS, ROW_AXIS, row_axes, size_of
from hfjax.parallel.spmd.partition_context import Scope
from hfjax.parallel.spmd.placements import Cut, Part, Side, is_value
from hfjax.parallel.spmd.rule_calls import NamedCall, named
from hfjax.parallel.strategy import Axes
from hfjax.utils.head import countable

source_info_util.register_exclusion(__file__)  # the line of what is asked for is the user's

BATCH, SEQUENCE, LAST = 0, 1, 2  # dimensions of an activation


@final
@dataclass(frozen=True)
class OnGrid(model_ops.InStep):
    """What modules ask for where row and tensor are larger than 1.

    Attributes:
        mesh: The mesh.
        splits: The strategy's rows of parameters: logical axis -> mesh axes.
        without_logits: Whether the loss takes a projection in place of logits.
        own_rows: Whether a model sees the rows of its own place along data and fsdp only.
    """

    mesh: Mesh
    splits: Mapping[str, Axes]
    without_logits: bool = False
    own_rows: bool = False
    moments, sum_over_batch = batch_stats.of_rows, model_ops.sum_over_samples

    def inner_sides(self) -> tuple[Side, ...]:
        """Return the devices along tensor, and those along row."""
        blocks = 1 if self.own_rows else size_of(row_axes(self.mesh), self.mesh)
        side = lambda axis: Side((axis,), self.mesh.shape[axis], axis, blocks=blocks)
        return side(COLUMN_AXIS), side(ROW_AXIS)

    def named_sides(self) -> Mapping[str, str]:
        """Return which side has parts of a dimension of parameters, by its name."""
        sides = (COLUMN_AXIS, ROW_AXIS)
        return {name: axes[0] for name, axes in self.splits.items() if axes and axes[0] in sides}

    def _part(self, side: Side) -> Cut:
        """Return what the stream, or the inside, has a part of along a side beside widths.

        Rows of the inside are parts of those that each place along data and fsdp has.
        """
        return Cut(SEQUENCE) if side.name == COLUMN_AXIS else Cut(BATCH, side.blocks)

    # -- linear maps ----------------------------------------------------------------------------

    def matmul(self, place: Any, between: tuple, multiply: Callable) -> Callable:
        """Return the product of a linear map between two named dimensions.

        One that leads neither out of the stream nor back is run by its equations.
        """
        into = self.leads_into(between)
        return multiply if into is None else named(partial(self._product, into), multiply)

    def leads_into(self, between: tuple[str | None, str | None]) -> bool | None:
        """Return whether a map leads out of the stream; False: back; None: neither."""
        ways: dict[tuple[Axes, ...], bool] = {
            ((ROW_AXIS,), (COLUMN_AXIS,)): True,
            ((COLUMN_AXIS,), (ROW_AXIS,)): False,
        }
        return ways.get(tuple(self.splits.get(name or "", ()) for name in between))

    def _product(self, into: bool, call: NamedCall, scope: Scope, body: Any, arguments: Any) -> Any:
        """Multiply along one side: gather what is not contracted, or scatter the sum.

        Into: the sequence comes together over tensor, and rows are dealt over row. Out of: the
        rows come together over row, and the sequence is dealt over tensor.
        """
        (x, kernel), side = arguments, scope.side
        shape = scope.shape(x)
        known = side.name in (COLUMN_AXIS, ROW_AXIS) and len(shape) == 3
        if not known or not isinstance(kernel, Part) or kernel.cut.outer > 1:
            return scope.run(scope, *body, jax.tree.leaves(arguments, is_leaf=is_value))
        gathers = (side.name == COLUMN_AXIS) == into
        at, contracted = self._part(side), kernel.cut.dim == 0
        if contracted == gathers or not side.divides(shape, at):
            return scope.run(scope, *body, jax.tree.leaves(arguments, is_leaf=is_value))
        if gathers:
            whole = self._whole(scope, x, at)
            return Part(call.again(whole, kernel.x), Cut(LAST))
        parts = call.again(scope.part(x, Cut(LAST)), kernel.x)
        return Part(_sum_of_parts(parts, side.name, at), at)

    def _whole(self, scope: Scope, x: Any, at: Cut) -> jax.Array:
        if not isinstance(x, Part) or x.cut != at:
            return scope.whole(x)
        return _gathered(x.x, scope.side.name, at)

    # -- the stream -----------------------------------------------------------------------------

    def lookup(self, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        """Return the row of each token; along tensor, which splits the table, of the stream."""
        return named(self._looked_up, partial(model_ops.rows_of_table, self))(table_VD, tokens_BS)

    def _looked_up(self, call: NamedCall, scope: Scope, body: Any, arguments: Any) -> Any:
        table, tokens = arguments
        if scope.side.name != COLUMN_AXIS or not isinstance(table, Part) or table.cut != Cut(0):
            return scope.run(scope, *body, jax.tree.leaves(arguments, is_leaf=is_value))
        tokens, at = scope.whole(tokens), Cut(SEQUENCE)
        self.check_length(tokens.shape[SEQUENCE])
        rows, sides = table.x.shape[0], scope.side.size
        count, tokens = rows * sides, countable(tokens)
        tokens = jnp.clip(jnp.where(tokens < 0, tokens + count, tokens), 0, count - 1)
        here = tokens - lax.axis_index(COLUMN_AXIS) * rows
        mine = (here >= 0) & (here < rows)
        found = jnp.where(mine[..., None], table.x[jnp.clip(here, 0, rows - 1)], 0)
        return Part(_sum_of_parts(found, COLUMN_AXIS, at), at)

    def check_length(self, length: int) -> None:
        """Refuse rows of a length that the devices along tensor cannot split."""
        sides = self.mesh.shape[COLUMN_AXIS]
        if length % sides:
            fits = [n for n in range(sides, 1, -1) if length % n == 0]
            raise ValueError(
                f"rows of {length} tokens: on a grid {COLUMN_AXIS}={sides} splits the sequence, "
                f"and has to divide it: {fits or 'only 1'} would. Take another length, or another "
                f"{COLUMN_AXIS}."
            )

    # -- inside ---------------------------------------------------------------------------------

    def attention(self, attend: Callable) -> Callable:
        """Return the attention to run; hfjax's own is run on the rows and heads that are here."""
        if not getattr(attend, "is_causal_attention", False):
            return attend
        run = named(self._attended, attend)
        by_position = partial(model_ops.by_position, attend)
        return lambda *given, **more: run(
            *(x for x in by_position(given, more)[0] if x is not None)
        )

    def _attended(self, call: NamedCall, scope: Scope, body: Any, arguments: Any) -> Any:
        q, *others = arguments
        known = scope.side.name in (COLUMN_AXIS, ROW_AXIS) and isinstance(q, Part)
        if not known or q.cut.dim not in (BATCH, LAST):
            return scope.run(scope, *body, jax.tree.leaves(arguments, is_leaf=is_value))
        has = lambda v: q.cut.dim == BATCH or len(scope.shape(v)) == 4  # documents have no heads
        if not all(scope.side.divides(scope.shape(v), q.cut) for v in others if has(v)):
            return scope.run(scope, *body, jax.tree.leaves(arguments, is_leaf=is_value))
        here = [scope.part(v, q.cut) if has(v) else scope.whole(v) for v in others]
        return Part(call.again(q.x, *here), q.cut)

    # -- the head and the loss --------------------------------------------------------------------

    def outputs(
        self, x_BSD: jax.Array, kernel_VD: jax.Array, vocab: int, logits: Callable | None = None
    ) -> Projection | jax.Array:
        """Return what the loss is given: what makes the losses, or logits."""
        if logits is not None:
            return logits()
        if self.without_logits:
            losses = named(partial(self._lost, vocab), partial(self._losses, vocab))
            return Projection(x_BSD, kernel_VD, losses)
        return self._logits(vocab, x_BSD, kernel_VD)

    def _logits(
        self, vocab: int, x_BSD: jax.Array, kernel_VD: jax.Array, first: Any = 0, shards: int = 1
    ) -> jax.Array:
        """Return logits, the first of this number; those that pad the vocabulary are masked."""
        flat = lambda x, kernel: (x.reshape(-1, x.shape[-1]) @ kernel).reshape(*x.shape[:-1], -1)
        logits = self.matmul(None, ("embed", "vocab"), flat)(x_BSD, kernel_VD.T)
        if vocab == kernel_VD.shape[0] * shards:
            return logits
        numbers = first + lax.broadcasted_iota("int32", (1, 1, logits.shape[-1]), 2)
        return jnp.where(numbers < vocab, logits, jnp.finfo(logits.dtype).min)

    def _losses(
        self, vocab: int, x_BSD: jax.Array, kernel_VD: jax.Array, targets_BS: jax.Array
    ) -> jax.Array:
        """Return the cross entropy of each target."""
        logits = self._logits(vocab, x_BSD, kernel_VD)
        return _cross_entropy(logits, targets_BS, lambda x: x, lambda x: x, 0, kernel_VD.shape[0])

    def _lost(self, vocab: int, call: NamedCall, scope: Scope, body: Any, arguments: Any) -> Any:
        """Return the same along tensor, where the vocabulary stays split."""
        x, kernel, targets = arguments
        split = isinstance(kernel, Part) and kernel.cut == Cut(0)
        if scope.side.name != COLUMN_AXIS or not split:
            return scope.run(scope, *body, jax.tree.leaves(arguments, is_leaf=is_value))
        here, count = kernel.x.shape[0], kernel.x.shape[0] * scope.side.size
        first = lax.axis_index(COLUMN_AXIS) * here
        whole = self._whole(scope, x, Cut(SEQUENCE))
        logits = self._logits(vocab, whole, kernel.x, first, scope.side.size)
        greatest, total = (
            partial(lax.pmax, axis_name=COLUMN_AXIS),
            partial(lax.psum, axis_name=COLUMN_AXIS),
        )
        return _cross_entropy(logits, scope.whole(targets), greatest, total, first, count)

    run_length, dealt = model_ops.all_here, model_ops.whole_batch
    check_positions, sender = model_ops.none_joined, staticmethod(by_xla)


def _cross_entropy(
    logits: jax.Array,
    targets_BS: jax.Array,
    greatest_of: Callable,
    total: Callable,
    first: Any,
    count: int,
) -> jax.Array:
    """Return the cross entropy of each target, of logits of which the first has this number."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    numbers = first + lax.broadcasted_iota("int32", (1, 1, logits.shape[-1]), 2)
    greatest = greatest_of(lax.stop_gradient(logits.max(-1)))
    picked = jnp.where(numbers == targets_BS[..., None], logits, 0).sum(-1)
    exponentials = jnp.exp(logits - greatest[..., None]).sum(-1)
    exponentials, picked = total(jnp.stack([exponentials, picked]))
    losses = jnp.log(exponentials) + greatest - picked
    return jnp.where(targets_BS < count, losses, jnp.nan)


def _gathered(x: jax.Array, axis: str, at: Cut) -> jax.Array:
    """Return the whole of which the devices along an axis have parts."""
    gather = lambda x, dim: lax.all_gather(x, axis, axis=dim, tiled=True)
    return _in_blocks(gather, x, at)


def _sum_of_parts(x: jax.Array, axis: str, at: Cut) -> jax.Array:
    """Return this device's part of the sum over an axis."""
    scatter = lambda x, dim: lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return _in_blocks(scatter, x, at)


def _in_blocks(move: Callable, x: jax.Array, at: Cut) -> jax.Array:
    """Return what a move along a dimension makes of each of its blocks."""
    if at.outer == 1:
        return move(x, at.dim)
    before, after = x.shape[: at.dim], x.shape[at.dim + 1 :]
    found = move(x.reshape(*before, at.outer, -1, *after), at.dim + 1)
    return found.reshape(*before, -1, *after)
