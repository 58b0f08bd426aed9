"""Mean and variance of each channel over the rows of all devices, in one message each way.

Each device computes the mean of its rows and the squares of their deviations from it; all devices
have each other's, and join them by the formula of Chan, Golub and LeVeque (1979). So a mean that is
large beside the deviation costs no digits. The backward pass sums what it is given, once.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import source_info_util

from hfjax.parallel.remat import STATISTICS
from hfjax.parallel.spmd.global_batch import devices_along
from hfjax.parallel.spmd.partition_context import Scope, is_recording
from hfjax.parallel.spmd.placements import Part, Side, held
from hfjax.parallel.spmd.rule_calls import NamedCall, named
from hfjax.utils.mean_variance import moments

source_info_util.register_exclusion(__file__)  # the line of a norm is the user's

Moments = tuple[jax.Array, jax.Array]


def of_rows(
    self: Any, x: jax.Array, axes: tuple[str, ...] | None = None
) -> tuple[jax.Array, jax.Array, int]:
    """Return mean and variance of each channel, and of how many numbers: a method of `Local`.

    A model that sees the rows of all devices gets those of all rows. One that sees its own gets
    those of the rows along `axes`, if it asks for any.
    """
    here = x.size // x.shape[-1]
    along = tuple(axis for axis in axes or () if devices_along(axis) > 1)
    side = Side(along, math.prod(map(devices_along, along)))
    if along:
        mean, variance = joined(side, x)
    else:
        mean, variance = named(_in_parts, moments)(x) if is_recording() else moments(x)
    return mean, variance, here * side.size


def _in_parts(call: NamedCall, scope: Scope, body: Any, arguments: Any) -> list[jax.Array]:
    """Run by the rule if rows or positions are split; else as it is written."""
    x = scope.settled(arguments[0])
    last = len(scope.shape(x)) - 1
    if scope.side.size == 1 or not isinstance(x, Part) or x.cut.dim == last:
        return scope.run(scope, *body, [x])
    mean, variance = joined(scope.side, held(x))
    scope.tell("gather", jnp.zeros((scope.side.size, 2, mean.size), mean.dtype))
    return [mean, variance]


def joined(side: Side, x: jax.Array) -> Moments:
    """Return mean and variance over what all devices of a side have, equally much of it."""
    found: Any = _joined(side, x)
    return found


def _found(side: Side, x: jax.Array) -> Moments:
    here = jnp.stack(moments(x))
    means, variances = jnp.moveaxis(side.stacked(here), 1, 0)
    mean = means.mean(0)
    variance = (variances + jnp.square(means - mean[None])).mean(0)
    named = partial(checkpoint_name, name=STATISTICS)  # kept where layers are computed again
    return named(mean), named(variance)


def _forward(side: Side, x: jax.Array) -> tuple[Moments, tuple[jax.Array, jax.Array]]:
    found = _found(side, x)
    return found, (x, found[0])


def _backward(side: Side, saved: tuple[jax.Array, jax.Array], given: Moments) -> tuple[jax.Array]:
    x, mean = saved
    sums = side.total(jnp.stack(given)) / (side.size * (x.size // x.shape[-1]))
    like = lambda of_channels: of_channels.reshape(*[1] * (x.ndim - 1), -1)
    deviation = x.astype(mean.dtype) - like(mean)
    return ((like(sums[0]) + 2 * like(sums[1]) * deviation).astype(x.dtype),)


_joined = jax.custom_vjp(_found, nondiff_argnums=(0,))
_joined.defvjp(_forward, _backward)
