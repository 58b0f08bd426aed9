"""Rules of equations that combine entries: reductions, matmuls, cumulative sums, convolutions."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from hfjax.parallel.spmd.partition_context import PartitionContext, aval_of
from hfjax.parallel.spmd.placements import PartialValue, ShardedValue

Values = Sequence[Any]


def reduction(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Reduce shards: over the split dimension sums stay partial, other reductions are completed."""
    (value,), axes = values, equation.params["axes"]
    value = ctx.evaluate_lazy(value)
    name = equation.primitive.name
    if isinstance(value, PartialValue) and name == "reduce_sum":
        return [PartialValue(x) for x in ctx.bind(equation, [value.x])]
    if not isinstance(value, ShardedValue):
        return ctx.bind(equation, [ctx.replicate(value)])
    split = value.split
    if split.dim not in axes:
        dim = split.dim - sum(a < split.dim for a in axes)
        return ctx.bind_sharded(split.with_dim(dim), equation, [value.x])
    if name == "reduce_sum":
        return [PartialValue(x) for x in ctx.bind(equation, [value.x])]
    action_and_rule = _CROSS_DEVICE.get(name)
    if action_and_rule is None:
        return None
    action, run = action_and_rule
    out = run(ctx, equation, value)
    if out is None:
        return None
    ctx.record(action, out)
    return [out]


def _reduce_extreme(ctx: PartitionContext, equation: JaxprEqn, value: ShardedValue) -> jax.Array:
    """Return the global maximum or minimum; ties, on whatever device, share the derivative."""
    group, axes = ctx.group, equation.params["axes"]
    all_reduce = (
        group.all_reduce_max if equation.primitive.name == "reduce_max" else group.all_reduce_min
    )
    reduce_local = lambda x: ctx.bind(equation, [x])[0]
    if not jnp.issubdtype(value.x.dtype, jnp.inexact):
        return all_reduce(reduce_local(value.x))
    extreme = jax.custom_jvp(lambda x: all_reduce(reduce_local(x)))

    @extreme.defjvp
    def jvp(primals: Any, tangents: Any) -> Any:
        (x,), (dx,) = primals, tangents
        out = all_reduce(reduce_local(lax.stop_gradient(x)))
        ties = (x == jnp.expand_dims(out, axes)).astype(x.dtype)
        count = group.all_reduce(ties.sum(axes))
        return out, group.all_reduce((dx * ties).sum(axes)) / count

    return extreme(value.x)


def _gather_and_reduce(ctx: PartitionContext, equation: JaxprEqn, value: ShardedValue) -> Any:
    """Gather and reduce the results of the devices: products, or bits."""
    stacked = ctx.group.all_gather_stack(ctx.bind(equation, [value.x])[0])
    return ctx.bind(equation, [stacked], axes=(0,))[0]


def _arg_extreme(
    ctx: PartitionContext, equation: JaxprEqn, value: ShardedValue
) -> jax.Array | None:
    """Return the index of the global maximum or minimum: the first one, as on one device."""
    (dim,), group = equation.params["axes"], ctx.group
    if value.split.blocks > 1:
        return None
    (local_index,) = ctx.bind(equation, [value.x])
    local_best = jnp.take_along_axis(value.x, jnp.expand_dims(local_index, dim), dim).squeeze(dim)
    global_indices = group.global_indices(ctx.shape(value)[dim], 1, local_index.dtype)
    indices, bests = (
        group.all_gather_stack(global_indices[local_index]),
        group.all_gather_stack(local_best),
    )
    if group.chunks:  # of ties the first
        order = indices.argsort(0)
        indices, bests = (jnp.take_along_axis(x, order, 0) for x in (indices, bests))
    (device,) = ctx.bind(equation, [bests], axes=(0,))
    return jnp.take_along_axis(indices, device[None], 0)[0]


_CROSS_DEVICE: dict[str, tuple[str, Callable]] = {
    "reduce_max": ("greatest", _reduce_extreme),
    "reduce_min": ("least", _reduce_extreme),
    "reduce_or": ("gather", _gather_and_reduce),
    "reduce_and": ("gather", _gather_and_reduce),
    "reduce_xor": ("gather", _gather_and_reduce),
    "reduce_prod": ("gather", _gather_and_reduce),
    "argmax": ("greatest", _arg_extreme),
    "argmin": ("least", _arg_extreme),
}


