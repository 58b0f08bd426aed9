"""Convolutions, pooling and resizing of images [B, H, W, C], as torch computes them."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from hfjax.models.layers import Draw
from hfjax.models.vision.dilated_convolution import dilated
from hfjax.models.vision.norms import norm_after
from hfjax.models.vision.vision_config import ConvNetConfig

OF_KERNEL = (None, None, "channel_in", "channel_out")


def by_outputs(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a kernel of normal numbers whose variance is 2 over what a number of x goes to.

    That is Kaiming's for ReLUs, fan_out, as torchvision's convolutional models begin.
    """
    return math.sqrt(2 / math.prod((*shape[:-2], shape[-1]))) * jax.random.normal(key, shape)


def by_inputs(inputs: int) -> Draw:
    """Return what draws numbers evenly within 1 / sqrt(inputs): how torch's layers begin."""
    bound = 1 / math.sqrt(inputs)
    return lambda key, shape: jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def convolve(
    x: jax.Array, kernel: jax.Array, stride: int = 1, dilation: int = 1, groups: int = 1
) -> jax.Array:
    """Return a convolution of images [B, H, W, in], padded so that a stride of 1 keeps the size.

    Where it is dilated the kernel's gradient has another form than XLA's (`dilated`).

    >>> convolve(jnp.ones((1, 3, 3, 2)), jnp.ones((3, 3, 2, 1)))[0, :, :, 0].tolist()
    [[8.0, 12.0, 8.0], [12.0, 18.0, 12.0], [8.0, 12.0, 8.0]]
    """
    sides = kernel.shape[:2]

    def of_xla(x: jax.Array, kernel: jax.Array, dilation: int) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            [(n, n) for n in (dilation * (k - 1) // 2 for k in sides)],
            rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    if dilation > 1 and stride == 1 and groups == 1 and all(n % 2 for n in sides):
        whole, plain = (partial(of_xla, dilation=n) for n in (dilation, 1))
        return dilated(whole, plain, dilation, x, kernel)
    return of_xla(x, kernel, dilation)


class Conv(nnx.Module):
    """A convolution padded with zeros, so that a stride of 1 keeps the size.

    Args:
        shape: Of the kernel, [h, w, in / groups, out].
        stride: From one position to the next.
        dilation: From one row and column of the kernel to the next.
        bias: Whether a bias is added.
        draw: What draws the kernel.
        rngs: Where it is drawn from.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from hfjax.models.vision.convolutions import Conv
        >>> Conv((3, 3, 4, 8), stride=2, rngs=nnx.Rngs(0))(jnp.ones((2, 9, 9, 4))).shape
        (2, 5, 5, 8)
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int],
        *,
        stride: int = 1,
        dilation: int = 1,
        bias: bool = False,
        draw: Draw = by_outputs,
        rngs: nnx.Rngs,
    ) -> None:
        self.kernel = nnx.Param(draw(rngs.params(), shape), axes=OF_KERNEL)
        of_bias = by_inputs(math.prod(shape[:3]))
        drawn = lambda: nnx.Param(of_bias(rngs.params(), shape[3:]), axes=OF_KERNEL[3:])
        self.bias = drawn() if bias else None
        self.stride, self.dilation = stride, dilation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the convolution of images [B, H, W, in], named conv for remat."""
        kernel = jnp.asarray(self.kernel[...])
        groups = x.shape[-1] // kernel.shape[2]
        y = convolve(x.astype(kernel.dtype), kernel, self.stride, self.dilation, groups)
        y = checkpoint_name(y, "conv")
        if self.bias is not None:
            y = y + self.bias[...].reshape(1, 1, 1, -1)
        return y.astype(x.dtype)


class ConvNorm(nnx.Module):
    """A convolution without a bias, and the norm after it."""

    def __init__(self, conv: Conv, config: ConvNetConfig, *, rngs: nnx.Rngs) -> None:
        self.conv = conv
        self.norm = norm_after(config, conv.kernel.shape[3], rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return what the norm makes of the convolution."""
        return self.norm(self.conv(x))


def max_pool(x: jax.Array) -> jax.Array:
    """Return the greatest of each 3x3 numbers, two positions apart; beyond the edge are none.

    >>> max_pool(-jnp.ones((1, 4, 4, 1))).ravel().tolist()
    [-1.0, -1.0, -1.0, -1.0]
    """
    around = ((0, 0), (1, 1), (1, 1), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), around)


def mean_of_positions(x: jax.Array) -> jax.Array:
    """Return the mean of each channel of each image, [B, C]; added in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide.mean((1, 2)).astype(x.dtype)


def resized(x: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Return images of another size, bilinear: corners of pixels stay where they are.

    That is torch's interpolate with align_corners=False, also where images get smaller.

    >>> resized(jnp.array([0.0, 4.0]).reshape(1, 1, 2, 1), (1, 4)).ravel().tolist()
    [0.0, 1.0, 3.0, 4.0]
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    for along, (product, new) in enumerate(
        zip(("oh,bhwc->bowc", "ow,bhwc->bhoc"), size, strict=True)
    ):
        old = x.shape[1 + along]
        if old != new:
            shares = jnp.asarray(_shares(old, new), wide.dtype)
            wide = jnp.einsum(product, shares, wide, precision=lax.Precision.HIGHEST)
    return wide.astype(x.dtype)


def _shares(old: int, new: int) -> np.ndarray:
    """Return what of each old position a new one has, [new, old]."""
    at = np.maximum((np.arange(new) + 0.5) * (old / new) - 0.5, 0)
    left = np.minimum(at.astype(int), old - 1)
    right, part = np.minimum(left + 1, old - 1), at - left
    shares = np.zeros((new, old))
    np.add.at(shares, (np.arange(new), left), 1 - part)
    np.add.at(shares, (np.arange(new), right), part)
    return shares
