"""Rules of equations that move entries: broadcasts, reshapes, transposes, slices, concatenations.

A `ViewMap` maps the split of the operand to that of the output, and back. So it applies to sharded
values as well as to lazy ones.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from hfjax.parallel.spmd.partition_context import PartitionContext, aval_of
from hfjax.parallel.spmd.placements import LazyValue, PartialValue, Shape, ShardedValue, Split
from hfjax.parallel.spmd.rules.pointwise import is_constant

Values = Sequence[Any]


class ViewMap(NamedTuple):
    """How one equation maps splits.

    Attributes:
        to_output: Split of the operand -> that of the output, or None.
        to_input: Split of the output -> that of the operand, or None.
        local_params: (shape of a shard of the output, its split) -> parameters of the equation for
            it.
        is_linear: Whether the view of a sum is the sum of views, at no greater size.
    """

    to_output: Callable[[Split], Split | None]
    to_input: Callable[[Split], Split | None]
    local_params: Callable[[Shape, Split], dict]
    is_linear: bool = True


def apply_view(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Move entries: stay sharded if a device has all it needs; a slice of a few is partial."""
    value, *rest = values
    out = aval_of(equation.outvars[0])
    view = VIEWS[equation.primitive.name](ctx, equation)
    is_larger = math.prod(out.shape) > math.prod(ctx.shape(value))
    if isinstance(value, ShardedValue):
        split = view.to_output(value.split)
        if split is None or not ctx.group.divides(out.shape, split):
            return _slice_as_partial(ctx, equation, value)
        local_shape = ctx.group.local_shape(out.shape, split)
        (y,) = ctx.bind_sharded(
            split, equation, [value.x, *rest], **view.local_params(local_shape, split)
        )
        if is_larger or id(value) in ctx.lazy_values:  # gather the smaller one
            _, smaller = ctx.lazy_values.get(id(value), (None, value))
            ctx.lazy_values[id(y)] = y, _defer_view(equation, view, smaller, rest)
        return [y]
    if isinstance(value, PartialValue) and view.is_linear and not ctx.is_replicated(value):
        return [PartialValue(x) for x in ctx.bind(equation, [value.x, *rest])]
    if not (is_larger or isinstance(value, LazyValue)) or ctx.find_split(out.shape) is None:
        return ctx.bind(equation, [ctx.replicate(value), *rest])
    operand = ctx.replicate(value) if isinstance(value, PartialValue) else value
    return [_defer_view(equation, view, operand, rest)]


def _defer_view(equation: JaxprEqn, view: ViewMap, operand: Any, rest: Values) -> LazyValue:
    """Return the view of a value as a `LazyValue`."""
    out = aval_of(equation.outvars[0])

    def make(ctx: PartitionContext, split: Split | None) -> Any:
        if split is None:
            return ctx.bind(equation, [ctx.replicate(operand), *rest])[0]
        local_shape, in_split = ctx.group.local_shape(out.shape, split), view.to_input(split)
        if in_split is None:
            return ctx.slice_local(ctx.bind(equation, [ctx.replicate(operand), *rest])[0], split)
        local_operand = (
            ctx.replicate(operand) if in_split is NO_SPLIT else ctx.shard(operand, in_split)
        )
        return ctx.bind(equation, [local_operand, *rest], **view.local_params(local_shape, split))[
            0
        ]

    return LazyValue(
        out.shape, out.dtype, make, not isinstance(operand, ShardedValue) and is_constant(operand)
    )


