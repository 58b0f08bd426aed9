"""The two products over a ring, by kernel and by plain JAX, their gradients and their limits.

All-gather then multiply, and multiply then reduce-scatter, are each other's gradient. `pair` makes
two differentiable functions of any two implementations. Nothing gathered is saved: the gradient of
the weights sends x (or the gradient) round once more, S - 1 shards over the links, while it is
multiplied (in plain JAX, XLA hides one under the other). The gradient of the activations multiplies
by w transposed, which is a copy of w: 2 K N numbers of traffic beside the product's 2 R K N flops.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import lax

from hfjax.pallas_kernels.ring import reference as ring_reference
from hfjax.pallas_kernels.ring.gather import gather_matmul
from hfjax.pallas_kernels.ring.peers import MeshRing, unreachable
from hfjax.pallas_kernels.ring.reference import gathered_gradient
from hfjax.pallas_kernels.ring.scatter import matmul_scatter
from hfjax.pallas_kernels.ring.tiles import Tuning
from hfjax.utils.paths import Shaped
from hfjax.utils.vma import varying


class Pair(NamedTuple):
    """Two products, each `(x, w, axis, tuning)`, and each one's gradient by the other.

    A gradient is `(axis, tuning, (x, w), dy) -> (dx, dw)`.
    """

    gathered: Callable
    scattered: Callable
    of_gathered: Callable
    of_scattered: Callable


def pair(gather: Callable, scatter: Callable) -> Pair:
    """Return differentiable products of two implementations."""

    gathered, scattered = (jax.custom_vjp(f, nondiff_argnums=(2, 3)) for f in (gather, scatter))

    def of_gathered(
        axis: str, tuning: Tuning, saved: tuple, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x, w = saved
        dx = scattered(dy, w.T, axis, tuning)
        return _like(x, dx), _like(w, gathered_gradient(x, dy, axis))

    def of_scattered(
        axis: str, tuning: Tuning, saved: tuple, dy: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        x, w = saved
        dx = gathered(dy, w.T, axis, tuning)
        return _like(x, dx), _like(w, gathered_gradient(dy, x, axis).T)

    gathered.defvjp(lambda x, w, axis, tuning: (gather(x, w, axis, tuning), (x, w)), of_gathered)
    scattered.defvjp(lambda x, w, axis, tuning: (scatter(x, w, axis, tuning), (x, w)), of_scattered)
    return Pair(gathered, scattered, of_gathered, of_scattered)


def _like(primal: jax.Array, gradient: Any) -> jax.Array:
    """Return a gradient of the primal's type, summed over axes along which that does not vary."""
    extra = varying(gradient) - varying(primal)
    gradient = lax.psum(gradient, tuple(sorted(extra))) if extra else gradient
    return gradient.astype(primal.dtype)


DTYPES = ("bfloat16", "float16")
ROWS, COLUMNS = 8, 16  # what an array's rows and columns are multiples of, for the copies' sake


def _gather(x: jax.Array, w: jax.Array, axis: str, tuning: Tuning) -> jax.Array:
    size = lax.axis_size(axis)
    out = gather_matmul(MeshRing(axis, size), x, w, tuning)
    return out.reshape(size * x.shape[0], w.shape[1])


def _scatter(x: jax.Array, w: jax.Array, axis: str, tuning: Tuning) -> jax.Array:
    size = lax.axis_size(axis)
    by_owner = x.reshape(size, x.shape[0] // size, x.shape[1])
    return matmul_scatter(MeshRing(axis, size), by_owner, w, tuning)


by_kernel = pair(_gather, _scatter)
by_jax = pair(
    lambda x, w, axis, tuning: ring_reference.gather_matmul(x, w, axis),
    lambda x, w, axis, tuning: ring_reference.matmul_scatter(x, w, axis),
)


def refusal(x: Shaped, w: Shaped, rows: int, size: int, tuning: Tuning) -> str | None:
    """Return why a kernel cannot take x and w, whose shards have `rows`, on a ring of `size`."""
    given = f"x {x.dtype.name}{list(x.shape)}, w {w.dtype.name}{list(w.shape)}: "
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        return given + "x is [rows, K] and w is [K, columns]. Reshape them"
    if x.dtype != w.dtype or x.dtype.name not in DTYPES:
        return given + f"both are {' or both '.join(DTYPES)}. Cast them, or use `reference`"
    if rows % ROWS or x.shape[1] % COLUMNS or w.shape[1] % COLUMNS:
        return given + (
            f"a rank's {rows} rows are a multiple of {ROWS}, K and columns are multiples of "
            f"{COLUMNS} (the hardware copies 16 bytes at a time). Pad them, or use `reference`"
        )
    return unreachable(size, tuning.blocks)


def check(refused: str | None) -> None:
    """Raise what was refused."""
    if refused:
        raise ValueError(refused)