def cumulative(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Run along another dimension; a sum along the split one adds the totals of earlier devices."""
    (value,) = values
    axis, name = equation.params["axis"], equation.primitive.name
    if isinstance(value, PartialValue) and name == "cumsum":
        return [PartialValue(x) for x in ctx.bind(equation, [value.x])]
    if not isinstance(value, ShardedValue):
        return ctx.bind(equation, [ctx.replicate(value)])
    if value.split.dim != axis:
        return ctx.bind_sharded(value.split, equation, [value.x])
    if name != "cumsum" or value.split.blocks > 1:
        return None
    group, is_reverse = ctx.group, equation.params["reverse"]
    num_chunks = len(group.device_chunks[0])
    chunks = value.x.reshape(*value.x.shape[:axis], num_chunks, -1, *value.x.shape[axis + 1 :])
    (local_sums,) = ctx.bind(equation, [chunks], axis=axis + 1)
    totals = jnp.moveaxis(chunks.sum(axis + 1, dtype=local_sums.dtype), axis, 0)
    totals = group.all_gather_stack(totals)  # [devices, chunks of each, ...]
    ctx.record("gather", totals)
    device_chunks, local_chunks = jnp.asarray(group.device_chunks), group.local_chunks
    later = device_chunks[None] > local_chunks[:, None, None]
    before = later if is_reverse else device_chunks[None] < local_chunks[:, None, None]
    before = before.reshape(*before.shape, *[1] * (totals.ndim - 2))
    offset = jnp.where(before, totals[None], 0).sum((1, 2))
    offset = jnp.expand_dims(jnp.moveaxis(offset, 0, axis), axis + 1)
    return [
        ShardedValue(
            (local_sums + offset.astype(local_sums.dtype)).reshape(value.x.shape), value.split
        )
    ]


def dot_general(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Multiply: contracting a split gives a partial sum; of two unaligned, gather the smaller."""
    a, b = values
    (contracting_a, contracting_b), (batch_a, batch_b) = equation.params["dimension_numbers"]
    bind = lambda *arrays: ctx.bind(equation, arrays)[0]
    if (
        isinstance(a, ShardedValue)
        and isinstance(b, ShardedValue)
        and not _is_aligned(a, b, contracting_a, contracting_b)
    ):
        if not _is_aligned(a, b, batch_a, batch_b):
            keep_a = a.x.size >= b.x.size
            a, b = (a, ctx.replicate(b)) if keep_a else (ctx.replicate(a), b)
    sharded, is_lhs = (a, True) if isinstance(a, ShardedValue) else (b, False)
    if not isinstance(sharded, ShardedValue):
        return _dot_partials(ctx, bind, a, b)
    contracting, other_contracting = (
        (contracting_a, contracting_b) if is_lhs else (contracting_b, contracting_a)
    )
    batch, other_batch = (batch_a, batch_b) if is_lhs else (batch_b, batch_a)
    other, split = (b, sharded.split) if is_lhs else (a, sharded.split)
    multiply = lambda x, y: bind(x, y) if is_lhs else bind(y, x)
    if split.dim in contracting:
        other_split = split.with_dim(other_contracting[contracting.index(split.dim)])
        return [PartialValue(multiply(sharded.x, ctx.shard(other, other_split)))]
    if split.dim in batch:
        other_split = split.with_dim(other_batch[batch.index(split.dim)])
        return [
            ShardedValue(
                multiply(sharded.x, ctx.shard(other, other_split)),
                split.with_dim(batch.index(split.dim)),
            )
        ]
    free = [d for d in range(sharded.x.ndim) if d not in contracting and d not in batch]
    offset = len(batch)
    if not is_lhs:
        offset += len(ctx.shape(a)) - len(contracting_a) - len(batch_a)
    out = multiply(sharded.x, ctx.replicate(other))
    return [ShardedValue(out, split.with_dim(offset + free.index(split.dim)))]


def _is_aligned(
    a: ShardedValue, b: ShardedValue, dims_a: Sequence[int], dims_b: Sequence[int]
) -> bool:
    pairs = zip(dims_a, dims_b, strict=True)
    return any(a.split.dim == x and b.split == a.split.with_dim(y) for x, y in pairs)


def _dot_partials(ctx: PartitionContext, bind: Callable, a: Any, b: Any) -> Values:
    if isinstance(a, PartialValue) and isinstance(b, PartialValue):
        a, b = (ctx.replicate(a), b) if a.x.size <= b.x.size else (a, ctx.replicate(b))
    if isinstance(a, PartialValue) and not ctx.is_replicated(a):
        return [PartialValue(bind(a.x, ctx.replicate(b)))]
    if isinstance(b, PartialValue) and not ctx.is_replicated(b):
        return [PartialValue(bind(ctx.replicate(a), b.x))]
    return [bind(ctx.replicate(a), ctx.replicate(b))]


def convolution(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Convolve: batch, or dimensions of kernel width 1, stay split; features give a partial sum."""
    x, kernel = values
    numbers, groups = equation.params["dimension_numbers"], equation.params["batch_group_count"]
    x_spec, kernel_spec, out_spec = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    if groups != 1 or not isinstance(x, ShardedValue):
        return None
    if x.split.dim == x_spec[0]:
        return ctx.bind_sharded(
            x.split.with_dim(out_spec[0]), equation, [x.x, ctx.replicate(kernel)]
        )
    if x.split.dim in x_spec[2:] and _keeps_positions(equation, x_spec[2:].index(x.split.dim)):
        out_dim = out_spec[2:][x_spec[2:].index(x.split.dim)]
        return ctx.bind_sharded(x.split.with_dim(out_dim), equation, [x.x, ctx.replicate(kernel)])
    if x.split.dim == x_spec[1] and equation.params["feature_group_count"] == 1:
        local_kernel = ctx.shard(kernel, x.split.with_dim(kernel_spec[1]))
        return [PartialValue(x) for x in ctx.bind(equation, [x.x, local_kernel])]
    return None


def _keeps_positions(equation: JaxprEqn, spatial_dim: int) -> bool:
    """Return whether a convolution leaves the positions along a spatial dimension as they are."""
    p = equation.params
    kernel = aval_of(equation.invars[1]).shape[p["dimension_numbers"].rhs_spec[2:][spatial_dim]]
    settings = (
        p["window_strides"][spatial_dim],
        p["lhs_dilation"][spatial_dim],
        tuple(p["padding"][spatial_dim]),
    )
    return kernel == 1 and settings == (1, 1, (0, 0))


# Equations on the last few dimensions, for each entry of those before.
def trailing_dims_rule(count: Callable[[JaxprEqn], int]) -> Callable:
    """Return the rule of an equation that works on its last `count(equation)` dimensions."""

    def rule(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
        """Run on the last dimensions, where another one is split."""
        sharded = [v for v in values if isinstance(v, ShardedValue)]
        if not sharded:
            return None
        split, num_trailing = sharded[0].split, count(equation)
        if split.dim >= len(ctx.shape(values[0])) - num_trailing:
            return None
        outs = ctx.bind(equation, [ctx.shard(v, split) for v in values])
        return [ShardedValue(x, split) for x in outs]

    return rule


def reduce_windows(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Pool, or reduce windows of, other dimensions than the split one."""
    sharded = [v for v in values if isinstance(v, ShardedValue)]
    if not sharded:
        return None
    split, p = sharded[0].split, equation.params
    window_params = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    is_pointwise = all(p[name][split.dim] == 1 for name in window_params if p.get(name) is not None)
    if not is_pointwise or any(p["padding"][split.dim]):
        return None
    to_local = lambda v: ctx.shard(v, split) if ctx.shape(v) else ctx.replicate(v)
    return [ShardedValue(x, split) for x in ctx.bind(equation, list(map(to_local, values)))]


def sort(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Sort, or take the top k, along another dimension than the split one."""
    split, p = next((v.split for v in values if isinstance(v, ShardedValue)), None), equation.params
    dim = p["axis"] if equation.primitive.name == "top_k" else p["dimension"]
    if split is None or split.dim == dim % len(ctx.shape(values[0])):
        return None
    return [
        ShardedValue(x, split) for x in ctx.bind(equation, [ctx.shard(v, split) for v in values])
    ]


RULES: dict[str, Callable] = {
    **dict.fromkeys(
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split(),
        reduction,
    ),
    "reduce_xor": reduction,
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), cumulative),
    "dot_general": dot_general,
    "conv_general_dilated": convolution,
    "sort": sort,
    "top_k": sort,
    "fft": trailing_dims_rule(lambda equation: len(equation.params["fft_lengths"])),
    **dict.fromkeys(
        "cholesky eigh eig lu qr geqrf householder_product svd triangular_solve schur".split(),
        trailing_dims_rule(lambda equation: 2),
    ),
    **dict.fromkeys(
        (
            "reduce_window reduce_window_max reduce_window_min reduce_window_sum "
            "select_and_gather_add select_and_scatter_add"
        ).split(),
        reduce_windows,
    ),
}
