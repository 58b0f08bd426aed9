"""Computations on tiles of logits in registers (`tile_loop.py`).

`statistics`: the maximum and the sum of exponentials of each row. `probabilities`: softmax - onehot
of a part of the vocabulary.

[N] rows, [D] width, [L]anes; w is [C, P, D]: column c of part p of the vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from hfjax.pallas_kernels import plgpu
from hfjax.pallas_kernels.cross_entropy.logits import (
    EVEN,
    LOG2E,
    LOWEST,
    Columns,
    Tuning,
    split_parts,
)
from hfjax.pallas_kernels.cross_entropy.tile_loop import (
    ROWS,
    TILE,
    WORKERS,
    Walk,
    Work,
    best_lanes,
    launch,
)
from hfjax.pallas_kernels.mosaic import load, pad_axis, row_layout, tile_transforms

STORE = 64  # columns per store: 128 bytes


def _mask_columns(logits: jax.Array, limit: jax.Array, otherwise: float) -> jax.Array:
    """Return the logits, `otherwise` in columns from `limit` on, which most tiles lack."""

    def masked(logits: jax.Array) -> jax.Array:
        columns = plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=plgpu.Layout.WGMMA)
        return jnp.where(columns < limit, logits, otherwise)

    return lax.cond(limit < logits.shape[1], masked, lambda logits: logits, logits)


def statistics(
    x_ND: jax.Array, w_VD: jax.Array, labels_N: jax.Array, columns: Columns, tuning: Tuning
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return max, sum of exponentials relative to it, and the label's logit, of each row.

    The label's logit is a dot product of two gathered rows: cheaper than a search in every tile.
    """
    max_LN, sum_exp_LN = _per_lane(jnp.stack([0, columns.real]), x_ND, split_parts(w_VD, 1), tuning)
    max_1N = max_LN.max(0, keepdims=True)
    sum_exp = (sum_exp_LN * jnp.exp2(max_LN - max_1N)).sum(0)
    labels = columns.local_labels(labels_N)
    label_rows = w_VD[jnp.maximum(labels, 0)].astype(jnp.float32)
    picked = jnp.where(labels < 0, 0, (x_ND.astype(jnp.float32) * label_rows).sum(1))
    count = x_ND.shape[0]
    return max_1N[0, :count] / LOG2E, sum_exp[:count], picked


