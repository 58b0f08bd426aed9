"""The product of a linear map as models and steps write it, the logits of a head, and tokens."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def project(constrain: Callable, x_BSI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
    """Return x @ kernel; the gradient of the kernel contracts rows flattened to one dimension.

    Two contracted dimensions are slow on a CPU. Only operands are flattened, never a result, so
    that a partial sum can still be scattered along the sequence. `constrain` puts the cotangent.
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
    """Return whole numbers in 32 bits or more: those of bytes end before a vocabulary does.

    >>> widen_tokens(jnp.uint8(255)) + 1
    Array(256, dtype=int32)
    """
    is_short = jnp.issubdtype(tokens.dtype, jnp.integer) and tokens.dtype.itemsize < 4
    return tokens.astype(jnp.int32) if is_short else tokens


def head_logits(
    constrain: Callable, x_BSD: jax.Array, kernel_VD: jax.Array, vocab: int, cap: float = 0.0
) -> jax.Array:
    """Return x @ kernel.T, placed by vocabulary; entries that pad the vocabulary are masked."""
    constrain_vocab = partial(constrain, names=("batch", None, "vocab"))
    logits = constrain_vocab(project(constrain_vocab, x_BSD, kernel_VD.T))
    logits = cap * jnp.tanh(logits / cap) if cap else logits  # a soft one
    if logits.shape[-1] == vocab:
        return logits
    real = lax.broadcasted_iota("int32", (1, 1, logits.shape[-1]), 2) < vocab
    return jnp.where(real, logits, jnp.finfo(logits.dtype).min)
