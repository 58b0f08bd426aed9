"""Mean and variance of each channel over the global batch, in one collective each way.

Each device computes the mean of its examples and the squares of their deviations from it; devices
all-gather these and combine them by the formula of Chan, Golub and LeVeque (1979). So a mean that
is large compared to the deviation costs no digits. The backward pass sums its cotangents, once.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import source_info_util

from hfjax.parallel.remat import STATISTICS
from hfjax.parallel.spmd.axes import axis_size_or_one
from hfjax.parallel.spmd.partition_context import PartitionContext, is_recording
from hfjax.parallel.spmd.placements import AxisGroup, ShardedValue, local_array
from hfjax.parallel.spmd.rule_calls import RuleCall, keep_as_call
from hfjax.utils.mean_variance import mean_and_variance

source_info_util.register_exclusion(__file__)  # report the user's line for a norm

MeanVariance = tuple[jax.Array, jax.Array]


def batch_stats(
    self: Any, x: jax.Array, axes: tuple[str, ...] | None = None
) -> tuple[jax.Array, jax.Array, int]:
    """Return mean and variance of each channel, and of how many numbers: a method of `ModelOps`.

    A model that sees the global batch gets those of all examples. One that sees local examples gets
    those of the examples along `axes`, if it asks for any.
    """
    local_count = x.size // x.shape[-1]
    comm_axes = tuple(axis for axis in axes or () if axis_size_or_one(axis) > 1)
    group = AxisGroup(comm_axes, math.prod(map(axis_size_or_one, comm_axes)))
    if comm_axes:
        mean, variance = global_stats(group, x)
    else:
        mean, variance = (
            keep_as_call(_stats_rule, mean_and_variance)(x)
            if is_recording()
            else mean_and_variance(x)
        )
    return mean, variance, local_count * group.size


def _stats_rule(
    call: RuleCall, ctx: PartitionContext, body: Any, arguments: Any
) -> list[jax.Array]:
    """Run by the rule if batch or sequence are sharded; else run the equations."""
    x = ctx.materialize(arguments[0])
    last = len(ctx.shape(x)) - 1
    if ctx.group.size == 1 or not isinstance(x, ShardedValue) or x.split.dim == last:
        return ctx.run(ctx, *body, [x])
    mean, variance = global_stats(ctx.group, local_array(x))
    ctx.record("gather", jnp.zeros((ctx.group.size, 2, mean.size), mean.dtype))
    return [mean, variance]


def global_stats(group: AxisGroup, x: jax.Array) -> MeanVariance:
    """Return mean and variance over the equal shards of all devices of a group."""
    stats: Any = _global_stats(group, x)
    return stats


def _compute_stats(group: AxisGroup, x: jax.Array) -> MeanVariance:
    local_stats = jnp.stack(mean_and_variance(x))
    means, variances = jnp.moveaxis(group.all_gather_stack(local_stats), 1, 0)
    mean = means.mean(0)
    variance = (variances + jnp.square(means - mean[None])).mean(0)
    save_name = partial(checkpoint_name, name=STATISTICS)  # kept where layers are recomputed
    return save_name(mean), save_name(variance)


def _forward(group: AxisGroup, x: jax.Array) -> tuple[MeanVariance, tuple[jax.Array, jax.Array]]:
    stats = _compute_stats(group, x)
    return stats, (x, stats[0])


def _backward(
    group: AxisGroup, residuals: tuple[jax.Array, jax.Array], cotangents: MeanVariance
) -> tuple[jax.Array]:
    x, mean = residuals
    sums = group.all_reduce(jnp.stack(cotangents)) / (group.size * (x.size // x.shape[-1]))
    to_channels = lambda of_channels: of_channels.reshape(*[1] * (x.ndim - 1), -1)
    deviation = x.astype(mean.dtype) - to_channels(mean)
    return ((to_channels(sums[0]) + 2 * to_channels(sums[1]) * deviation).astype(x.dtype),)


_global_stats = jax.custom_vjp(_compute_stats, nondiff_argnums=(0,))
_global_stats.defvjp(_forward, _backward)
