"""A grid of devices: each linear map is sharded over `row` and over `tensor` (strategy GRID).

Agarwal's matmul in three dimensions, as in AxoNN (Singh et al., 2023), with any sides: fsdp x row x
tensor. Activations have one of two placements:

- the stream, [B, S/tensor, D/row]: the residual stream; norms, dropout, additions;
- inside of attention and MLP, [B/row, S, F/tensor]: full sequences, some examples, some heads.

A linear map leads from one to the other. Weights are [D/row, F/tensor] on each device; fsdp shards
them further, and they are all-gathered over it like all others. JAX derives the backward passes:
every reduce-scatter becomes an all-gather, every all-gather a reduce-scatter.

A model sees global arrays. It is partitioned along `tensor` first, then along `row`
(parallel/spmd). An op that a module calls is kept by name and has a rule here; everything else runs
by its equations.

[B]atch: the examples of one index along data and fsdp. [S]equence, [D] embed, [F]: heads or mlp,
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
from hfjax.parallel.engine.comm_plan import use_xla
from hfjax.parallel.extensions.kernel_dispatch import batch_stats
from hfjax.parallel.mesh import COLUMN_AXIS, ROW_AXIS, active_batch_axes, size_of
from hfjax.parallel.spmd.partition_context import PartitionContext
from hfjax.parallel.spmd.placements import AxisGroup, ShardedValue, Split, is_distributed
from hfjax.parallel.spmd.rule_calls import RuleCall, keep_as_call
from hfjax.parallel.strategy import Axes
from hfjax.utils.head import widen_tokens

source_info_util.register_exclusion(__file__)  # report the user's line for an op

BATCH, SEQUENCE, LAST = 0, 1, 2  # dimensions of an activation


@final
@dataclass(frozen=True, eq=False)
class GridOps(model_ops.CommonOps):
    """The ops of a model where row and tensor are larger than 1.

    Attributes:
        mesh: The mesh.
        splits: The strategy's rules for parameters: logical axis -> mesh axes.
        without_logits: Whether the loss takes a projection in place of logits.
        local_batch: Whether a model sees only the examples of its own index along data and fsdp.
    """

    mesh: Mesh
    splits: Mapping[str, Axes]
    without_logits: bool = False
    local_batch: bool = False
    channel_stats, sum_over_batch = batch_stats.batch_stats, model_ops.sum_over_data

    def inner_groups(self) -> tuple[AxisGroup, ...]:
        """Return the devices along tensor, and those along row."""
        blocks = 1 if self.local_batch else size_of(active_batch_axes(self.mesh), self.mesh)
        make_group = lambda axis: AxisGroup((axis,), self.mesh.shape[axis], axis, blocks=blocks)
        return make_group(COLUMN_AXIS), make_group(ROW_AXIS)

    def named_groups(self) -> Mapping[str, str]:
        """Return the axis that shards a dimension of parameters, by the dimension's name."""
        grid_axes = (COLUMN_AXIS, ROW_AXIS)
        return {
            name: axes[0] for name, axes in self.splits.items() if axes and axes[0] in grid_axes
        }

    def _activation_split(self, group: AxisGroup) -> Split:
        """Return how a group shards the stream (tensor) or the inside (row), besides widths.

        Inside, it is the examples of each index along data and fsdp that are sharded.
        """
        return Split(SEQUENCE) if group.name == COLUMN_AXIS else Split(BATCH, group.blocks)

    # -- linear maps ----------------------------------------------------------------------------

    def matmul(self, place: Any, between: tuple, multiply: Callable) -> Callable:
        """Return the matmul of a linear map between two named dimensions.

        One that leads neither out of the stream nor back is run by its equations.
        """
        is_inward = self.leads_in(between)
        return (
            multiply
            if is_inward is None
            else keep_as_call(partial(self._matmul_rule, is_inward), multiply)
        )

    def leads_in(self, between: tuple[str | None, str | None]) -> bool | None:
        """Return whether a map leads out of the stream; False: back; None: neither."""
        directions: dict[tuple[Axes, ...], bool] = {
            ((ROW_AXIS,), (COLUMN_AXIS,)): True,
            ((COLUMN_AXIS,), (ROW_AXIS,)): False,
        }
        return directions.get(tuple(self.splits.get(name or "", ()) for name in between))

    def _matmul_rule(
        self, is_inward: bool, call: RuleCall, ctx: PartitionContext, body: Any, arguments: Any
    ) -> Any:
        """Multiply along one axis: all-gather what is not contracted, or reduce-scatter the sum.

        Inward: the sequence is all-gathered over tensor, and examples reduce-scattered over row.
        Back: examples are all-gathered over row, and the sequence reduce-scattered over tensor.
        """
        (x, kernel), group = arguments, ctx.group
        shape = ctx.shape(x)
        is_grid = group.name in (COLUMN_AXIS, ROW_AXIS) and len(shape) == 3
        if not is_grid or not isinstance(kernel, ShardedValue) or kernel.split.blocks > 1:
            return ctx.run(ctx, *body, jax.tree.leaves(arguments, is_leaf=is_distributed))
        is_gather = (group.name == COLUMN_AXIS) == is_inward
        split, is_contracted = self._activation_split(group), kernel.split.dim == 0
        if is_contracted == is_gather or not group.divides(shape, split):
            return ctx.run(ctx, *body, jax.tree.leaves(arguments, is_leaf=is_distributed))
        if is_gather:
            gathered = self._gather(ctx, x, split)
            return ShardedValue(call.reapply(gathered, kernel.x), Split(LAST))
        partial_sums = call.reapply(ctx.shard(x, Split(LAST)), kernel.x)
        return ShardedValue(_reduce_scatter(partial_sums, group.name, split), split)

    def _gather(self, ctx: PartitionContext, x: Any, split: Split) -> jax.Array:
        if not isinstance(x, ShardedValue) or x.split != split:
            return ctx.replicate(x)
        return _all_gather(x.x, ctx.group.name, split)

    # -- the stream -----------------------------------------------------------------------------

    def lookup(self, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        """Return each token's embedding; along tensor, which shards the table, in the stream."""
        return keep_as_call(self._lookup_rule, partial(model_ops.lookup_table, self))(
            table_VD, tokens_BS
        )

    def _lookup_rule(self, call: RuleCall, ctx: PartitionContext, body: Any, arguments: Any) -> Any:
        table, tokens = arguments
        if (
            ctx.group.name != COLUMN_AXIS
            or not isinstance(table, ShardedValue)
            or table.split != Split(0)
        ):
            return ctx.run(ctx, *body, jax.tree.leaves(arguments, is_leaf=is_distributed))
        tokens, split = ctx.replicate(tokens), Split(SEQUENCE)
        self.check_length(tokens.shape[SEQUENCE])
        shard_size, num_shards = table.x.shape[0], ctx.group.size
        count, tokens = shard_size * num_shards, widen_tokens(tokens)
        tokens = jnp.clip(jnp.where(tokens < 0, tokens + count, tokens), 0, count - 1)
        local_ids = tokens - lax.axis_index(COLUMN_AXIS) * shard_size
        is_local = (local_ids >= 0) & (local_ids < shard_size)
        embeddings = jnp.where(
            is_local[..., None], table.x[jnp.clip(local_ids, 0, shard_size - 1)], 0
        )
        return ShardedValue(_reduce_scatter(embeddings, COLUMN_AXIS, split), split)

    def check_length(self, length: int) -> None:
        """Refuse sequences of a length that the tensor axis does not divide."""
        num_shards = self.mesh.shape[COLUMN_AXIS]
        if length % num_shards:
            fits = [n for n in range(num_shards, 1, -1) if length % n == 0]
            raise ValueError(
                f"sequences of {length} tokens: on a grid {COLUMN_AXIS}={num_shards} splits the "
                f"sequence, and has to divide it: {fits or 'only 1'} would. Take another length, "
                f"or another {COLUMN_AXIS}."
            )

    # -- inside ---------------------------------------------------------------------------------

    def attention(self, attend: Callable) -> Callable:
        """Return the attention to run; hfjax's own runs on local examples and heads."""
        if not getattr(attend, "is_causal_attention", False):
            return attend
        run = keep_as_call(self._attention_rule, attend)
        by_position = partial(model_ops.bind_positional, attend)
        return lambda *args, **kwargs: run(
            *(x for x in by_position(args, kwargs)[0] if x is not None)
        )

    def _attention_rule(
        self, call: RuleCall, ctx: PartitionContext, body: Any, arguments: Any
    ) -> Any:
        q, *others = arguments
        is_known = ctx.group.name in (COLUMN_AXIS, ROW_AXIS) and isinstance(q, ShardedValue)
        if not is_known or q.split.dim not in (BATCH, LAST):
            return ctx.run(ctx, *body, jax.tree.leaves(arguments, is_leaf=is_distributed))
        has_split_dim = lambda v: (
            q.split.dim == BATCH or len(ctx.shape(v)) == 4
        )  # documents have no heads
        if not all(ctx.group.divides(ctx.shape(v), q.split) for v in others if has_split_dim(v)):
            return ctx.run(ctx, *body, jax.tree.leaves(arguments, is_leaf=is_distributed))
        local_operands = [
            ctx.shard(v, q.split) if has_split_dim(v) else ctx.replicate(v) for v in others
        ]
        return ShardedValue(call.reapply(q.x, *local_operands), q.split)

    # -- the head and the loss --------------------------------------------------------------------

    def outputs(
        self, x_BSD: jax.Array, kernel_VD: jax.Array, vocab: int, logits: Callable | None = None
    ) -> Projection | jax.Array:
        """Return the loss's input: a projection, or logits."""
        if logits is not None:
            return logits()
        if self.without_logits:
            losses = keep_as_call(partial(self._loss_rule, vocab), partial(self._losses, vocab))
            return Projection(x_BSD, kernel_VD, losses)
        return self._logits(vocab, x_BSD, kernel_VD)

    def _logits(
        self, vocab: int, x_BSD: jax.Array, kernel_VD: jax.Array, first: Any = 0, shards: int = 1
    ) -> jax.Array:
        """Return logits from index `first` on; those that pad the vocabulary are masked."""
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

    def _loss_rule(
        self, vocab: int, call: RuleCall, ctx: PartitionContext, body: Any, arguments: Any
    ) -> Any:
        """Return the same along tensor, where the vocabulary stays sharded."""
        x, kernel, targets = arguments
        is_split = isinstance(kernel, ShardedValue) and kernel.split == Split(0)
        if ctx.group.name != COLUMN_AXIS or not is_split:
            return ctx.run(ctx, *body, jax.tree.leaves(arguments, is_leaf=is_distributed))
        shard_size, count = kernel.x.shape[0], kernel.x.shape[0] * ctx.group.size
        first = lax.axis_index(COLUMN_AXIS) * shard_size
        x_full = self._gather(ctx, x, Split(SEQUENCE))
        logits = self._logits(vocab, x_full, kernel.x, first, ctx.group.size)
        pmax, psum = (
            partial(lax.pmax, axis_name=COLUMN_AXIS),
            partial(lax.psum, axis_name=COLUMN_AXIS),
        )
        return _cross_entropy(logits, ctx.replicate(targets), pmax, psum, first, count)

    run_length, local_sequence_batch = model_ops.full_length, model_ops.unsliced_batch
    check_positions, choose_kernel = model_ops.skip_position_check, staticmethod(use_xla)
    reads_model, read_model = model_ops.reads_nothing, model_ops.read_nothing
    context_choice = model_ops.no_choice


def _cross_entropy(
    logits: jax.Array,
    targets_BS: jax.Array,
    pmax: Callable,
    psum: Callable,
    first: Any,
    count: int,
) -> jax.Array:
    """Return the cross entropy of each target, for logits from index `first` on."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    numbers = first + lax.broadcasted_iota("int32", (1, 1, logits.shape[-1]), 2)
    greatest = pmax(lax.stop_gradient(logits.max(-1)))
    picked = jnp.where(numbers == targets_BS[..., None], logits, 0).sum(-1)
    exponentials = jnp.exp(logits - greatest[..., None]).sum(-1)
    exponentials, picked = psum(jnp.stack([exponentials, picked]))
    losses = jnp.log(exponentials) + greatest - picked
    return jnp.where(targets_BS < count, losses, jnp.nan)


def _all_gather(x: jax.Array, axis: str, split: Split) -> jax.Array:
    """Return the all-gather of x over an axis."""
    gather = lambda x, dim: lax.all_gather(x, axis, axis=dim, tiled=True)
    return _apply_to_blocks(gather, x, split)


def _reduce_scatter(x: jax.Array, axis: str, split: Split) -> jax.Array:
    """Return this device's shard of the sum over an axis."""
    scatter = lambda x, dim: lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return _apply_to_blocks(scatter, x, split)


def _apply_to_blocks(collective: Callable, x: jax.Array, split: Split) -> jax.Array:
    """Return the result of a collective along a dimension, applied to each of its blocks."""
    if split.blocks == 1:
        return collective(x, split.dim)
    before, after = x.shape[: split.dim], x.shape[split.dim + 1 :]
    out = collective(x.reshape(*before, split.blocks, -1, *after), split.dim + 1)
    return out.reshape(*before, -1, *after)
