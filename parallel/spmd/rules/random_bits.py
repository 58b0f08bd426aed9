"""Rules of random numbers: a device draws its shard only, with the bits of a single device."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.random import threefry2x32_p

from hfjax.parallel.spmd.partition_context import PartitionContext, aval_of
from hfjax.parallel.spmd.placements import LazyValue, ShardedValue, Split
from hfjax.parallel.spmd.rules.pointwise import pointwise

Values = Sequence[Any]
_COUNTERS = 2**32  # beyond, a counter has a high word


def random_bits(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values:
    """Draw bits: of sharded keys, or only the shard of the bits that is needed."""
    (keys,), out = values, aval_of(equation.outvars[0])
    is_per_key = draws_per_key(aval_of(equation.invars[0]))
    if isinstance(keys, ShardedValue) and is_per_key:
        return ctx.bind_sharded(keys.split, equation, [keys.x])
    ndim, full_keys = len(ctx.shape(keys)), ctx.replicate(keys)
    bit_width, shape = equation.params["bit_width"], equation.params["shape"]
    if ctx.find_split(out.shape) is None:
        outs = ctx.bind(equation, [full_keys])
        ctx.record("draw", outs[0])  # for the microbatch, by its number
        return outs
    by_counter = math.prod(shape) < _COUNTERS and is_threefry(full_keys)

    def make(ctx: PartitionContext, split: Split | None) -> Any:
        if split is not None and split.dim < ndim and is_per_key:
            return ctx.bind(equation, [ctx.shard(full_keys, split)])[0]
        if split is None or not by_counter:
            sample = ctx.bind(equation, [full_keys])[0]
            ctx.record("draw", sample)
            return sample if split is None else ctx.slice_local(sample, split)
        sample = _draw_local(ctx, full_keys, shape, split, bit_width)
        ctx.record("draw", sample)
        return sample

    return [LazyValue(out.shape, out.dtype, make)]


def draws_per_key(keys: Any) -> bool:
    """Return whether the bits of each of several keys depend on that key.

    With rbg, and unsafe_rbg, all are drawn from the first key, in JAX too.
    """
    return str(keys.dtype) == "key<fry>"  # threefry2x32


def is_threefry(key: Any) -> bool:
    """Return whether the bits of an entry are those of its index, by the configuration of JAX."""
    by_counter = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]
    return draws_per_key(key) and by_counter


def _draw_local(
    ctx: PartitionContext, key: Any, shape: tuple, split: Split, bit_width: int
) -> jax.Array:
    """Return this device's shard of the bits of threefry: entry i is that of counter i."""
    bits_split = split.with_dim(split.dim - key.ndim)  # each key draws so
    local_shape, counter = ctx.group.local_shape(shape, bits_split), jnp.uint32(0)
    for dim, size in enumerate(shape):
        dim_indices = lax.broadcasted_iota("uint32", local_shape, dim)
        if dim == bits_split.dim:
            indices = ctx.group.global_indices(size, split.blocks, "uint32")
            dim_indices = lax.broadcast_in_dim(indices, local_shape, (dim,))
        counter = counter * jnp.uint32(size) + dim_indices
    key_data = jax.random.key_data(key)
    key_data = key_data.reshape(*key.shape, *[1] * len(shape), 2)
    first, second = key_data[..., 0], key_data[..., 1]
    counter = counter.reshape(*[1] * key.ndim, *local_shape)
    zero = counter * 0 + first * 0  # all operands vary alike: under vmap too
    counter = counter + zero
    high, low = threefry2x32_p.bind(first + zero, second + zero, zero, counter)
    if bit_width == 64:
        return lax.shift_left(high.astype("uint64"), jnp.uint64(32)) | low.astype("uint64")
    return (high ^ low).astype(f"uint{bit_width}")


def map_keys(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Run on sharded keys: what is made of a key are further dimensions."""
    (keys,) = values
    if not isinstance(keys, ShardedValue):
        return None
    return ctx.bind_sharded(keys.split, equation, [keys.x])


def derive_keys(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Derive keys from keys: from each alone, or replicated under rbg, which uses the first key."""
    if draws_per_key(aval_of(equation.invars[0])):
        is_fold_in = equation.primitive.name == "random_fold_in"
        return pointwise(ctx, equation, values) if is_fold_in else map_keys(ctx, equation, values)
    outs = ctx.bind(equation, list(map(ctx.replicate, values)))
    ctx.record("draw", outs[0])
    return outs


def wrap_keys(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Wrap key data as keys: the words of a key are the last dimension."""
    (key_data,) = values
    if not isinstance(key_data, ShardedValue) or key_data.split.dim == key_data.x.ndim - 1:
        return None
    return ctx.bind_sharded(key_data.split, equation, [key_data.x])


RULES: dict[str, Callable] = {
    "random_bits": random_bits,
    "random_split": derive_keys,
    "random_fold_in": derive_keys,
    "random_unwrap": map_keys,
    "random_clone": map_keys,
    "random_seed": map_keys,
    "random_wrap": wrap_keys,
}
