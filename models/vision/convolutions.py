"""Convolutions, pooling and resizing of images [B, H, W, C], as in torch."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from hfjax.models.layers import Initializer
from hfjax.models.vision.dilated_convolution import convolve_dilated
from hfjax.models.vision.norms import make_norm
from hfjax.models.vision.vision_config import ConvNetConfig

KERNEL_AXES = ("height", "width", "channel_in", "channel_out")


def fan_out_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return a normally distributed kernel whose variance is 2 / fan_out.

    That is Kaiming's initialisation for ReLUs, as in torchvision's convolutional models.
    """
    return math.sqrt(2 / math.prod((*shape[:-2], shape[-1]))) * jax.random.normal(key, shape)


def fan_in_uniform(inputs: int) -> Initializer:
    """Return a uniform initializer within ±1 / sqrt(inputs), as in torch's layers."""
    limit = 1 / math.sqrt(inputs)
    return lambda key, shape: jax.random.uniform(key, shape, minval=-limit, maxval=limit)


def convolve(
    x: jax.Array, kernel: jax.Array, stride: int = 1, dilation: int = 1, groups: int = 1
) -> jax.Array:
    """Return a convolution of images [B, H, W, in], padded so that a stride of 1 keeps the size.

    If it is dilated, the kernel's gradient has another form than XLA's (`convolve_dilated`).

    >>> convolve(jnp.ones((1, 3, 3, 2)), jnp.ones((3, 3, 2, 1)))[0, :, :, 0].tolist()
    [[8.0, 12.0, 8.0], [12.0, 18.0, 12.0], [8.0, 12.0, 8.0]]
    """
    kernel_size = kernel.shape[:2]

    def xla_conv(x: jax.Array, kernel: jax.Array, dilation: int) -> jax.Array:
        return lax.conv_general_dilated(
            x,
            kernel,
            (stride, stride),
            [(n, n) for n in (dilation * (k - 1) // 2 for k in kernel_size)],
            rhs_dilation=(dilation, dilation),
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    if dilation > 1 and stride == 1 and groups == 1 and all(n % 2 for n in kernel_size):
        convolution, undilated = (partial(xla_conv, dilation=n) for n in (dilation, 1))
        return convolve_dilated(convolution, undilated, dilation, x, kernel)
    return xla_conv(x, kernel, dilation)


class Conv(nnx.Module):
    """A convolution padded with zeros, so that a stride of 1 keeps the size.

    Args:
        shape: The shape of the kernel, [h, w, in / groups, out].
        stride: The stride.
        dilation: The dilation of the kernel.
        bias: Whether to add a bias.
        draw: The initializer of the kernel.
        rngs: The random number generators.

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
        kernel_init: Initializer = fan_out_normal,
        rngs: nnx.Rngs,
    ) -> None:
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape), axes=KERNEL_AXES)
        bias_init = fan_in_uniform(math.prod(shape[:3]))
        make_bias = lambda: nnx.Param(bias_init(rngs.params(), shape[3:]), axes=KERNEL_AXES[3:])
        self.bias = make_bias() if bias else None
        self.stride, self.dilation = stride, dilation

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the convolution of images [B, H, W, in], with checkpoint name conv for remat."""
        kernel = jnp.asarray(self.kernel[...])
        groups = x.shape[-1] // kernel.shape[2]
        y = convolve(x.astype(kernel.dtype), kernel, self.stride, self.dilation, groups)
        y = checkpoint_name(y, "conv")
        if self.bias is not None:
            y = y + self.bias[...].reshape(1, 1, 1, -1)
        return y.astype(x.dtype)


class ConvNorm(nnx.Module):
    """A convolution without a bias, followed by a norm."""

    def __init__(self, conv: Conv, config: ConvNetConfig, *, rngs: nnx.Rngs) -> None:
        self.conv = conv
        self.norm = make_norm(config, conv.kernel.shape[3], rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the normalised convolution of x."""
        return self.norm(self.conv(x))


def max_pool(x: jax.Array) -> jax.Array:
    """Return the 3x3 max pooling with stride 2; padding is ignored.

    >>> max_pool(-jnp.ones((1, 4, 4, 1))).ravel().tolist()
    [-1.0, -1.0, -1.0, -1.0]
    """
    padding = ((0, 0), (1, 1), (1, 1), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), padding)


def global_avg_pool(x: jax.Array) -> jax.Array:
    """Return the mean of each channel of each image, [B, C], summed in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return wide.mean((1, 2)).astype(x.dtype)


def resize(x: jax.Array, size: tuple[int, int]) -> jax.Array:
    """Return images resized bilinearly, with pixel corners aligned at the edges.

    That is torch's interpolate with align_corners=False, also for smaller sizes.

    >>> resize(jnp.array([0.0, 4.0]).reshape(1, 1, 2, 1), (1, 4)).ravel().tolist()
    [0.0, 1.0, 3.0, 4.0]
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    for axis, (subscripts, new) in enumerate(
        zip(("oh,bhwc->bowc", "ow,bhwc->bhoc"), size, strict=True)
    ):
        old = x.shape[1 + axis]
        if old != new:
            weights = jnp.asarray(_bilinear_weights(old, new), wide.dtype)
            wide = jnp.einsum(subscripts, weights, wide, precision=lax.Precision.HIGHEST)
    return wide.astype(x.dtype)


def _bilinear_weights(old: int, new: int) -> np.ndarray:
    """Return the weight of each old position in each new one, [new, old]."""
    positions = np.maximum((np.arange(new) + 0.5) * (old / new) - 0.5, 0)
    left = np.minimum(positions.astype(int), old - 1)
    right, fraction = np.minimum(left + 1, old - 1), positions - left
    weights = np.zeros((new, old))
    np.add.at(weights, (np.arange(new), left), 1 - fraction)
    np.add.at(weights, (np.arange(new), right), fraction)
    return weights
