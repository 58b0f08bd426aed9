"""Kernels, or the plain JAX beside them, on a mesh whose tensor axis splits their operands.

[B]atch, [S]equence, [D] embed, [V]ocabulary; [I]nputs and [O]utputs of a linear map.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P
from jax.typing import DTypeLike

from hfjax.pallas_kernels.attention import block as flash_block
from hfjax.pallas_kernels.collectives import casting, reference
from hfjax.pallas_kernels.cross_entropy import logits, loss as cross_entropy
from hfjax.pallas_kernels.ring import all_gather_matmul, matmul_reduce_scatter, products
from hfjax.pallas_kernels.ring.tiles import Tuning
from hfjax.parallel.engine.comm_plan import Move, mapped
from hfjax.parallel.extensions.kernel_dispatch.per_shard import OnShards
from hfjax.parallel.mesh import TENSOR_AXES, in_use, size_of
from hfjax.utils.vma import together

FORMS = ("pallas", "reference")  # those that are written here; xla is the plain program

SPLIT = TENSOR_AXES  # of one dimension
SENDERS: dict[str, Any] = {"pallas": casting, "reference": reference}
RING = {"pallas": products.by_kernel, "reference": products.by_jax}
MODULES: dict[str, Any] = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
}


def attention(mesh: Mesh, form: str, documents: bool, window: int | None = None) -> Callable:
    """Return causal attention of (q_BSHD, k_BSGD, v_BSGD[, documents_BS]), heads split."""
    mask = flash_block.Mask(window=window)
    how = flash_block.Form(mask, flash_block.TUNING, (0, 0), form == "pallas")

    def places(documents: Sequence[jax.Array]) -> flash_block.Places:
        one = documents[0] if documents else None
        return flash_block.Places(query_documents=one, key_documents=one)

    def forward(
        q: jax.Array, k: jax.Array, v: jax.Array, *documents: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, lse = how.forward((q, k, v), places(documents))
        return out, (out, lse)

    def backward(operands: tuple, kept: tuple, do: jax.Array) -> tuple:
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

    def forward(x: jax.Array, kernel: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, kernel = together((x, kernel))
        losses, (*_, logsumexp) = cross_entropy.forward(problem, x, kernel, targets)
        return losses, logsumexp

    def backward(operands: tuple, logsumexp: jax.Array, gradient: jax.Array) -> tuple:
        x, kernel, targets = operands
        saved = (*together((x, kernel)), targets, logsumexp)
        dx, *rest = cross_entropy.backward(problem, saved, gradient)
        return lax.psum(dx, axis) if axis else dx, *rest

    of_rows = OnShards(mesh, forward, backward, (P(), P(SPLIT), P()), P(), P())

    def run(x_BSD: jax.Array, kernel_VD: jax.Array, targets_BS: jax.Array) -> jax.Array:
        rows = x_BSD.reshape(-1, x_BSD.shape[-1])
        labels = targets_BS.reshape(-1).astype(jnp.int32)
        return of_rows(rows, kernel_VD, labels).reshape(targets_BS.shape)

    return run


# -- a linear map whose operand, or result, goes around the ring of the tensor axis ---------------


def ring(mesh: Mesh, form: str, kind: str) -> Callable:
    """Return (x_BSI, kernel_IO) -> x @ kernel over the ring of the tensor axis.

    Into a layer the sequence is split and comes around; out of it partial sums go around.
    """
    (axis,) = in_use(mesh, TENSOR_AXES)
    into, tuning, forms = kind == "all_gather_matmul", Tuning(), RING[form]
    multiply = forms.gathered if into else forms.scattered
    gradients = forms.of_gathered if into else forms.of_scattered

    def forward(x_BSI: jax.Array, kernel_IO: jax.Array) -> tuple[jax.Array, tuple]:
        y = multiply(_rows(x_BSI), kernel_IO, axis, tuning)
        return _sequences(y, x_BSI.shape[0]), ()

    def backward(operands: tuple, _: tuple, dy_BSO: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_BSI, kernel_IO = operands
        dx, dkernel = gradients(axis, tuning, (_rows(x_BSI), kernel_IO), _rows(dy_BSO))
        return _sequences(dx, x_BSI.shape[0]), dkernel

    sequence, outputs = P(None, SPLIT), P(None, None, SPLIT)
    operands = (sequence, P(None, SPLIT)) if into else (outputs, P(SPLIT))
    return OnShards(mesh, forward, backward, operands, outputs if into else sequence, ())


def _rows(x_BSI: jax.Array) -> jax.Array:
    """Return what each position holds, position by position: shards of sequences are whole rows."""
    return x_BSI.swapaxes(0, 1).reshape(-1, x_BSI.shape[-1])


def _sequences(rows: jax.Array, batch: int) -> jax.Array:
    return rows.reshape(-1, batch, rows.shape[-1]).swapaxes(0, 1)


def ring_refuses(mesh: Mesh, kind: str, x_BSI: jax.Array, kernel_IO: jax.Array) -> str | None:
    """Return why the kernel of a ring cannot take the shards of these operands, or None."""
    shards, into = size_of(TENSOR_AXES, mesh), kind == "all_gather_matmul"
    (batch, length, inputs), outputs = x_BSI.shape, kernel_IO.shape[1]
    if into:
        length, outputs = length // shards, outputs // shards
    else:
        inputs //= shards
    shape = jax.ShapeDtypeStruct
    x = shape((batch * length, inputs), x_BSI.dtype)
    return MODULES[kind].refuses(x, shape((inputs, outputs), kernel_IO.dtype), shards)


@dataclass(frozen=True)
class CastingSender:
    """Moves rows and casts them on the way, in one of the forms: see `engine/comm_plan.py`."""

    form: str

    def all_gather(self, rows: jax.Array, axes: tuple, dtype: DTypeLike) -> jax.Array:
        """Return the rows of all devices, in the dtype in which they are sent."""
        return self._alone(lambda x: SENDERS[self.form].all_gather(x, _axis(axes), dtype))(rows)

    def reduce_scatter(self, rows: jax.Array, axes: tuple, dtype: DTypeLike) -> jax.Array:
        """Return this device's rows of the sum, added in float32, sent in a dtype."""
        return self._alone(lambda x: SENDERS[self.form].reduce_scatter(x, _axis(axes), dtype))(rows)

    def _alone(self, send: Callable) -> Callable:
        """Return `send` where a kernel can name its peers: manual over all axes of the mesh."""
        return mapped(send, TENSOR_AXES, P(), P()) if self.form == "pallas" else send


def sending_refuses(move: Move) -> str | None:
    """Return why the kernel cannot move an array (a `Move` of `engine/comm_plan.py`), or None."""
    if move.dim:
        split = f"is split along dimension {move.dim}; the kernel moves rows"
        return f"an array of shape {move.x.shape} {split}"
    return casting.refuses(move.kind, move.x, _axis(move.axes), move.devices, move.dtype)


def _axis(axes: tuple) -> str | tuple:
    return axes[0] if len(axes) == 1 else axes
