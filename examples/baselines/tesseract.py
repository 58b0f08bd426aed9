"""Tesseract: 2.5D tensor parallelism, which is SUMMA on d layers of q x q devices.

Each layer multiplies its own 1 / d of the tokens by all weights; the layers add their gradients of
the weights. So it is 2D beside data parallelism. (Wang et al., 2021. Colossal-AI's 2.5D splits no
tokens and adds no gradients: its layers repeat each other's work.)

For a map of T tokens from k to n features each device sends what SUMMA does for T / d tokens, and
backward 2 (d - 1) / d · k n / q² numbers more, in 2 (d - 1) steps: a ring over the layers.
"""

from functools import partial

import jax

from baselines.ring import ring_all_reduce
from baselines.summa import summa_linear


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def shared(w: jax.Array, depth: str) -> jax.Array:
    """Return an array of which every layer has a copy; its gradient is summed over the layers."""
    return w


shared.defvjp(
    lambda w, depth: (w, None), lambda depth, kept, slope: (ring_all_reduce(slope, depth),)
)


def tesseract_linear(x: jax.Array, w: jax.Array, rows: str, columns: str, depth: str) -> jax.Array:
    """Return this device's block of X W, with the gradients of both.

    Args:
        x: Its block of the activations, [T / (d q), k / q].
        w: Its block of the weights, [k / q, n / q], the same on each layer.
        rows: The mesh axis along which the rows of blocks lie.
        columns: The mesh axis along which their columns lie.
        depth: The mesh axis of the layers.
    """
    return summa_linear(x, shared(w, depth), rows, columns)
