"""SUMMA: a product of matrices whose blocks lie on a square of devices (2D tensor parallelism).

Device (i, j) of q x q has block (i, j) of activations, weights and outputs. For each l in turn,
column l broadcasts its blocks of activations along the rows and row l its blocks of weights along
the columns, and every device adds the product of what it received: nobody ever has more than one
block of each. Van de Geijn and Watts, 1997; Optimus (Xu et al., 2021) trains transformers so, with
two more products for the gradients, in which sums travel to where blocks did come from.

For a map of T tokens from k to n features each of the three products sends, in numbers,
(q - 1) / q² · (T k + k n) from every device, from neighbour to neighbour, in 2 q (q - 1) steps if
nothing overlaps. Forward is one product, backward are two: T k goes three times, and so does k n.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


def broadcast(x: jax.Array, root: int, axis: str) -> jax.Array:
    """Return the array of the device `root`, which neighbours hand on to each other."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    for hop in range(n - 1):
        sender, receiver = (root + hop) % n, (root + hop + 1) % n
        x = jnp.where(me == receiver, lax.ppermute(x, axis, [(sender, receiver)]), x)
    return x


def reduce(x: jax.Array, root: int, axis: str) -> jax.Array:
    """Return, on the device `root`, the sum of all: the way of a broadcast, backward."""
    n = lax.axis_size(axis)
    for hop in reversed(range(n - 1)):
        sender, receiver = (root + hop + 1) % n, (root + hop) % n
        x = x + lax.ppermute(x, axis, [(sender, receiver)])
    return x


def multiply(x: jax.Array, w: jax.Array, rows: str, columns: str) -> jax.Array:
    """Return this device's block of X W."""
    y = jnp.zeros((x.shape[0], w.shape[1]), x.dtype)
    for l in range(lax.axis_size(rows)):
        y += broadcast(x, l, columns) @ broadcast(w, l, rows)
    return y


def multiply_by_transpose(dy: jax.Array, w: jax.Array, rows: str, columns: str) -> jax.Array:
    """Return this device's block of dY Wᵀ, the gradient of X."""
    me, dx = lax.axis_index(columns), jnp.zeros((dy.shape[0], w.shape[0]), dy.dtype)
    for l in range(lax.axis_size(columns)):
        part = dy @ broadcast(w, l, rows).T
        dx = jnp.where(me == l, reduce(part, l, columns), dx)
    return dx


def multiply_transposed(x: jax.Array, dy: jax.Array, rows: str, columns: str) -> jax.Array:
    """Return this device's block of Xᵀ dY, the gradient of W."""
    me, dw = lax.axis_index(rows), jnp.zeros((x.shape[1], dy.shape[1]), dy.dtype)
    for l in range(lax.axis_size(rows)):
        part = broadcast(x, l, columns).T @ dy
        dw = jnp.where(me == l, reduce(part, l, rows), dw)
    return dw


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def summa_linear(x: jax.Array, w: jax.Array, rows: str, columns: str) -> jax.Array:
    """Return this device's block of X W, with the gradients of both.

    Args:
        x: Its block of the activations, [T / q, k / q].
        w: Its block of the weights, [k / q, n / q].
        rows: The mesh axis along which the rows of blocks lie.
        columns: The mesh axis along which their columns lie.
    """
    q, p = lax.axis_size(rows), lax.axis_size(columns)
    if q != p:
        raise ValueError(
            f"SUMMA on {q} x {p} devices: its blocks lie on a square. Take {min(q, p)} x "
            f"{min(q, p)} of them, and tesseract_linear if their number is a multiple of that."
        )
    return multiply(x, w, rows, columns)


def _forward(x: jax.Array, w: jax.Array, rows: str, columns: str) -> tuple[jax.Array, tuple]:
    return summa_linear(x, w, rows, columns), (x, w)  # own blocks only: nothing gathered is kept


def _backward(rows: str, columns: str, kept: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = kept
    dx = multiply_by_transpose(dy, w, rows, columns)
    return dx, multiply_transposed(x, dy, rows, columns)


summa_linear.defvjp(_forward, _backward)
