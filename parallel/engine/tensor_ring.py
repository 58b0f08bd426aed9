"""A linear map whose operand, or result, goes around the ring of the tensor axis meanwhile.

[B]atch, [S]equence; [I]nputs and [O]utputs of a linear map.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec as P

from hfjax.pallas_kernels.ring import (
    all_gather_matmul,
    matmul_reduce_scatter,
    products,
)
from hfjax.pallas_kernels.ring.tiles import Tuning
from hfjax.parallel.engine.on_shards import OnShards
from hfjax.parallel.mesh import TENSOR_AXES, in_use, size_of

SPLIT = TENSOR_AXES  # of one dimension
FORMS = {"pallas": products.by_kernel, "reference": products.by_jax}
MODULES: dict[str, Any] = {
    "all_gather_matmul": all_gather_matmul,
    "matmul_reduce_scatter": matmul_reduce_scatter,
}


def ring(mesh: Mesh, form: str, kind: str) -> Callable:
    """Return (x_BSI, kernel_IO) -> x @ kernel over the ring of the tensor axis.

    Into a layer the sequence is split and comes around; out of it partial sums go around.
    """
    (axis,) = in_use(mesh, TENSOR_AXES)
    into, tuning, forms = kind == "all_gather_matmul", Tuning(), FORMS[form]
    multiply = forms.gathered if into else forms.scattered
    gradients = forms.of_gathered if into else forms.of_scattered

    def forward(x_BSI, kernel_IO):
        y = multiply(_rows(x_BSI), kernel_IO, axis, tuning)
        return _sequences(y, x_BSI.shape[0]), ()

    def backward(operands, _, dy_BSO):
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


def refuses(mesh: Mesh, kind: str, x_BSI: jax.Array, kernel_IO: jax.Array) -> str | None:
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
