"""Matmuls of linear maps for models and steps, the logits of a head, and token dtypes."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def project(constrain: Callable, x_BSI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """Return x @ kernel; the kernel's gradient contracts batch and sequence as one dimension.

    Contracting two dimensions is slow on a CPU. Only operands are flattened, never a result: a
    partial sum can still be reduce-scattered by sequence. `constrain` places the cotangent.
    """
    return x_BSI @ kernel_IO


def _forward(constrain: Callable, x_BSI: jax.Array, kernel_IO: jax.Array) -> tuple:
    return x_BSI @ kernel_IO, (x_BSI, kernel_IO)


def _backward(constrain: Callable, saved: tuple[jax.Array, jax.Array], dy_BSO: jax.Array) -> tuple:
    x_BSI, kernel_IO = saved
    dy = constrain(dy_BSO)
    flatten_batch = lambda a: a.reshape(-1, a.shape[-1])
    grads = dy @ kernel_IO.T, flatten_batch(x_BSI).T @ flatten_batch(dy)
    return tuple(g.astype(x.dtype) for g, x in zip(grads, saved, strict=True))


project.defvjp(_forward, _backward)


def widen_tokens(tokens: jax.Array) -> jax.Array:
    """Return integers in 32 bits or more: a vocabulary exceeds the range of one or two bytes.

    >>> widen_tokens(jnp.uint8(255)) + 1
    Array(256, dtype=int32)
    """
    is_short = jnp.issubdtype(tokens.dtype, jnp.integer) and tokens.dtype.itemsize < 4
    return tokens.astype(jnp.int32) if is_short else tokens


def head_logits(
    constrain: Callable, x_BSD: jax.Array, kernel_VD: jax.Array, vocab: int, cap: float = 0.0
) -> jax.Array:
    """Return x @ kernel.T, sharded by vocabulary; logits that pad the vocabulary are masked."""
    constrain_vocab = partial(constrain, names=("batch", None, "vocab"))
    logits = constrain_vocab(project(constrain_vocab, x_BSD, kernel_VD.T))
    logits = cap * jnp.tanh(logits / cap) if cap else logits  # soft cap
    if logits.shape[-1] == vocab:
        return logits
    real = lax.broadcasted_iota("int32", (1, 1, logits.shape[-1]), 2) < vocab
    return jnp.where(real, logits, jnp.finfo(logits.dtype).min)
