"""Logits computed in parts of the vocabulary, with the labels and columns of each part.

[N] rows, [D] width, [V] vocabulary; in [P] parts of [C] columns: column c of part p is c * P + p,
so that each part of a sharded matrix is spread evenly over all devices.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from hfjax.pallas_kernels.mosaic import pad_axis
from hfjax.utils.paths import Index
from hfjax.utils.vma import zeros

LOG2E = math.log2(math.e)
LOWEST = -1e30  # the maximum of no columns: finite, to avoid inf - inf
EVEN = 8  # matrix rows must be a multiple, for GPU copies


@dataclass(frozen=True)
class Tuning:
    """Sizes of a tile in shared memory, of the ring of stages, of the tile order and of the parts.

    `num_parts`: the backward pass processes the vocabulary in so many parts (only 1 / parts of the
    logits exist at a time), fewer where one would be narrower than `min_columns` columns, below
    which matmuls are inefficient.
    """

    columns: int = 256
    depth: int = 64
    stages: int = 4
    group: int = 16  # row tiles processed together: their x stays in the L2 cache
    blocks: int = 132  # multiprocessors of an H100 or H200
    num_parts: int = 8
    min_columns: int = 2048

    def __post_init__(self) -> None:
        if self.columns not in (64, 128, 192, 256) or self.depth != 64:
            raise ValueError(
                f"Tuning(columns={self.columns}, depth={self.depth}): columns are 64, 128, 192 or "
                "256 (one matrix instruction), depth is 64 (128 bytes, the swizzle)."
            )
        if self.stages < 2 or min(self.group, self.blocks, self.num_parts, self.min_columns) < 1:
            raise ValueError(f"{self}: give at least 2 stages, and 1 of all others.")

    def count_parts(self, vocab: int) -> int:
        """Return the number of parts of a vocabulary, slightly more if that divides it evenly.

        >>> tuning = Tuning()
        >>> tuning.count_parts(50304), tuning.count_parts(6288)
        (8, 3)
        """
        count = min(self.num_parts, max(1, vocab // self.min_columns))
        even = (n for n in range(count, count * 3 // 2) if vocab % (n * EVEN) == 0)
        return next(even, count)


KERNEL = Tuning()
PLAIN = Tuning(
    num_parts=20, min_columns=512
)  # its logits are float32, and caches of CPUs are small


@dataclass(frozen=True)
class Columns:
    """The local columns of the vocabulary: where they begin, how many of them are not padding."""

    first: Any
    real: Any

    def local_labels(self, labels_N: jax.Array) -> jax.Array:
        """Return each label as a local column; out of range where it is not local."""
        column = labels_N - self.first
        return jnp.where((labels_N >= 0) & (column >= 0) & (column < self.real), column, -1)

    def part_labels(
        self, labels_N: jax.Array, part: Index, num_parts: int
    ) -> tuple[jax.Array, jax.Array]:
        """Return (the labels' columns in a part, its number of real columns)."""
        column = self.local_labels(labels_N)
        is_ours = (column >= 0) & (lax.rem(column, jnp.int32(num_parts)) == part)
        real = lax.div(jnp.int32(self.real) - part + num_parts - 1, jnp.int32(num_parts))
        return jnp.where(is_ours, lax.div(column, jnp.int32(num_parts)), -1), real


def split_parts(w_VD: jax.Array, num_parts: int) -> jax.Array:
    """Return w as [C, P, D], padded with zeros where it does not split evenly."""
    return pad_axis(w_VD, 0, num_parts * EVEN).reshape(-1, num_parts, w_VD.shape[1])


def take_part(a_CPD: jax.Array, part: Index) -> jax.Array:
    """Return a part of a matrix, [C, D]."""
    return lax.dynamic_index_in_dim(a_CPD, part, 1, keepdims=False)


def sum_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the dtype of sums: float32, or wider."""
    return jnp.promote_types(dtype, jnp.float32)


def matmul(a: jax.Array, b: jax.Array, dims: tuple[int, int]) -> jax.Array:
    """Return a matmul over dimension dims[0] of a and dims[1] of b, summed in `sum_dtype`."""
    contracted = (((dims[0],), (dims[1],)), ((), ()))
    return lax.dot_general(a, b, contracted, preferred_element_type=sum_dtype(a.dtype))


def statistics(
    x_ND: jax.Array, w_VD: jax.Array, labels_N: jax.Array, columns: Columns, tuning: Tuning
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return max, sum of exponentials relative to it, and the label's logit, of each row."""
    num_parts = tuning.count_parts(w_VD.shape[0])
    w_CPD = split_parts(w_VD, num_parts)

    def add_part(part: jax.Array, carry: tuple) -> tuple[jax.Array, jax.Array, jax.Array]:
        row_max, sum_exp, picked = carry
        part = jnp.int32(part)
        labels, real = columns.part_labels(labels_N, part, num_parts)
        logits, ids = _logits(x_ND, w_CPD, part, real)
        new_max = jnp.maximum(row_max, logits.max(1))
        sum_exp = sum_exp * jnp.exp(row_max - new_max) + jnp.exp(logits - new_max[:, None]).sum(1)
        return new_max, sum_exp, picked + jnp.where(ids == labels[:, None], logits, 0).sum(1)

    zero = zeros(x_ND.shape[:1], x_ND, sum_dtype(x_ND.dtype))
    return lax.fori_loop(0, num_parts, add_part, (zero + LOWEST, zero, zero))


def _logits(
    x_ND: jax.Array, w_CPD: jax.Array, part: Index, real: Index
) -> tuple[jax.Array, jax.Array]:
    """Return (the logits of a part [N, C], -inf in padding columns; the columns' numbers)."""
    logits = matmul(x_ND, take_part(w_CPD, part), (1, 1))
    ids = lax.broadcasted_iota(jnp.int32, (1, logits.shape[1]), 1)
    return jnp.where(ids < real, logits, -jnp.inf), ids


def probabilities(
    numbers: tuple[Any, Any],
    operands: tuple[jax.Array, jax.Array],
    rows_N: tuple[jax.Array, jax.Array],
    tuning: Tuning,
) -> jax.Array:
    """Return softmax - onehot of a part of the vocabulary, [N, C] in x's dtype.

    numbers: [part, its number of real columns]; operands: x_ND and w_CPD; rows_N: logsumexp and the
    label's column in the part.
    """
    (x_ND, w_CPD), (logsumexp, labels) = operands, rows_N
    logits, ids = _logits(x_ND, w_CPD, numbers[0], numbers[1])
    probs = jnp.exp(logits - logsumexp[:, None])
    return jnp.where(ids == labels[:, None], probs - 1, probs).astype(x_ND.dtype)
