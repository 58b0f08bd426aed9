"""Kernels, or the plain JAX beside them, on a mesh whose tensor axis splits their operands.

[B]atch, [S]equence, [D] embed, [V]ocabulary.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

from hfjax.pallas_kernels.attention import block as flash_block
from hfjax.pallas_kernels.cross_entropy import logits, loss as cross_entropy
from hfjax.pallas_kernels.varying import together
from hfjax.parallel.engine.on_shards import OnShards
from hfjax.parallel.mesh import TENSOR_AXES, in_use

FORMS = ("pallas", "reference")  # those that are written here; xla is the plain program

SPLIT = TENSOR_AXES  # of one dimension


def attention(mesh: Mesh, form: str, documents: bool, window: int | None = None) -> Callable:
    """Return causal attention of (q_BSHD, k_BSGD, v_BSGD[, documents_BS]), heads split."""
    mask = flash_block.Mask(window=window)
    how = flash_block.Form(mask, flash_block.TUNING, (0, 0), form == "pallas")

    def places(documents):
        one = documents[0] if documents else None
        return flash_block.Places(query_documents=one, key_documents=one)

    def forward(q, k, v, *documents):
        out, lse = how.forward((q, k, v), places(documents))
        return out, (out, lse)

    def backward(operands, kept, do):
        q, k, v, *documents = operands
        out, lse = kept
        final = flash_block.final(out, lse, do)
        return *how.backward((q, k, v), final, places(documents)), *(None for _ in documents)

    heads, rows = P(None, None, SPLIT), P(None, SPLIT)
    operands = (heads, heads, heads, P())[: 3 + documents]
    return OnShards(mesh, forward, backward, operands, heads, (heads, rows))


def losses(mesh: Mesh, form: str, vocab: int) -> Callable:
    """Return (x_BSD, kernel_VD, targets_BS) -> the loss of each, the vocabulary split."""
    axis = in_use(mesh, TENSOR_AXES)
    kernel = form == "pallas"
    tuning = logits.KERNEL if kernel else logits.PLAIN
    problem = cross_entropy.Problem.of(kernel, axis or None, vocab, tuning)

    def forward(x, kernel, targets):
        x, kernel = together((x, kernel))
        losses, (*_, logsumexp) = cross_entropy.forward(problem, x, kernel, targets)
        return losses, logsumexp

    def backward(operands, logsumexp, gradient):
        x, kernel, targets = operands
        saved = (*together((x, kernel)), targets, logsumexp)
        dx, *rest = cross_entropy.backward(problem, saved, gradient)
        return lax.psum(dx, axis) if axis else dx, *rest

    of_rows = OnShards(mesh, forward, backward, (P(), P(SPLIT), P()), P(), P())

    def run(x_BSD, kernel_VD, targets_BS):
        rows = x_BSD.reshape(-1, x_BSD.shape[-1])
        labels = targets_BS.reshape(-1).astype(jnp.int32)
        return of_rows(rows, kernel_VD, labels).reshape(targets_BS.shape)

    return run
