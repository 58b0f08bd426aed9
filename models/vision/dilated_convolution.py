"""A dilated convolution whose kernel gradient is that of an undilated one.

XLA asks cuDNN for the gradient of a dilated kernel as a forward convolution whose window is as
large as the image. Here the image is split by `space_to_batch` (padded with zeros), and the
gradient is that of an undilated kernel over more and smaller images, which cuDNN has.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

Convolution = Callable[[jax.Array, jax.Array], jax.Array]


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def convolve_dilated(
    convolution: Convolution, undilated: Convolution, dilation: int, x: jax.Array, kernel: jax.Array
) -> jax.Array:
    """Return a dilated convolution of stride 1 that keeps the size of images.

    Args:
        convolution: The convolution of (x, kernel).
        undilated: The same without dilation, which keeps the size.
        dilation: The dilation of the kernel.
        x: Images [N, H, W, C].
        kernel: [h, w, in, out].

    It supports reverse-mode differentiation, of any order; not forward mode (jax.jvp).
    """
    return convolution(x, kernel)


def _forward(
    convolution: Convolution, undilated: Convolution, dilation: int, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return convolve_dilated(convolution, undilated, dilation, x, kernel), (x, kernel)


def _backward(
    convolution: Convolution,
    undilated: Convolution,
    dilation: int,
    saved: tuple[jax.Array, jax.Array],
    dy: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    (dx,) = jax.linear_transpose(lambda x: convolution(x, kernel), x)(dy)
    images = space_to_batch(x, dilation)
    (d_kernel,) = jax.linear_transpose(lambda k: undilated(images, k), kernel)(
        space_to_batch(dy, dilation)
    )
    return dx, d_kernel


convolve_dilated.defvjp(_forward, _backward)


def space_to_batch(x: jax.Array, dilation: int) -> jax.Array:
    """Return images of every `dilation`-th row and column, stacked along the batch.

    >>> space_to_batch(jnp.arange(9.0).reshape(1, 3, 3, 1), 2)[:, :, :, 0].astype(int).tolist()[0]
    [[0, 2], [6, 8]]
    """
    batch_size, height, width, channels = x.shape
    down, across = -(-height // dilation), -(-width // dilation)
    padding = (0, down * dilation - height), (0, across * dilation - width)
    split = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    split = split.reshape(batch_size, down, dilation, across, dilation, channels)
    return split.transpose(0, 2, 4, 1, 3, 5).reshape(-1, down, across, channels)