def _per_lane(
    numbers: jax.Array, x_ND: jax.Array, w_CPD: jax.Array, tuning: Tuning
) -> list[jax.Array]:
    """Return each row's maximum, in base 2, and sum of exponentials: [L, N] each."""
    rows, columns = -(-x_ND.shape[0] // TILE), -(-w_CPD.shape[0] // tuning.columns)
    lanes = best_lanes(rows, columns, tuning)
    walk = Walk(rows, columns, lanes, tuning.group, min(tuning.blocks, rows * lanes))
    out = [jax.ShapeDtypeStruct((lanes, rows * TILE), jnp.float32)] * 2
    scratch = [plgpu.SMEM((WORKERS, ROWS), jnp.float32)] * 2
    return launch(_statistics, out, scratch, walk, tuning)(numbers, x_ND, w_CPD)


def _statistics(numbers: jax.Ref, refs: Sequence[jax.Ref], worker: jax.Array) -> Work:
    *out, max_smem, sum_exp_smem = refs
    staged = (max_smem.at[worker], sum_exp_smem.at[worker])
    limit = numbers[1]

    def start(row: jax.Array) -> tuple[jax.Array, jax.Array]:
        constant = lambda value: plgpu.layout_cast(
            jnp.full((ROWS,), value, jnp.float32), row_layout()
        )
        return constant(LOWEST), constant(0.0)

    def tile(
        carry: tuple, logits: jax.Array, row: jax.Array, column: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        row_max, sum_exp = carry
        scaled = _mask_columns(logits, limit - column, -jnp.inf) * LOG2E
        new_max = jnp.maximum(row_max, scaled.max(axis=1))
        exponentials = jnp.exp2(scaled - lax.broadcast_in_dim(new_max, scaled.shape, [0]))
        return new_max, sum_exp * jnp.exp2(row_max - new_max) + exponentials.sum(axis=1)

    def end(carry: tuple, row: jax.Array, lane: jax.Array) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for smem, value in zip(staged, carry, strict=True):
            smem[...] = value
        plgpu.commit_smem()
        for smem, gmem in zip(staged, out, strict=True):
            plgpu.copy_smem_to_gmem(smem, gmem.at[lane, pl.ds(row, ROWS)])

    return Work(start, tile, end)


def probabilities(
    numbers: tuple[Any, Any],
    operands: tuple[jax.Array, jax.Array],
    rows_N: tuple[jax.Array, jax.Array],
    tuning: Tuning,
) -> jax.Array:
    """Return softmax - onehot of a part of the vocabulary, [N, C] in x's dtype.

    numbers: [part, its number of real columns]; operands: x_ND and w_CPD; rows_N: logsumexp and the
    label's column in the part. Columns are padded with zeros to a multiple of 64.
    """
    (x_ND, w_CPD), (logsumexp, labels) = operands, rows_N
    rows, tiles = -(-x_ND.shape[0] // TILE), -(-w_CPD.shape[0] // tuning.columns)
    walk = Walk(rows, tiles, tiles, tuning.group, min(tuning.blocks, rows * tiles))
    shape = (_round_up(x_ND.shape[0], EVEN), _round_up(w_CPD.shape[0], STORE))
    out = jax.ShapeDtypeStruct(shape, x_ND.dtype)
    num_slots = 2 - tuning.columns // STORE % 2  # two alternate, if a tile ends on the second
    staged = plgpu.SMEM(
        (WORKERS, num_slots, ROWS, STORE), x_ND.dtype, transforms=tile_transforms(x_ND.dtype)
    )
    run = launch(_probabilities, out, [staged], walk, tuning)
    more = [pad_axis(x, 0, TILE) for x in (logsumexp * LOG2E, labels)]
    return run(jnp.stack(numbers), x_ND, w_CPD, *more)[: x_ND.shape[0]]


def _probabilities(numbers: jax.Ref, refs: Sequence[jax.Ref], worker: jax.Array) -> Work:
    logsumexp, labels, out, staged = refs
    limit = numbers[1]

    def start(row: jax.Array) -> tuple[jax.Array, ...]:
        rows = pl.ds(row, ROWS)
        return tuple(load(ref.at[rows], row_layout()) for ref in (logsumexp, labels))

    def tile(
        carry: tuple, logits: jax.Array, row: jax.Array, column: jax.Array
    ) -> tuple[jax.Array, ...]:
        lse, label = (lax.broadcast_in_dim(c, logits.shape, [0]) for c in carry)
        scaled = _mask_columns(logits, limit - column, -jnp.inf) * LOG2E
        probs = jnp.exp2(scaled - lse)
        ids = plgpu.broadcasted_iota(jnp.int32, probs.shape, 1, layout=plgpu.Layout.WGMMA)
        probs = jnp.where(ids + column == label, probs - 1.0, probs).astype(out.dtype)
        num_slots = staged.shape[1]
        for i in range(probs.shape[1] // STORE):
            smem = staged.at[worker, i % num_slots]
            plgpu.wait_smem_to_gmem(num_slots - 1, wait_read_only=True)
            smem[...] = probs[:, i * STORE : (i + 1) * STORE]
            plgpu.commit_smem()
            columns = pl.ds(pl.multiple_of(column + i * STORE, STORE), STORE)
            plgpu.copy_smem_to_gmem(smem, out.at[pl.ds(row, ROWS), columns])
        return carry

    return Work(start, tile, lambda *_: None)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
