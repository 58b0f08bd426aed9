"""An array as equal pieces of one vector, which is what all-reduces and servers cut."""

import math

import jax
import jax.numpy as jnp


def in_pieces(x: jax.Array, count: int) -> jax.Array:
    """Return [count, size]: the numbers of an array in order, zeros after them if they end early.

    >>> in_pieces(jnp.arange(5), 3).tolist()
    [[0, 1], [2, 3], [4, 0]]
    """
    size = math.ceil(x.size / count)
    return jnp.pad(x.ravel(), (0, size * count - x.size)).reshape(count, size)


def joined(pieces: jax.Array, like: jax.Array) -> jax.Array:
    """Return the array, of this shape, that lies in pieces.

    >>> joined(jnp.array([[0, 1], [2, 3], [4, 0]]), jnp.zeros(5)).tolist()
    [0, 1, 2, 3, 4]
    """
    return pieces.ravel()[: like.size].reshape(like.shape)
