"""`all_gather_matmul`: all-gather rows along a mesh axis and multiply, in one kernel.

The entry of a column-parallel layer when activations are sharded by rows: each of S ranks has
x [M, K] and w [K, N] and gets (all x, concatenated) @ w, [S M, N]. The shards of x travel the ring
from shared memory to the next rank's memory while they are being multiplied (gather.py), as in
Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models" (ASPLOS 2023).

The lower bound, for one rank and b bytes per number: 2 S M K N flops; b (S - 1) M K bytes received
over its link and as many sent; b (S M K + K N + S M N) bytes of device memory traffic, and
b (S - 1) M K more for received shards. Communication is hidden when N > (flops per second) b / (2
link bytes per second): 1800 columns for bfloat16, 800 Tflop/s and 450 GB/s. None of this was timed:
it has not run on a GPU.

The gradient: products.py.
"""

import jax
from jax import lax

from hfjax.pallas_kernels.ring.products import check, jax_pair, kernel_pair, refusal
from hfjax.pallas_kernels.ring.tiles import DEFAULT_TUNING, Tuning
from hfjax.utils.paths import Shaped


def all_gather_matmul(
    x_MK: jax.Array, w_KN: jax.Array, axis: str, tuning: Tuning = DEFAULT_TUNING
) -> jax.Array:
    """Return (all ranks' x along `axis`, concatenated) @ w; inside `jax.shard_map`."""
    check(refuses(x_MK, w_KN, lax.axis_size(axis), tuning))
    return kernel_pair.gather(x_MK, w_KN, axis, tuning)


def reference(
    x_MK: jax.Array, w_KN: jax.Array, axis: str, tuning: Tuning = DEFAULT_TUNING
) -> jax.Array:
    """Return the same in plain JAX; partial sums of gradients cross the links in float32."""
    return jax_pair.gather(x_MK, w_KN, axis, tuning)


def refuses(x_MK: Shaped, w_KN: Shaped, size: int, tuning: Tuning = DEFAULT_TUNING) -> str | None:
    """Return why the kernel or its gradient cannot take these on a ring of `size`, or None."""
    return refusal(x_MK, w_KN, x_MK.shape[0], size, tuning)
