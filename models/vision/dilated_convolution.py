"""A dilated convolution whose kernel's gradient is that of a plain one.

XLA asks cuDNN for the gradient of a dilated kernel as a forward convolution whose window is as
large as the image. Here every so manieth row and column is an image of its own (zeros fill them
up), and the gradient is that of a plain kernel over more and smaller images, which cuDNN has.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

Convolution = Callable[[jax.Array, jax.Array], jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def dilated(
    whole: Convolution, plain: Convolution, dilation: int, x: jax.Array, kernel: jax.Array
) -> jax.Array:
    """Return a dilated convolution of stride 1 that keeps the size of images.

    Args:
        whole: The convolution of (x, kernel).
        plain: The same without dilation, which keeps the size.
        dilation: How far the kernel's places are from one another.
        x: Images [N, H, W, C].
        kernel: [h, w, in, out].

    It is differentiated backward, as often as one likes; not forward (jax.jvp).
    """
    return whole(x, kernel)


def _forward(
    whole: Convolution, plain: Convolution, dilation: int, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return dilated(whole, plain, dilation, x, kernel), (x, kernel)


def _backward(
    whole: Convolution,
    plain: Convolution,
    dilation: int,
    saved: tuple[jax.Array, jax.Array],
    of_y: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    (of_x,) = jax.linear_transpose(lambda x: whole(x, kernel), x)(of_y)
    images = apart(x, dilation)
    (of_kernel,) = jax.linear_transpose(lambda k: plain(images, k), kernel)(apart(of_y, dilation))
    return of_x, of_kernel


dilated.defvjp(_forward, _backward)


def apart(x: jax.Array, dilation: int) -> jax.Array:
    """Return images of every so manieth row and column, one after the other.

    >>> apart(jnp.arange(9.0).reshape(1, 3, 3, 1), 2)[:, :, :, 0].astype(int).tolist()[0]
    [[0, 2], [6, 8]]
    """
    rows, height, width, channels = x.shape
    down, across = -(-height // dilation), -(-width // dilation)
    more = (0, down * dilation - height), (0, across * dilation - width)
    split = jnp.pad(x, ((0, 0), *more, (0, 0)))
    split = split.reshape(rows, down, dilation, across, dilation, channels)
    return split.transpose(0, 2, 4, 1, 3, 5).reshape(-1, down, across, channels)
