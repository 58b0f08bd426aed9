"""The two matmuls over a ring, by kernel and by plain JAX, with gradients and input checks.

All-gather matmul and matmul reduce-scatter are each other's gradient. `make_pair` makes any two
implementations differentiable. No gathered array is saved: the gradient of the weights sends x (or
the gradient) round the ring once more, S - 1 shards over the links, while it is multiplied (in
plain JAX, XLA overlaps both). The gradient of the activations multiplies by w transposed, which is
a copy of w: 2 K N numbers of traffic beside the matmul's 2 R K N flops.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from hfjax.pallas_kernels.ring import reference as ring_reference
from hfjax.pallas_kernels.ring.gather import gather_matmul
from hfjax.pallas_kernels.ring.peers import MeshRing, unreachable_reason
from hfjax.pallas_kernels.ring.reference import weight_gradient
from hfjax.pallas_kernels.ring.scatter import matmul_scatter
from hfjax.pallas_kernels.ring.tiles import Tuning
from hfjax.utils.paths import Shaped
from hfjax.utils.vma import varying_axes


class ProductPair(NamedTuple):
    """Two matmuls, each `(x, w, axis, tuning)`, and their gradients, each by means of the other.

    A gradient is `(axis, tuning, (x, w), dy) -> (dx, dw)`.
    """

    gather: Callable
    scatter: Callable
    gather_grad: Callable
    scatter_grad: Callable


def make_pair(gather: Callable, scatter: Callable) -> ProductPair:
    """Return differentiable matmuls from two implementations."""

    gather_op, scatter_op = (jax.custom_vjp(f, nondiff_argnums=(2, 3)) for f in (gather, scatter))

    def gather_grad(
        axis: str, tuning: Tuning, saved: tuple, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x, w = saved
        dx = scatter_op(dy, w.T, axis, tuning)
        return _like(x, dx), _like(w, weight_gradient(x, dy, axis))

    def scatter_grad(
        axis: str, tuning: Tuning, saved: tuple, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x, w = saved
        dx = gather_op(dy, w.T, axis, tuning)
        return _like(x, dx), _like(w, weight_gradient(dy, x, axis).T)

    gather_op.defvjp(lambda x, w, axis, tuning: (gather(x, w, axis, tuning), (x, w)), gather_grad)
    scatter_op.defvjp(
        lambda x, w, axis, tuning: (scatter(x, w, axis, tuning), (x, w)), scatter_grad
    )
    return ProductPair(gather_op, scatter_op, gather_grad, scatter_grad)


def _like(primal: jax.Array, gradient: Any) -> jax.Array:
    """Return a gradient in the primal's dtype, summed over axes along which that does not vary."""
    extra = varying_axes(gradient) - varying_axes(primal)
    gradient = lax.psum(gradient, tuple(sorted(extra))) if extra else gradient
    return gradient.astype(primal.dtype)


DTYPES = ("bfloat16", "float16")
ROWS, COLUMNS = 8, 16  # an array's rows and columns must be multiples, for copies


def _gather(x: jax.Array, w: jax.Array, axis: str, tuning: Tuning) -> jax.Array:
    size = lax.axis_size(axis)
    out = gather_matmul(MeshRing(axis, size), x, w, tuning)
    return out.reshape(size * x.shape[0], w.shape[1])


def _scatter(x: jax.Array, w: jax.Array, axis: str, tuning: Tuning) -> jax.Array:
    size = lax.axis_size(axis)
    by_owner = x.reshape(size, x.shape[0] // size, x.shape[1])
    return matmul_scatter(MeshRing(axis, size), by_owner, w, tuning)


kernel_pair = make_pair(_gather, _scatter)
jax_pair = make_pair(
    lambda x, w, axis, tuning: ring_reference.gather_matmul(x, w, axis),
    lambda x, w, axis, tuning: ring_reference.matmul_scatter(x, w, axis),
)


def refusal(x: Shaped, w: Shaped, rows: int, size: int, tuning: Tuning) -> str | None:
    """Return why a kernel cannot take x and w, with shards of `rows`, on a ring of `size`."""
    operands = f"x {x.dtype.name}{list(x.shape)}, w {w.dtype.name}{list(w.shape)}: "
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        return operands + "x is [rows, K] and w is [K, columns]. Reshape them"
    if x.dtype != w.dtype or x.dtype.name not in DTYPES:
        return operands + f"both are {' or both '.join(DTYPES)}. Cast them, or use `reference`"
    if rows % ROWS or x.shape[1] % COLUMNS or w.shape[1] % COLUMNS:
        return operands + (
            f"a rank's {rows} rows are a multiple of {ROWS}, K and columns are multiples of "
            f"{COLUMNS} (the hardware copies 16 bytes at a time). Pad them, or use `reference`"
        )
    return unreachable_reason(size, tuning.blocks)


def check(reason: str | None) -> None:
    """Raise a refusal as an error."""
    if reason:
        raise ValueError(reason)
