"""`matmul_reduce_scatter`: multiply and reduce-scatter along a mesh axis, in one kernel.

The exit of a row-parallel layer: each of S ranks has x [R, K] and w [K, N], its shard of the
contraction, and gets its R / S rows of the sum over ranks of x @ w. Each tile of a partial sum is
sent directly to its owner while the next is multiplied; the owner adds received tiles in float32
(scatter.py). As in Wang et al., "Overlap Communication with Dependent Computation via Decomposition
in Large Deep Learning Models" (ASPLOS 2023).

The lower bound, for one rank and b bytes per number: 2 R K N flops; b (S - 1) R N / S bytes sent
over its link and as many received; b (R K + K N + R N / S) bytes of device memory traffic, and
2 b (S - 1) R N / S more for received tiles. Communication is hidden when K > (flops per second) b
/ (2 link bytes per second): 1800 for bfloat16, 800 Tflop/s and 450 GB/s. None of this was timed: it
has not run on a GPU.

Partial sums cross the links in the operands' dtype, each rounded once, and are added in float32.
The gradient: products.py.
"""

import jax
from jax import lax

from hfjax.pallas_kernels.ring.products import check, jax_pair, kernel_pair, refusal
from hfjax.pallas_kernels.ring.tiles import DEFAULT_TUNING, Tuning
from hfjax.utils.paths import Shaped


def matmul_reduce_scatter(
    x_RK: jax.Array, w_KN: jax.Array, axis: str, tuning: Tuning = DEFAULT_TUNING
) -> jax.Array:
    """Return this rank's rows of the sum along `axis` of x @ w; inside `jax.shard_map`."""
    check(refuses(x_RK, w_KN, lax.axis_size(axis), tuning))
    return kernel_pair.scatter(x_RK, w_KN, axis, tuning)


def reference(
    x_RK: jax.Array, w_KN: jax.Array, axis: str, tuning: Tuning = DEFAULT_TUNING
) -> jax.Array:
    """Return the same in plain JAX; partial sums cross the links in float32."""
    check(_check_even(x_RK, lax.axis_size(axis)))
    return jax_pair.scatter(x_RK, w_KN, axis, tuning)


def refuses(x_RK: Shaped, w_KN: Shaped, size: int, tuning: Tuning = DEFAULT_TUNING) -> str | None:
    """Return why the kernel or its gradient cannot take these on a ring of `size`, or None."""
    return _check_even(x_RK, size) or refusal(x_RK, w_KN, x_RK.shape[0] // size, size, tuning)


def _check_even(x: Shaped, size: int) -> str | None:
    if x.shape[0] % size == 0:
        return None
    return f"x {list(x.shape)}: {size} ranks share its {x.shape[0]} rows evenly. Pad them"
