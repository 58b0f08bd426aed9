"""A grid of devices: each linear map is split over `row` and over `tensor` (strategy GRID).

Agarwal's product of matrices in three dimensions, as AxoNN has it (Singh et al., 2023), with any
sides: fsdp x row x tensor. What flows lies in one of two ways:

- the stream, [B, S/tensor, D/row]: between the layers' parts; norms, dropout, additions;
- inside of attention and MLP, [B/row, S, F/tensor]: whole sequences, some rows, some heads.

A linear map leads from one to the other. Weights are [D/row, F/tensor] on each device; fsdp splits
them further, and they are gathered over it like all others. JAX derives the backward passes: every
scatter becomes a gather, every gather a scatter.

[B]atch: the rows of one place along data and fsdp. [S]equence, [D] embed, [F]: heads or mlp,
[V]ocabulary. Shapes in names are those of one device.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from hfjax.base.head import countable
from hfjax.base.mean import Mean
from hfjax.pallas_kernels.handing import Projection
from hfjax.parallel.engine import local
from hfjax.parallel.in_parts.named_calls import row_by_row
from hfjax.parallel.mesh import COLUMN_AXIS, ROW_AXIS, SAMPLE_AXES, in_use
from hfjax.parallel.strategy import Axes

BATCH, SEQUENCE = 0, 1  # dimensions of an activation


@final
@dataclass(frozen=True)
class OnGrid(local.InStep):
    """What modules ask for where row and tensor are larger than 1.

    Attributes:
        mesh: The mesh.
        splits: The strategy's rows of parameters: logical axis -> mesh axes.
        without_logits: Whether the loss takes a projection in place of logits.
        parts: Of each output of the model: dimension -> the mesh axis along which devices have
            parts of it. A check finds them (hfjax/checks/look_at_grid.py).
    """

    mesh: Mesh
    splits: Mapping[str, Axes]
    without_logits: bool = False
    parts: Sequence[Mapping[int, str]] = ()

    # -- linear maps ----------------------------------------------------------------------------

    def matmul(self, place: Any, between: tuple, multiply: Callable) -> Callable:
        """Return the product of a linear map between two named dimensions."""
        way = self._into if self.leads_into(between) else self._out_of
        return lambda x, kernel: way(x, lambda x: multiply(x, kernel))

    def leads_into(self, between: tuple[str | None, str | None]) -> bool:
        """Return whether a map leads out of the stream: else it leads back; others are refused."""
        ways: dict[tuple[Axes, ...], bool] = {
            ((ROW_AXIS,), (COLUMN_AXIS,)): True,
            ((COLUMN_AXIS,), (ROW_AXIS,)): False,
        }
        way = ways.get(tuple(self.splits.get(name or "", ()) for name in between))
        if way is None:
            raise ValueError(
                f"a linear map from {between[0]} to {between[1]}: on a grid each leads from what "
                f"{ROW_AXIS} splits ({self._names(ROW_AXIS)}) to what {COLUMN_AXIS} splits "
                f"({self._names(COLUMN_AXIS)}), or back. Name its dimensions so, or use "
                "hfjax.TENSOR | hfjax.SEQUENCE with row=1."
            )
        return way

    def _names(self, axis: str) -> str:
        return ", ".join(name for name, axes in self.splits.items() if axes == (axis,))

    def _into(self, x_BSD: jax.Array, multiply: Callable) -> jax.Array:
        """Return what the stream becomes inside: the sequence comes together, rows are dealt."""
        return _sum_of_parts(multiply(_whole(x_BSD, COLUMN_AXIS, SEQUENCE)), ROW_AXIS, BATCH)

    def _out_of(self, x_BSF: jax.Array, multiply: Callable) -> jax.Array:
        """Return what the inside becomes in the stream: `_into` with row and tensor swapped."""
        return _sum_of_parts(multiply(_whole(x_BSF, ROW_AXIS, BATCH)), COLUMN_AXIS, SEQUENCE)

    # -- the stream -----------------------------------------------------------------------------

    def mean(self, x: jax.Array, name: str | None) -> jax.Array:
        """Return the mean over the whole of the last dimension: of the stream, over its width."""
        mean, axes = x.mean(-1, keepdims=True), self.splits.get(name or "", ())
        return lax.pmean(mean, axes) if axes else mean

    def positions(self, length: int, names: local.Names = ()) -> jax.Array | None:
        """Return the numbers of the positions of the stream that are here; None: all are."""
        if "seq" not in names:
            return None
        return lax.axis_index(COLUMN_AXIS) * length + jnp.arange(length)

    def row_length(self, length: int, names: local.Names = ()) -> int:
        """Return how many positions a row has of which the stream has so many here."""
        return length * self.mesh.shape[COLUMN_AXIS] if "seq" in names else length

    def columns(self, width: int) -> tuple[jax.Array, int]:
        """Return the numbers of the columns of the stream that are here, and of how many."""
        numbers = lax.axis_index(ROW_AXIS) * width + jnp.arange(width)
        return numbers, width * self.mesh.shape[ROW_AXIS]

    def lookup(self, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        """Return the row of each token, as the stream has them; tensor splits the table."""
        rows, sides = table_VD.shape[0], self.mesh.shape[COLUMN_AXIS]
        self.check_length(tokens_BS.shape[SEQUENCE])
        count, tokens_BS = rows * sides, countable(tokens_BS)
        tokens = jnp.clip(jnp.where(tokens_BS < 0, tokens_BS + count, tokens_BS), 0, count - 1)
        at = tokens - lax.axis_index(COLUMN_AXIS) * rows
        here = (at >= 0) & (at < rows)
        found = jnp.where(here[..., None], table_VD[jnp.clip(at, 0, rows - 1)], 0)
        return _sum_of_parts(found, COLUMN_AXIS, SEQUENCE)

    def check_length(self, length: int) -> None:
        """Refuse rows of a length that the devices along tensor cannot split."""
        sides = self.mesh.shape[COLUMN_AXIS]
        if length % sides:
            fits = [n for n in range(sides, 1, -1) if length % n == 0]
            raise ValueError(
                f"rows of {length} tokens: on a grid {COLUMN_AXIS}={sides} splits the sequence, "
                f"and has to divide it: {fits or 'only 1'} would. Take another length, or another "
                f"{COLUMN_AXIS}."
            )

    def of_stream(self, x_BS: jax.Array) -> jax.Array:
        """Return the positions of an array [B, S] that the stream has here."""
        return _mine(x_BS, COLUMN_AXIS, SEQUENCE)

    # -- inside ---------------------------------------------------------------------------------

    def attention(self, attend: Callable) -> Callable:
        """Return the attention of the rows and heads that are here."""

        def run(q_BSHD, k_BSGD, v_BSGD, *others):
            operands = (q_BSHD, k_BSGD, v_BSGD, *(_mine(x, ROW_AXIS, BATCH) for x in others))
            return attend(*operands)

        return run

    # -- the head and the loss --------------------------------------------------------------------

    def outputs(
        self, x_BSD: jax.Array, kernel_VD: Any, vocab: int, logits: Callable | None = None
    ) -> Projection | jax.Array:
        """Return what the loss is given: what makes the losses, or logits, gathered.

        A look has seen that the model has no logits of its own.
        """
        if self.without_logits:
            return Projection(x_BSD, kernel_VD, lambda *operands: self._losses(vocab, *operands))
        of_rows = _whole(self._logits(x_BSD, kernel_VD, vocab), COLUMN_AXIS, 2)
        return _whole(of_rows, ROW_AXIS, BATCH)

    def _logits(self, x_BSD: jax.Array, kernel_VD: jax.Array, vocab: int) -> jax.Array:
        """Return logits [B/row, S, V/tensor]; those that pad the vocabulary are masked."""

        def multiply(x):
            return (x.reshape(-1, x.shape[-1]) @ kernel_VD.T).reshape(*x.shape[:-1], -1)

        logits = self._into(x_BSD, multiply)
        if vocab == kernel_VD.shape[0] * self.mesh.shape[COLUMN_AXIS]:
            return logits
        return jnp.where(_numbers(logits) < vocab, logits, jnp.finfo(logits.dtype).min)

    def _losses(
        self, vocab: int, x_BSD: jax.Array, kernel_VD: jax.Array, targets_BS: jax.Array
    ) -> jax.Array:
        """Return the cross entropy of each target, of all rows; the vocabulary stays split."""
        logits = self._logits(x_BSD, kernel_VD, vocab)
        logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
        targets = _mine(targets_BS, ROW_AXIS, BATCH)
        greatest = lax.pmax(lax.stop_gradient(logits.max(-1)), COLUMN_AXIS)
        picked = jnp.where(_numbers(logits) == targets[..., None], logits, 0).sum(-1)
        exponentials = jnp.exp(logits - greatest[..., None]).sum(-1)
        exponentials, picked = lax.psum(jnp.stack([exponentials, picked]), COLUMN_AXIS)
        losses = jnp.log(exponentials) + greatest - picked
        known = targets < kernel_VD.shape[0] * self.mesh.shape[COLUMN_AXIS]
        return _whole(jnp.where(known, losses, jnp.nan), ROW_AXIS, BATCH)

    def undealt(self, outputs: Any) -> Any:
        """Return whole outputs, any pytree of arrays."""
        leaves, form = jax.tree.flatten(outputs)

        def whole(x: jax.Array, axes: Mapping[int, str]) -> jax.Array:
            for dim, axis in axes.items():
                x = _whole(x, axis, dim)
            return x

        return form.unflatten(map(whole, leaves, self.parts)) if self.parts else outputs

    def counted_once(self, mean: Mean) -> Mean:
        """Return sums as they are on one device of the grid, and 0 on the others.

        All of them know the loss of all their rows; gradients are of the sum over devices.
        """
        axes = (ROW_AXIS, COLUMN_AXIS)
        first = lax.axis_index(axes) == 0
        return jax.tree.map(lambda x: jnp.where(first, x, jnp.zeros_like(x)), mean)

    def sum_over_batch(self, x: jax.Array) -> jax.Array:
        """Return sums of rows, added over all devices that have others."""
        axes = in_use(self.mesh, SAMPLE_AXES)
        return lax.psum(x, axes) if axes else x

    run_length = local.all_here
    dealt = local.whole_batch
    mixed, sender = local.mix_now, local.by_xla
    shared_side, check_positions = local.no_side, local.none_joined


def _whole(x: jax.Array, axis: str, dim: int) -> jax.Array:
    return _run(lambda x: lax.all_gather(x, axis, axis=dim, tiled=True), x, dim)


def _sum_of_parts(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Return this device's part, along a dimension, of the sum over an axis."""
    scatter = lambda x: lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return _run(scatter, x, dim)


def _run(move: Callable, x: jax.Array, dim: int) -> jax.Array:
    """Return what a move makes of an array; along rows it is of those that are here."""
    return row_by_row(move)(x) if dim == BATCH else move(x)


def _mine(x: jax.Array, axis: str, dim: int) -> jax.Array:
    """Return this device's part of what all along an axis have."""

    def mine(x: jax.Array) -> jax.Array:
        size = x.shape[dim] // lax.axis_size(axis)
        return lax.dynamic_slice_in_dim(x, lax.axis_index(axis) * size, size, dim)

    return _run(mine, x, dim)


def _numbers(logits: jax.Array) -> jax.Array:
    """Return the number in the vocabulary of each logit that is here."""
    here = lax.broadcasted_iota("int32", (1, 1, logits.shape[-1]), 2)
    return here + lax.axis_index(COLUMN_AXIS) * logits.shape[-1]