def _slice_as_partial(
    ctx: PartitionContext, equation: JaxprEqn, value: ShardedValue
) -> Values | None:
    """Return a slice of a few entries as a partial sum: zeros on devices without the entry."""
    if equation.primitive.name != "slice" or value.split.blocks > 1:
        return None
    dim, p = value.split.dim, equation.params
    size, local_size = ctx.shape(value)[dim], value.x.shape[dim]
    strides = p["strides"] or (1,) * value.x.ndim
    indices = np.arange(p["start_indices"][dim], p["limit_indices"][dim], strides[dim])
    if not 0 < len(indices) <= local_size or jnp.issubdtype(value.x.dtype, jax.dtypes.prng_key):
        return None
    replace_dim = lambda values, x: (*values[:dim], x, *values[dim + 1 :])
    sizes = {
        "start_indices": replace_dim(p["start_indices"], 0),
        "limit_indices": replace_dim(p["limit_indices"], local_size),
        "strides": replace_dim(strides, 1),
    }
    (local_slice,) = ctx.bind(equation, [value.x], **sizes)
    numbers = ctx.group.global_indices(size, 1)
    matches = numbers[None] == jnp.asarray(indices, numbers.dtype)[:, None]  # [sliced, local]
    entries = jnp.take(local_slice, matches.argmax(1), axis=dim)
    is_here = matches.any(1).reshape(-1, *[1] * (local_slice.ndim - dim - 1))
    return [
        PartialValue(jnp.where(is_here[(None,) * dim], entries, jnp.zeros((), local_slice.dtype)))
    ]


NO_SPLIT = Split(-1)  # a shard of a broadcast that needs all of its operand


def _broadcast(ctx: PartitionContext, equation: JaxprEqn) -> ViewMap:
    dims, shape = equation.params["broadcast_dimensions"], equation.params["shape"]
    in_shape = aval_of(equation.invars[0]).shape

    def to_input(split: Split) -> Split:
        in_dim = dims.index(split.dim) if split.dim in dims else None
        return (
            NO_SPLIT
            if in_dim is None or in_shape[in_dim] != shape[split.dim]
            else split.with_dim(in_dim)
        )

    local_params = lambda local_shape, split: {"shape": local_shape}
    same_size = math.prod(in_shape) == math.prod(shape)
    return ViewMap(
        lambda split: split.with_dim(dims[split.dim]), to_input, local_params, is_linear=same_size
    )


