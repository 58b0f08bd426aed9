"""Kernels, or the plain JAX beside them, on a mesh whose tensor axis shards their operands.

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
from hfjax.parallel.engine.comm_plan import CollectiveOp, shard_map_over
from hfjax.parallel.extensions.kernel_dispatch.per_shard import ShardedFunction
from hfjax.parallel.mesh import TENSOR_AXES, in_use, size_of
from hfjax.utils.vma import unify_varying

SPLIT = TENSOR_AXES  # of one dimension
CASTING: dict[str, Any] = {"pallas": casting, "reference": reference}
RING = {"pallas": products.kernel_pair, "reference": products.jax_pair}
MODULES: dict[str, Any] = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
}


def sharded_attention(
    mesh: Mesh, impl: str, documents: bool, window: int | None = None
) -> Callable:
    """Return causal attention of (q_BSHD, k_BSGD, v_BSGD[, documents_BS]), heads sharded."""
    mask = flash_block.Mask(window=window)
    kernel = flash_block.AttentionImpl(mask, flash_block.TUNING, (0, 0), impl == "pallas")

    def make_positions(documents: Sequence[jax.Array]) -> flash_block.Positions:
        one = documents[0] if documents else None
        return flash_block.Positions(query_documents=one, key_documents=one)

    def forward(
        q: jax.Array, k: jax.Array, v: jax.Array, *documents: jax.Array
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        out, lse = kernel.forward((q, k, v), make_positions(documents))
        return out, (out, lse)

    def backward(operands: tuple, residuals: tuple, do: jax.Array) -> tuple:
        q, k, v, *documents = operands
        out, lse = residuals
        final = flash_block.final(out, lse, do)
        return *kernel.backward((q, k, v), final, make_positions(documents)), *(
            None for _ in documents
        )

    head_spec, lse_spec = P(None, None, SPLIT), P(None, SPLIT)
    operands = (head_spec, head_spec, head_spec, P())[: 3 + documents]
    return ShardedFunction(mesh, forward, backward, operands, head_spec, (head_spec, lse_spec))


def sharded_losses(mesh: Mesh, impl: str, vocab: int) -> Callable:
    """Return (x_BSD, kernel_VD, targets_BS) -> the loss of each, the vocabulary sharded."""
    axis = in_use(mesh, TENSOR_AXES)
    kernel = impl == "pallas"
    tuning = logits.KERNEL if kernel else logits.PLAIN
    problem = cross_entropy.Problem.of(kernel, axis or None, vocab, tuning)

    def forward(x: jax.Array, kernel: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, kernel = unify_varying((x, kernel))
        losses, (*_, logsumexp) = cross_entropy.forward(problem, x, kernel, targets)
        return losses, logsumexp

    def backward(operands: tuple, logsumexp: jax.Array, gradient: jax.Array) -> tuple:
        x, kernel, targets = operands
        saved = (*unify_varying((x, kernel)), targets, logsumexp)
        dx, *rest = cross_entropy.backward(problem, saved, gradient)
        return lax.psum(dx, axis) if axis else dx, *rest

    run_sharded = ShardedFunction(mesh, forward, backward, (P(), P(SPLIT), P()), P(), P())

    def run(x_BSD: jax.Array, kernel_VD: jax.Array, targets_BS: jax.Array) -> jax.Array:
        tokens = x_BSD.reshape(-1, x_BSD.shape[-1])
        labels = targets_BS.reshape(-1).astype(jnp.int32)
        return run_sharded(tokens, kernel_VD, labels).reshape(targets_BS.shape)

    return run


# -- a linear map whose operand, or result, goes around the ring of the tensor axis ---------------


def ring_matmul(mesh: Mesh, impl: str, kind: str) -> Callable:
    """Return (x_BSI, kernel_IO) -> x @ kernel over the ring of the tensor axis.

    Into a layer the shards of the sequence go around; out of it partial sums go around.
    """
    (axis,) = in_use(mesh, TENSOR_AXES)
    is_gather, tuning, matmuls = kind == "all_gather_matmul", Tuning(), RING[impl]
    multiply = matmuls.gather if is_gather else matmuls.scatter
    gradients = matmuls.gather_grad if is_gather else matmuls.scatter_grad

    def forward(x_BSI: jax.Array, kernel_IO: jax.Array) -> tuple[jax.Array, tuple]:
        y = multiply(_flatten_sequences(x_BSI), kernel_IO, axis, tuning)
        return _unflatten_sequences(y, x_BSI.shape[0]), ()

    def backward(operands: tuple, _: tuple, dy_BSO: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_BSI, kernel_IO = operands
        dx, dkernel = gradients(
            axis, tuning, (_flatten_sequences(x_BSI), kernel_IO), _flatten_sequences(dy_BSO)
        )
        return _unflatten_sequences(dx, x_BSI.shape[0]), dkernel

    sequence, outputs = P(None, SPLIT), P(None, None, SPLIT)
    operands = (sequence, P(None, SPLIT)) if is_gather else (outputs, P(SPLIT))
    return ShardedFunction(
        mesh, forward, backward, operands, outputs if is_gather else sequence, ()
    )


def _flatten_sequences(x_BSI: jax.Array) -> jax.Array:
    """Return [S * B, I], position by position: shards of the sequence are contiguous."""
    return x_BSI.swapaxes(0, 1).reshape(-1, x_BSI.shape[-1])


def _unflatten_sequences(tokens: jax.Array, batch: int) -> jax.Array:
    return tokens.reshape(-1, batch, tokens.shape[-1]).swapaxes(0, 1)


def ring_refuses(mesh: Mesh, kind: str, x_BSI: jax.Array, kernel_IO: jax.Array) -> str | None:
    """Return why the kernel of a ring cannot take the shards of these operands, or None."""
    shards, is_gather = size_of(TENSOR_AXES, mesh), kind == "all_gather_matmul"
    (batch, length, inputs), outputs = x_BSI.shape, kernel_IO.shape[1]
    if is_gather:
        length, outputs = length // shards, outputs // shards
    else:
        inputs //= shards
    shape = jax.ShapeDtypeStruct
    x = shape((batch * length, inputs), x_BSI.dtype)
    return MODULES[kind].refuses(x, shape((inputs, outputs), kernel_IO.dtype), shards)


@dataclass(frozen=True)
class CastingKernel:
    """Collectives along dimension 0 that cast on the way: see `engine/comm_plan.py`."""

    impl: str

    def all_gather(self, shard: jax.Array, axes: tuple, dtype: DTypeLike) -> jax.Array:
        """Return the shards of all devices, in the dtype in which they are sent."""
        return self._map_manual(lambda x: CASTING[self.impl].all_gather(x, _axis(axes), dtype))(
            shard
        )

    def reduce_scatter(self, gradient: jax.Array, axes: tuple, dtype: DTypeLike) -> jax.Array:
        """Return this device's shard of the sum, added in float32, sent in a dtype."""
        return self._map_manual(lambda x: CASTING[self.impl].reduce_scatter(x, _axis(axes), dtype))(
            gradient
        )

    def _map_manual(self, send: Callable) -> Callable:
        """Return `send` where a kernel can name its peers: manual over all axes of the mesh."""
        return shard_map_over(send, TENSOR_AXES, P(), P()) if self.impl == "pallas" else send


def sending_refuses(op: CollectiveOp) -> str | None:
    """Return why the kernel cannot move an array (a `CollectiveOp`), or None."""
    if op.dim:
        reason = f"is split along dimension {op.dim}; the kernel moves rows"
        return f"an array of shape {op.x.shape} {reason}"
    return casting.refuses(op.kind, op.x, _axis(op.axes), op.devices, op.dtype)


def _axis(axes: tuple) -> str | tuple:
    return axes[0] if len(axes) == 1 else axes
