"""The two products over a ring, by kernel and by plain JAX, and what the kernels cannot take."""

from typing import Any

import jax
from jax import lax

from hfjax.pallas_kernels import ring_reference
from hfjax.pallas_kernels.ring import MeshRing, unreachable
from hfjax.pallas_kernels.ring_gather import gather_matmul
from hfjax.pallas_kernels.ring_gradients import pair
from hfjax.pallas_kernels.ring_scatter import matmul_scatter
from hfjax.pallas_kernels.ring_tiles import Tuning

DTYPES = ("bfloat16", "float16")
ROWS, COLUMNS = 8, 16  # what an array's rows and columns are multiples of, for the copies' sake


def _gather(x: Any, w: Any, axis: str, tuning: Tuning) -> jax.Array:
    size = lax.axis_size(axis)
    out = gather_matmul(MeshRing(axis, size), x, w, tuning)
    return out.reshape(size * x.shape[0], w.shape[1])


def _scatter(x: Any, w: Any, axis: str, tuning: Tuning) -> jax.Array:
    size = lax.axis_size(axis)
    by_owner = x.reshape(size, x.shape[0] // size, x.shape[1])
    return matmul_scatter(MeshRing(axis, size), by_owner, w, tuning)


by_kernel = pair(_gather, _scatter)
by_jax = pair(
    lambda x, w, axis, tuning: ring_reference.gather_matmul(x, w, axis),
    lambda x, w, axis, tuning: ring_reference.matmul_scatter(x, w, axis),
)


def refusal(x: Any, w: Any, rows: int, size: int, tuning: Tuning) -> str | None:
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