def split_through_reshape(
    in_shape: Shape, split: Split, out_shape: Shape, num_chunks: int
) -> Split | None:
    """Return the split of the reshaped array by which each device keeps the same entries."""
    blocks = math.prod(in_shape[: split.dim]) * split.blocks
    for dim, size in enumerate(out_shape):
        leading_size = math.prod(out_shape[:dim])
        if (
            size > 1
            and blocks % leading_size == 0
            and size % (blocks // leading_size * num_chunks) == 0
        ):
            return Split(dim, blocks // leading_size)
    return None


def _reshape(ctx: PartitionContext, equation: JaxprEqn) -> ViewMap:
    out_shape, in_shape = equation.params["new_sizes"], aval_of(equation.invars[0]).shape
    if equation.params["dimensions"] is not None:
        drop_split = lambda split: None
        return ViewMap(drop_split, drop_split, lambda local_shape, split: {})
    map_split = lambda a, b: lambda split: split_through_reshape(a, split, b, ctx.group.num_chunks)
    local_params = lambda local_shape, split: {"new_sizes": local_shape}
    return ViewMap(map_split(in_shape, out_shape), map_split(out_shape, in_shape), local_params)


def _transpose(ctx: PartitionContext, equation: JaxprEqn) -> ViewMap:
    order = equation.params["permutation"]
    to_output = lambda split: split.with_dim(order.index(split.dim))
    return ViewMap(
        to_output, lambda split: split.with_dim(order[split.dim]), lambda local_shape, split: {}
    )


def _squeeze(ctx: PartitionContext, equation: JaxprEqn) -> ViewMap:
    ndim = len(aval_of(equation.invars[0]).shape)
    kept_dims = [
        d for d in range(ndim) if d not in {d % ndim for d in equation.params["dimensions"]}
    ]
    to_output = lambda split: (
        split.with_dim(kept_dims.index(split.dim)) if split.dim in kept_dims else None
    )
    return ViewMap(
        to_output, lambda split: split.with_dim(kept_dims[split.dim]), lambda local_shape, split: {}
    )


def _rev(ctx: PartitionContext, equation: JaxprEqn) -> ViewMap:
    keep_split = lambda split: None if split.dim in equation.params["dimensions"] else split
    return ViewMap(keep_split, keep_split, lambda local_shape, split: {})


def _slice(ctx: PartitionContext, equation: JaxprEqn) -> ViewMap:
    start, stop = equation.params["start_indices"], equation.params["limit_indices"]
    strides = equation.params["strides"] or (1,) * len(start)
    in_shape, num_devices = aval_of(equation.invars[0]).shape, ctx.group.size

    def to_output(split: Split) -> Split | None:
        d, size = split.dim, in_shape[split.dim]
        block, chunk_size = size // split.blocks, size // split.blocks // ctx.group.num_chunks
        if stop[d] == start[d] or not chunk_size:
            return None
        if strides[d] == 1 and start[d] % block == 0 and stop[d] % block == 0:
            return Split(d, (stop[d] - start[d]) // block)
        count = -(-(stop[d] - start[d]) // strides[d])
        keeps_split = (
            chunk_size % strides[d] == 0 and start[d] < strides[d] and count * strides[d] == size
        )
        return split if keeps_split else None

    def to_input(split: Split) -> Split | None:
        d = split.dim
        return split if (start[d], stop[d], strides[d]) == (0, in_shape[d], 1) else None

    def local_params(local_shape: Shape, split: Split) -> dict:
        d = split.dim
        first = start[d] // num_devices if strides[d] == 1 else start[d]
        last = first + (local_shape[d] - 1) * strides[d] + 1
        replace_dim = lambda values, x: (*values[:d], x, *values[d + 1 :])
        return {
            "start_indices": replace_dim(start, first),
            "limit_indices": replace_dim(stop, last),
        }

    return ViewMap(to_output, to_input, local_params)


def _tile(ctx: PartitionContext, equation: JaxprEqn) -> ViewMap:
    times = equation.params["reps"]
    to_input = lambda split: split if times[split.dim] == 1 else None
    return ViewMap(
        lambda split: Split(split.dim, split.blocks * times[split.dim]),
        to_input,
        lambda local_shape, split: {},
        False,
    )


VIEWS: dict[str, Callable[[PartitionContext, JaxprEqn], ViewMap]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "rev": _rev,
    "slice": _slice,
    "tile": _tile,
}


def iota(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values:
    """Return a lazy iota, computed for the shard that is needed."""
    shape, dim = equation.params["shape"], equation.params["dimension"]
    out = aval_of(equation.outvars[0])

    def make(ctx: PartitionContext, split: Split | None) -> Any:
        if split is None:
            return ctx.bind(equation, values)[0]
        local_shape = ctx.group.local_shape(shape, split)
        if split.dim != dim:
            return ctx.bind(equation, values, shape=local_shape)[0]
        numbers = ctx.group.global_indices(shape[dim], split.blocks).astype(out.dtype)
        ctx.record("cut", numbers)
        return lax.broadcast_in_dim(numbers, local_shape, (dim,))

    if ctx.find_split(shape) is None:
        return ctx.bind(equation, values)
    return [LazyValue(out.shape, out.dtype, make, is_constant=True)]


def concatenate(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Concatenate along another dimension, or blocks of one size along the split one."""
    dim, sharded = equation.params["dimension"], [v for v in values if isinstance(v, ShardedValue)]
    if not sharded:
        if any(isinstance(v, PartialValue) for v in values):
            return [PartialValue(x) for x in ctx.bind(equation, list(map(ctx.as_partial, values)))]
        return [_concatenate_lazy(ctx, equation, values)]
    split = sharded[0].split
    if split.dim != dim:
        (out,) = ctx.bind_sharded(split, equation, [ctx.shard(v, split) for v in values])
        ctx.concat_operands[id(out)] = (out, values)
        return [out]
    block = ctx.shape(sharded[0])[dim] // split.blocks
    values = [v for v in values if ctx.shape(v)[dim]]
    sizes = [ctx.shape(v)[dim] for v in values]
    if any(size % block for size in sizes):
        return None
    splits = [Split(dim, size // block) for size in sizes]
    if any(
        isinstance(v, ShardedValue) and v.split != c for v, c in zip(values, splits, strict=True)
    ):
        return None
    operands = [ctx.shard(v, c) for v, c in zip(values, splits, strict=True)]
    return ctx.bind_sharded(Split(dim, sum(sizes) // block), equation, operands)


def stack(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values:
    """Stack shards along a new dimension."""
    axis, split = (
        equation.params["axis"],
        next((v.split for v in values if isinstance(v, ShardedValue)), None),
    )
    if split is None:
        if any(isinstance(v, PartialValue) for v in values):
            return [PartialValue(x) for x in ctx.bind(equation, list(map(ctx.as_partial, values)))]
        return ctx.bind(equation, list(map(ctx.replicate, values)))
    out_split = split.with_dim(split.dim + (axis <= split.dim))
    return ctx.bind_sharded(out_split, equation, [ctx.shard(v, split) for v in values])


def unstack(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Unstack along another dimension than the split one."""
    (x,), axis = values, equation.params["axis"]
    if not isinstance(x, ShardedValue) or x.split.dim == axis:
        return None
    return ctx.bind_sharded(x.split.with_dim(x.split.dim - (axis < x.split.dim)), equation, [x.x])


def _concatenate_lazy(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Any:
    """Return a concatenation as a `LazyValue`, if an operand is one."""
    out, dim = aval_of(equation.outvars[0]), equation.params["dimension"]
    if not any(isinstance(v, LazyValue) for v in values) or ctx.find_split(out.shape) is None:
        return ctx.bind(equation, list(map(ctx.replicate, values)))[0]

    def make(ctx: PartitionContext, split: Split | None) -> Any:
        if split is None or split.dim == dim:
            full_array = ctx.bind(equation, list(map(ctx.replicate, values)))[0]
            return full_array if split is None else ctx.slice_local(full_array, split)
        return ctx.bind(equation, [ctx.shard(v, split) for v in values])[0]

    lazy = LazyValue(out.shape, out.dtype, make, all(map(is_constant, values)))
    ctx.concat_operands[id(lazy)] = (lazy, values)
    return lazy


def pad(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Pad other dimensions than the split one."""
    x, padding_value = ctx.evaluate_lazy(values[0]), values[1]
    if not isinstance(x, ShardedValue) or any(equation.params["padding_config"][x.split.dim]):
        return None
    return ctx.bind_sharded(x.split, equation, [x.x, ctx.replicate(padding_value)])


def split_array(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Split along another dimension than the split one, or into whole blocks."""
    (x,), axis = values, equation.params["axis"]
    if not isinstance(x, ShardedValue):
        return None
    if axis != x.split.dim:
        return [ShardedValue(section, x.split) for section in ctx.bind(equation, [x.x])]
    block = ctx.shape(x)[axis] // x.split.blocks
    sizes = equation.params["sizes"]
    if any(size % block or not size for size in sizes):
        return None
    local_sizes = tuple(size // ctx.group.size for size in sizes)
    sections = ctx.bind(equation, [x.x], sizes=local_sizes)
    return [ShardedValue(p, Split(axis, n // block)) for p, n in zip(sections, sizes, strict=True)]


def is_iota(ctx: PartitionContext, value: object) -> bool:
    """Return whether a constant is 0, 1, 2 … along its one dimension with more than one entry."""
    if not isinstance(value, LazyValue) or not value.is_constant:
        return False
    with jax.ensure_compile_time_eval():
        numbers = np.asarray(value.make(ctx.child(comms=[]), None)).reshape(-1)
    return bool((numbers == np.arange(numbers.size)).all())
