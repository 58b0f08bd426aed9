"""Rules of equations that read or write at indices."""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from jax.extend.core import JaxprEqn

from hfjax.parallel.spmd.partition_context import PartitionContext, aval_of
from hfjax.parallel.spmd.placements import BATCH_SPLIT, LazyValue, PartialValue, ShardedValue, Split
from hfjax.parallel.spmd.rules.views import is_iota

Values = Sequence[Any]


def dynamic_slice(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Slice other dimensions than the split one."""
    x, *starts = values
    sizes = equation.params["slice_sizes"]
    if not isinstance(x, ShardedValue) or sizes[x.split.dim] != ctx.shape(x)[x.split.dim]:
        return None
    starts = _from_zero([ctx.replicate(s) for s in starts], x.split.dim)
    local_shape = ctx.group.local_shape(sizes, x.split)
    return ctx.bind_sharded(x.split, equation, [x.x, *starts], slice_sizes=local_shape)


def dynamic_update_slice(
    ctx: PartitionContext, equation: JaxprEqn, values: Values
) -> Values | None:
    """Write updates that span the split dimension."""
    x, update, *starts = values
    split = next((v.split for v in (x, update) if isinstance(v, ShardedValue)), None)
    if split is None or ctx.shape(x)[split.dim] != ctx.shape(update)[split.dim]:
        return None
    starts = _from_zero([ctx.replicate(s) for s in starts], split.dim)
    operands = [ctx.shard(x, split), ctx.shard(update, split), *starts]
    return ctx.bind_sharded(split, equation, operands)


def _from_zero(starts: list, dim: int) -> list:
    """Return start indices with 0 for a dimension that is taken in full."""
    return [*starts[:dim], starts[dim] * 0, *starts[dim + 1 :]]


def gather(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Gather at sharded indices, full slices of the split dimension, or each entry from itself."""
    x, indices = values
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    collapsed_dims = set(numbers.collapsed_slice_dims) | set(numbers.operand_batching_dims)
    window_dims = [d for d in range(len(sizes)) if d not in collapsed_dims]
    out_dims = [
        d for d in range(len(aval_of(equation.outvars[0]).shape)) if d not in numbers.offset_dims
    ]
    if isinstance(x, ShardedValue):
        split = x.split
        if split.dim in window_dims:
            if sizes[split.dim] != ctx.shape(x)[split.dim] or isinstance(indices, ShardedValue):
                return None
            target = split.with_dim(numbers.offset_dims[window_dims.index(split.dim)])
            local_shape = ctx.group.local_shape(sizes, split)
            operands = [x.x, ctx.replicate(indices)]
            return ctx.bind_sharded(target, equation, operands, slice_sizes=local_shape)
        if split.dim in numbers.operand_batching_dims:
            batch_index = numbers.operand_batching_dims.index(split.dim)
            target = split.with_dim(numbers.start_indices_batching_dims[batch_index])
            operands = [x.x, ctx.shard(indices, target)]
            return ctx.bind_sharded(target.with_dim(out_dims[target.dim]), equation, operands)
        own_indices = _own_entry_indices(
            ctx, ctx.shape(x)[split.dim], split, indices, numbers.start_index_map
        )
        if own_indices is None:
            return None
        target = own_indices.split.with_dim(out_dims[own_indices.split.dim])
        return ctx.bind_sharded(target, equation, [x.x, own_indices.x])
    if not isinstance(indices, ShardedValue) or indices.split.dim >= len(out_dims):
        return None
    split = indices.split
    table = ctx.replicate(x)
    if split.dim in numbers.start_indices_batching_dims:
        batch_index = numbers.start_indices_batching_dims.index(split.dim)
        table = ctx.shard(x, split.with_dim(numbers.operand_batching_dims[batch_index]))
    return ctx.bind_sharded(split.with_dim(out_dims[split.dim]), equation, [table, indices.x])


def _own_entry_indices(
    ctx: PartitionContext, size: int, split: Split, indices: Any, index_map: Sequence[int]
) -> ShardedValue | None:
    """Return indices that count the local entries, if each entry of the dimension reads itself.

    `x[jnp.arange(len(x)), labels]` does: the first of its concatenated indices is 0, 1, 2 …
    """
    _, columns = ctx.concat_operands.get(id(indices), (None, ()))
    if isinstance(indices, LazyValue) and ctx.group.divides(indices.shape, BATCH_SPLIT):
        indices = ShardedValue(ctx.shard(indices, BATCH_SPLIT))
    if (
        not isinstance(indices, ShardedValue)
        or len(columns) != len(index_map)
        or split.dim not in index_map
    ):
        return None
    column = index_map.index(split.dim)
    numbers = columns[column]
    fits = split.blocks == indices.split.blocks == 1 and ctx.shape(numbers)[0] == size
    if not fits or indices.split.dim != 0 or not is_iota(ctx, numbers):
        return None
    positions = lax.broadcasted_iota(indices.x.dtype, indices.x.shape[:-1], 0)
    return ShardedValue(indices.x.at[..., column].set(positions), indices.split)


def scatter(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Scatter full slices of the split dimension, each entry to itself, or add a partial sum."""
    x, indices, updates = values
    numbers = equation.params["dimension_numbers"]
    scatter_dims = [
        d for d in range(len(ctx.shape(updates))) if d not in numbers.update_window_dims
    ]
    outs = _scatter_sharded(ctx, equation, values, scatter_dims)
    if outs is not None or isinstance(x, ShardedValue) or equation.primitive.name != "scatter-add":
        return outs
    index_dim = len(ctx.shape(indices)) - 1  # the dimension of one index
    split = indices.split if isinstance(indices, ShardedValue) else None
    if split is None and isinstance(updates, ShardedValue) and updates.split.dim in scatter_dims:
        split = updates.split.with_dim(scatter_dims.index(updates.split.dim))
    if (
        split is None
        or split.dim >= index_dim
        or split.dim in numbers.scatter_indices_batching_dims
    ):
        return None
    operands = [
        ctx.shard(indices, split),
        ctx.shard(updates, split.with_dim(scatter_dims[split.dim])),
    ]
    return [PartialValue(x) for x in ctx.bind(equation, [ctx.as_partial(x), *operands])]


def _scatter_sharded(
    ctx: PartitionContext, equation: JaxprEqn, values: Values, scatter_dims: Sequence[int]
) -> Values | None:
    """Write to an operand that is sharded, or may be; `scatter_dims`: not of a window."""
    x, indices, updates = values
    numbers, shape = equation.params["dimension_numbers"], ctx.shape(x)
    collapsed_dims = set(numbers.inserted_window_dims) | set(numbers.operand_batching_dims)
    window_dims = [d for d in range(len(shape)) if d not in collapsed_dims]

    def write(split: Split, update_split: Split, local_indices: Any) -> Values:
        operands = [ctx.shard(x, split), local_indices, ctx.shard(updates, update_split)]
        return ctx.bind_sharded(split, equation, operands)

    x_splits = [x.split] if isinstance(x, ShardedValue) else _split_from_indices(indices, numbers)
    for split in x_splits + _split_from_updates(ctx, updates, numbers, window_dims, shape):
        if split.dim in window_dims and not isinstance(indices, ShardedValue):
            target = numbers.update_window_dims[window_dims.index(split.dim)]
            if ctx.shape(updates)[target] == shape[split.dim]:
                return write(split, split.with_dim(target), ctx.replicate(indices))
        if split.dim in numbers.operand_batching_dims:
            batch_index = numbers.operand_batching_dims.index(split.dim)
            target = split.with_dim(numbers.scatter_indices_batching_dims[batch_index])
            return write(
                split, target.with_dim(scatter_dims[target.dim]), ctx.shard(indices, target)
            )
    dims = numbers.scatter_dims_to_operand_dims
    for split in x_splits or map(Split, dims):
        own_indices = _own_entry_indices(ctx, shape[split.dim], split, indices, dims)
        if own_indices is not None and ctx.group.divides(shape, split):
            return write(
                split,
                own_indices.split.with_dim(scatter_dims[own_indices.split.dim]),
                own_indices.x,
            )
    return None


def _split_from_indices(indices: Any, numbers: Any) -> list[Split]:
    """Return the split that the operand takes from batched indices."""
    batching = numbers.scatter_indices_batching_dims
    if not isinstance(indices, ShardedValue) or indices.split.dim not in batching:
        return []
    return [
        indices.split.with_dim(numbers.operand_batching_dims[batching.index(indices.split.dim)])
    ]


def _split_from_updates(
    ctx: PartitionContext, updates: Any, numbers: Any, operand_window_dims: list, shape: tuple
) -> list[Split]:
    """Return the split that the operand takes from the updates, if they span that dimension."""
    if not isinstance(updates, ShardedValue) or updates.split.dim not in numbers.update_window_dims:
        return []
    dim = operand_window_dims[numbers.update_window_dims.index(updates.split.dim)]
    return (
        [updates.split.with_dim(dim)] if ctx.shape(updates)[updates.split.dim] == shape[dim] else []
    )


RULES: dict[str, Callable] = {
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "gather": gather,
    **dict.fromkeys(
        "scatter scatter-add scatter-mul scatter-min scatter-max scatter-sub".split(), scatter
    ),
}
