"""Parts of models of images written otherwise, to be measured beside those that hfjax has.

`moments`: mean and variance of a norm in one pass over x. A channel whose first number is far from
the others loses digits by it, so hfjax has two passes. `dilated`: XLA's own gradient of dilated
kernels, in place of hfjax.models.vision.dilated_gradient.
"""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.models.vision import convolutions
from hfjax.parallel.wings.kernels import row_moments

Moments = tuple[jax.Array, jax.Array]


@jax.custom_vjp
def in_one_pass(x: jax.Array) -> Moments:
    """Return mean and variance of each channel, of sums around a number of the channel.

    >>> mean, variance = in_one_pass(jnp.array([[1000.0], [1002.0]]))
    >>> float(mean[0]), float(variance[0])
    (1001.0, 1.0)
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    over = tuple(range(x.ndim - 1))
    near = wide[(slice(0, 1),) * len(over)]  # any number of a channel is near enough
    apart = wide - near
    mean, square = apart.mean(over), jnp.square(apart).mean(over)
    return mean + near.reshape(-1), jnp.maximum(square - jnp.square(mean), 0)


def _forward(x: jax.Array) -> tuple[Moments, tuple[jax.Array, jax.Array]]:
    mean, variance = in_one_pass(x)
    return (mean, variance), (x, mean)


def _backward(saved: tuple[jax.Array, jax.Array], given: Moments) -> tuple[jax.Array]:
    x, mean = saved
    count = x.size // x.shape[-1]
    as_x = lambda y: y.reshape((1,) * (x.ndim - 1) + (-1,))
    of_mean, of_variance = (as_x(y) / count for y in given)
    deviation = x.astype(mean.dtype) - as_x(mean)
    return ((of_mean + 2 * of_variance * deviation).astype(x.dtype),)


in_one_pass.defvjp(_forward, _backward)


TRIES: dict[str, tuple[Any, str, Callable]] = {
    "moments": (row_moments, "moments", in_one_pass),
    "dilated": (convolutions, "dilated", lambda whole, plain, rate, x, kernel: whole(x, kernel)),
}


def take(names: Iterable[str]) -> None:
    """Put these in their places, for all of this process."""
    for name in names:
        setattr(*TRIES[name])
