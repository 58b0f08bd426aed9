"""Mean and variance of each channel, for a norm over examples and positions."""

import jax
import jax.numpy as jnp


@jax.custom_jvp
def mean_and_variance(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return mean and variance over all dimensions but the last, in at least float32.

    The variance is the mean squared deviation from the mean; x² is never computed.

    >>> mean, variance = mean_and_variance(jnp.array([[1000.0], [1002.0]]))
    >>> float(mean[0]), float(variance[0])
    (1001.0, 1.0)
    """
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    dims = tuple(range(x.ndim - 1))
    mean = x.mean(dims, keepdims=True)
    return mean.reshape(-1), jnp.square(x - mean).mean(dims)


@mean_and_variance.defjvp
def _jvp(primals: tuple, tangents: tuple) -> tuple:
    """Omit the variance's dependence on the mean, which sums to zero."""
    (x,), (dx,) = primals, tangents
    mean, variance = mean_and_variance(x)
    dims = tuple(range(x.ndim - 1))
    dx = dx.astype(mean.dtype)
    deviation = x.astype(mean.dtype) - mean.reshape(*[1] * len(dims), -1)
    return (mean, variance), (dx.mean(dims), 2 * (deviation * dx).mean(dims))
