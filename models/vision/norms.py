"""Norms over channels, as in torch: batch norm, frozen batch norm and group norm.

All compute in float32 or wider and return the dtype of their input.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hfjax.models.layers import local_ops
from hfjax.models.vision.vision_config import ConvNetConfig

CHANNELS = ("channel_out",)
EPSILON = 1e-5


def make_norm(config: ConvNetConfig, size: int, *, rngs: nnx.Rngs) -> nnx.Module:
    """Return a model's norm after a convolution to `size` channels."""
    if config.norm == "group":
        return GroupNorm(size, config.norm_groups)
    return FrozenBatchNorm(size) if config.norm == "frozen" else BatchNorm(size, rngs=rngs)


class BatchNorm(nnx.BatchNorm):
    """torch's BatchNorm: normalises each channel over all examples and positions.

    Running statistics take a tenth of those of each step, with Bessel's correction of the variance.
    Statistics are float32 or wider, whatever the dtype of x.

    Args:
        size: The number of channels.
        momentum: The weight of a step's statistics in the new running ones.
        epsilon: Added to the variance.
        rngs: Unused.

    Example:
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from hfjax.models.vision.norms import BatchNorm
        >>> norm = BatchNorm(1, rngs=nnx.Rngs(0))
        >>> norm(jnp.array([[1.0], [3.0]])).round(3).tolist()
        [[-1.0], [1.0]]
        >>> [round(float(x[0]), 6) for x in (norm.mean[...], norm.var[...])]
        [0.2, 1.1]
    """

    def __init__(
        self, size: int, *, momentum: float = 0.1, epsilon: float = EPSILON, rngs: nnx.Rngs
    ) -> None:
        metadata: Any = {"scale_metadata": {"axes": CHANNELS}, "bias_metadata": {"axes": CHANNELS}}
        wide: Any = jnp.zeros(()).dtype  # float64 in x64 mode
        super().__init__(
            size, momentum=1 - momentum, epsilon=epsilon, param_dtype=wide, rngs=rngs, **metadata
        )
        self.mean = nnx.BatchStat(jnp.zeros((size,)))
        self.var = nnx.BatchStat(jnp.ones((size,)))
        self.kernels = local_ops

    def __call__(
        self, x: jax.Array, use_running_average: bool | None = None, *, mask: Any = None
    ) -> jax.Array:
        """Return x normalised by batch statistics, in evaluations by the running ones.

        Args:
            x: [batch, ..., channels].
            use_running_average: Whether to use running statistics. None: as `train` and `eval` set.
            mask: Must be None: all examples count.
        """
        if mask is not None:
            raise ValueError("BatchNorm(x, mask=…): all rows and positions count. Leave mask out.")
        running = self.use_running_average if use_running_average is None else use_running_average
        mean, variance = (self.mean[...], self.var[...]) if running else self._batch_stats(x)
        assert self.scale is not None
        assert self.bias is not None
        return _normalize(x, mean, variance, self.scale[...], self.bias[...], self.epsilon)

    def _batch_stats(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return mean and variance of x, and update the running ones."""
        mean, variance, count = self.kernels.channel_stats(x, self.axis_name)
        if count < 2:
            raise ValueError(
                f"BatchNorm in training of {list(x.shape)}: one number a channel, and a variance "
                "needs more than one. Give more rows or larger images, evaluate, or choose "
                'norm="group" or norm="frozen".'
            )
        new = (mean, variance * (count / (count - 1)))
        for running, batch_stat in zip((self.mean, self.var), new, strict=True):
            old = running[...]
            mixed = self.momentum * old + (1 - self.momentum) * batch_stat.astype(old.dtype)
            running[...] = lax.stop_gradient(mixed)
        return mean, variance


class FrozenBatchNorm(nnx.Module):
    """BatchNorm by running statistics in training too. Scale and bias are not parameters.

    They are variables like the statistics: a step changes none of them, they have no optimizer
    state, and their names are those of `BatchNorm`.

    Args:
        size: The number of channels.
        epsilon: Added to the variance.

    Example:
        >>> import jax.numpy as jnp
        >>> from hfjax.models.vision.norms import FrozenBatchNorm
        >>> FrozenBatchNorm(1, epsilon=0.0)(jnp.array([[1.0], [3.0]])).tolist()
        [[1.0], [3.0]]
    """

    def __init__(self, size: int, *, epsilon: float = EPSILON) -> None:
        self.scale, self.bias = nnx.BatchStat(jnp.ones((size,))), nnx.BatchStat(jnp.zeros((size,)))
        self.mean, self.var = nnx.BatchStat(jnp.zeros((size,))), nnx.BatchStat(jnp.ones((size,)))
        self.epsilon = epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x normalised by the running statistics.

        Args:
            x: [batch, ..., channels].
        """
        variables = (self.mean, self.var, self.scale, self.bias)
        mean, variance, scale, bias = (variable[...] for variable in variables)
        return _normalize(x, mean, variance, scale, bias, self.epsilon)


class GroupNorm(nnx.Module):
    """Normalises groups of consecutive channels over the positions of each example.

    Args:
        size: The number of channels.
        groups: The number of groups.
        epsilon: Added to the variance.

    Example:
        >>> import jax.numpy as jnp
        >>> from hfjax.models.vision.norms import GroupNorm
        >>> GroupNorm(2, 1)(jnp.array([[[1.0, 3.0]]])).round(3).tolist()
        [[[-1.0, 1.0]]]
    """

    def __init__(self, size: int, groups: int, *, epsilon: float = EPSILON) -> None:
        self.scale = nnx.Param(jnp.ones((size,)), axes=CHANNELS)
        self.bias = nnx.Param(jnp.zeros((size,)), axes=CHANNELS)
        self.groups, self.epsilon = groups, epsilon

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return x normalised.

        Args:
            x: [batch, ..., channels].
        """
        grouped = x.reshape(x.shape[0], -1, self.groups, x.shape[-1] // self.groups)
        wide = grouped.astype(jnp.promote_types(x.dtype, jnp.float32))
        centred = wide - wide.mean((1, 3), keepdims=True)
        variance = (centred**2).mean((1, 3), keepdims=True)
        unit = (centred * lax.rsqrt(variance + self.epsilon)).reshape(x.shape)
        return (
            unit * _broadcast_channels(x, self.scale[...]) + _broadcast_channels(x, self.bias[...])
        ).astype(x.dtype)


def _normalize(
    x: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    epsilon: float,
) -> jax.Array:
    """Return (x - mean) / sqrt(variance + epsilon) * scale + bias, channel by channel."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    factor = lax.rsqrt(variance.astype(wide) + epsilon) * scale.astype(wide)
    y = (x.astype(wide) - _broadcast_channels(x, mean)) * _broadcast_channels(
        x, factor
    ) + _broadcast_channels(x, bias)
    return y.astype(x.dtype)


def _broadcast_channels(x: jax.Array, channels: jax.Array) -> jax.Array:
    """Return per-channel values broadcastable to x, in float32 or wider."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return channels.astype(wide).reshape((1,) * (x.ndim - 1) + (-1,))
