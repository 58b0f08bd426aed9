"""Parts of models of images written otherwise, to be measured beside those that hfjax has.

`moments`: mean and variance of a norm in one pass over x, and no sum in its backward pass, where
autodiff adds up deviations from the mean, which is nothing. `dilated`: the gradient of a dilated
kernel as that of a plain one. For dilated ones XLA calls cuDNN's forward convolution with a window
as large as the image, and rows as channels.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.models.vision import convolutions
from hfjax.parallel.in_parts import row_moments

Moments = tuple[jax.Array, jax.Array]
written = convolutions.convolve


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


def convolve(
    x: jax.Array, kernel: jax.Array, stride: int = 1, dilation: int = 1, padding: int | None = None
) -> jax.Array:
    """Return `hfjax.models.vision.convolutions.convolve`, where it is dilated with own gradients.

    Example:
        >>> x, kernel = jnp.arange(50.0).reshape(1, 5, 5, 2), jnp.arange(36.0).reshape(3, 3, 2, 2)
        >>> slope = lambda f: jax.grad(lambda k: (f(x, k, 1, 2) ** 2).sum())(kernel)
        >>> bool(jnp.allclose(slope(convolve), slope(written), rtol=1e-5))
        True
    """
    same = padding is None and stride == 1 and kernel.shape[:2] == (3, 3)
    if dilation == 1 or not same:
        return written(x, kernel, stride, dilation, padding)
    return _dilated(x, kernel, dilation)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dilated(x: jax.Array, kernel: jax.Array, dilation: int) -> jax.Array:
    return written(x, kernel, 1, dilation)


def _dilated_forward(x: jax.Array, kernel: jax.Array, dilation: int) -> Any:
    return _dilated(x, kernel, dilation), (x, kernel)


def _dilated_backward(dilation: int, saved: Any, of_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    (of_x,) = jax.linear_transpose(lambda x: written(x, kernel, 1, dilation), x)(of_y)
    apart = _apart(x, dilation)
    (of_kernel,) = jax.linear_transpose(lambda k: written(apart, k), kernel)(_apart(of_y, dilation))
    return of_x, of_kernel


_dilated.defvjp(_dilated_forward, _dilated_backward)


def _apart(x: jax.Array, dilation: int) -> jax.Array:
    """Return images of every so manieth row and column, as rows of a batch; zeros fill them up."""
    rows, height, width, channels = x.shape
    down, across = -(-height // dilation), -(-width // dilation)
    more = (0, down * dilation - height), (0, across * dilation - width)
    split = jnp.pad(x, ((0, 0), *more, (0, 0)))
    split = split.reshape(rows, down, dilation, across, dilation, channels)
    return split.transpose(0, 2, 4, 1, 3, 5).reshape(-1, down, across, channels)


TRIES: dict[str, tuple[Any, str, Callable]] = {
    "moments": (row_moments, "moments", in_one_pass),
    "dilated": (convolutions, "convolve", convolve),
}


def take(names: Iterable[str]) -> None:
    """Put these in their places, for all of this process."""
    for name in names:
        setattr(*TRIES[name])
