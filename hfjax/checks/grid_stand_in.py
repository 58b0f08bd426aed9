"""A stand-in for a grid, for a look at a model: it makes shapes, and computes nothing.

Each dimension of which a device of a grid has a part is made longer by a prime, which divides no
other one. So a look at the program tells which of them an operation works along. Refused here is a
module that asks for what a grid does not have: a map out of the stream, say, for what lies inside.

[B]atch, [S]equence, [D] embed, [V]ocabulary, as in `on_grid.py`. [I]nputs and [O]utputs of a map.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import count
from typing import Any, Self, final

import jax
import jax.numpy as jnp

from hfjax.checks.heads_alike import heads_alike, unlike_heads
from hfjax.parallel.engine import local
from hfjax.parallel.mesh import COLUMN_AXIS, ROW_AXIS
from hfjax.parallel.wings.grid.on_grid import OnGrid

POSITIONS, ROWS = "positions of the residual stream", "rows inside of attention and MLP"


@dataclass(frozen=True)
class GridParts:
    """How long in a look what a device has a part of is: so many times as on one device.

    Attributes:
        times: What is split -> a number: POSITIONS, ROWS and the names of dimensions.
        shortest: Name of a dimension -> its smallest size.
    """

    times: Mapping[str, int | Fraction]
    shortest: Mapping[str, int]

    @classmethod
    def of(cls, grid: OnGrid, dims: Iterable[tuple[str | None, int]], sizes: Iterable[int]) -> Self:
        """Return parts for the dimensions of all parameters: a prime each, dividing no size.

        Args:
            grid: The grid.
            dims: Name and size of each dimension of a parameter.
            sizes: Of dimensions of other arrays.
        """
        shortest: dict[str, int] = {}
        known = set(sizes)
        for name, size in dims:
            known.add(size)
            if name and grid.splits.get(name) in ((ROW_AXIS,), (COLUMN_AXIS,)):
                shortest[name] = min(size, shortest.get(name, size))
        primes = (n for n in count(101) if all(n % d for d in range(2, math.isqrt(n) + 1)))
        unlike = (n for n in primes if all(size % n for size in known if size))
        return cls(dict(zip((POSITIONS, ROWS, *shortest), unlike, strict=False)), shortest)

    def size(self, name: str | None, size: int) -> int:
        """Return how long a dimension is in the look."""
        return int(size * self.times.get(name or "", 1))

    def real(self, grid: OnGrid, rows: int, length: int, whole: bool) -> Mapping[str, Fraction]:
        """Return how often as long they really are; but nothing that would be of length 1.

        Args:
            grid: The grid.
            rows: Of the batch that this device has.
            length: Of rows.
            whole: On one device, or on a grid.
        """
        shortest = {POSITIONS: length, ROWS: rows, **self.shortest}
        axes = {POSITIONS: (COLUMN_AXIS,), ROWS: (ROW_AXIS,), **grid.splits}
        sides = {n: 1 if whole else math.prod(grid.mesh.shape[a] for a in axes[n]) for n in axes}
        return {n: Fraction(1, sides[n]) for n, size in shortest.items() if size > sides[n]}


@dataclass
class StreamSeen:
    """What a look has learnt of the residual stream: its rows, whole length and width.

    Attributes:
        probe: What is added to each lookup, to see what becomes of gradients.
        rows: Of the batch, once tokens were looked up.
        length: Of whole rows.
        width: Of the stream.
    """

    probe: Any = None
    rows: int = 0
    length: int = 0
    width: int = 0


@final
@dataclass(frozen=True, eq=False)
class LookAtGrid(local.InStep):
    """What modules ask for, as `OnGrid` has it, on parts of these lengths.

    Attributes:
        grid: What it stands for.
        parts: The lengths.
        tries: Whether attentions of the model's own are tried on drawn numbers.
        stream: What the look has learnt of the stream.
    """

    grid: OnGrid
    parts: GridParts
    tries: bool = False
    stream: StreamSeen = field(default_factory=StreamSeen)

    @property
    def _stream(self) -> tuple[int, int]:
        return self.stream.rows, self.parts.size(POSITIONS, self.stream.length)

    @property
    def _inside(self) -> tuple[int, int]:
        return self.parts.size(ROWS, self.stream.rows), self.stream.length

    def matmul(self, place: Any, between: tuple, multiply: Callable) -> Callable:
        """Return what makes the result of a linear map; its operand has to be where it begins."""
        into = self.grid.leads_into(between)
        begins, ends = (self._stream, self._inside) if into else (self._inside, self._stream)
        where = "the residual stream" if into else "inside of attention or MLP"

        def run(x_BSI: jax.Array, kernel_IO: jax.Array) -> jax.Array:
            if x_BSI.shape != (*begins, kernel_IO.shape[0]):
                raise ValueError(
                    f"a linear map from {between[0]} to {between[1]} is given what is not "
                    f"{where} [B, S, {between[0]}]. {BUILD}"
                )
            return _made((*ends, kernel_IO.shape[1]), x_BSI, kernel_IO)

        return run

    def mean(self, x: jax.Array, name: str | None) -> jax.Array:
        """Return what is shaped as the mean over a dimension, which has to be the last one."""
        if name is None or name not in self.parts.shortest:
            return x.mean(-1, keepdims=True)
        self._check_last(x.shape[-1], name, f'kernels.mean(x, "{name}")')
        return jnp.zeros((*x.shape[:-1], 1), x.dtype)  # its gradient sums over the dimension

    def _check_last(self, size: int, name: str, what: str) -> None:
        if size % self.parts.times[name]:
            raise ValueError(
                f"{what} of an array whose last dimension is not {name}, of which each device of "
                f"a grid has a part. {BUILD}"
            )

    def positions(self, length: int, names: local.Names = ()) -> jax.Array | None:
        """Return what is shaped as the numbers of the stream's positions."""
        if "seq" not in names:
            return None
        if length != self._stream[1]:
            raise ValueError(
                "kernels.positions(length, STREAM), or dropout, of what is not the residual stream "
                f"[B, S, D]. Inside of attention and MLP sequences are whole. {BUILD}"
            )
        return jnp.zeros(length, jnp.int32)

    def row_length(self, length: int, names: local.Names = ()) -> int:
        """Return the length of whole rows."""
        return self.stream.length if "seq" in names else length

    def columns(self, width: int) -> tuple[jax.Array, int]:
        """Return what is shaped as the numbers of the stream's columns."""
        split = [name for name, axes in self.grid.splits.items() if axes == (ROW_AXIS,)]
        for name in split:
            self._check_last(width, name, "dropout")
        return jnp.zeros(width, jnp.int32), 1

    def lookup(self, table_VD: jax.Array, tokens_BS: jax.Array) -> jax.Array:
        """Return what is shaped as rows of a table, in the stream."""
        times, splits = self.parts.times, self.grid.splits
        for axis, size in ((COLUMN_AXIS, table_VD.shape[0]), (ROW_AXIS, table_VD.shape[1])):
            names = [name for name in self.parts.shortest if splits[name] == (axis,)]
            if all(size % times[name] for name in names):
                raise ValueError(
                    "kernels.lookup in a table whose dimensions are not named vocab and embed, in "
                    "this order: of each a device of a grid has a part. "
                    f"{BUILD}"
                )
        if tokens_BS.shape[1] % times[POSITIONS] == 0 and times[POSITIONS] > 1:
            raise ValueError(
                "kernels.lookup of tokens that are a part of their rows: it takes whole rows, and "
                "returns the part that the stream has here."
            )
        stream, (rows, length, *more) = self.stream, tokens_BS.shape
        stream.rows, stream.length, stream.width = rows, length, table_VD.shape[1]
        self.grid.check_length(length)
        found = _made((*self._stream, *more, stream.width), table_VD)
        if stream.probe is None or stream.probe.shape != found.shape:
            return found
        return found + stream.probe.astype(found.dtype)

    def of_stream(self, x_BS: jax.Array) -> jax.Array:
        """Return what is shaped as the stream's positions of an array."""
        return _made((x_BS.shape[0], self._stream[1], *x_BS.shape[2:]), x_BS)

    def attention(self, attend: Callable) -> Callable:
        """Return what makes the result of attention."""

        def run(q_BSHD, k_BSGD, v_BSGD, *others):
            for x in (q_BSHD, k_BSGD, v_BSGD):
                if x.shape[:2] != self._inside:
                    raise ValueError(
                        f"attention of what does not come out of a linear map into attention. "
                        f"{BUILD}"
                    )
            some = [jax.ShapeDtypeStruct((self._inside[0], *x.shape[1:]), x.dtype) for x in others]
            if self.tries and not getattr(attend, "is_causal_attention", False):
                self._try_heads(attend, q_BSHD, k_BSGD, v_BSGD, *some)
            made = jax.eval_shape(attend, q_BSHD, k_BSGD, v_BSGD, *some)
            return _stand_in(made.shape, made.dtype, q_BSHD, k_BSGD, v_BSGD)

        return run

    def _try_heads(self, attend: Callable, *operands: Any) -> None:
        """Refuse an attention of the model's own that does not treat heads alike."""
        sides = self.grid.mesh.shape[COLUMN_AXIS]
        try:
            alike = heads_alike(attend, list(map(self._real, operands)), sides)
        except (AssertionError, TypeError, ValueError) as error:  # not of all heads
            raise unlike_heads(COLUMN_AXIS, "hfjax.TENSOR") from error
        if not alike:
            raise unlike_heads(COLUMN_AXIS, "hfjax.TENSOR")

    def _real(self, x: Any) -> jax.ShapeDtypeStruct:
        """Return the shape of an operand of all heads, with the rows that a device will have."""
        rows = max(1, self.stream.rows // self.grid.mesh.shape[ROW_AXIS])
        primes = [int(self.parts.times[name]) for name in self.parts.shortest]
        heads = [next((n // p for p in primes if n % p == 0), n) for n in x.shape[2:3]]
        return jax.ShapeDtypeStruct((rows, x.shape[1], *heads, *x.shape[3:]), x.dtype)

    def outputs(
        self, x_BSD: jax.Array, kernel_VD: Any, vocab: int, logits: Callable | None = None
    ) -> Any:
        """Return what is shaped as whole logits; refuse a head that is no plain one."""
        if x_BSD.shape != (*self._stream, kernel_VD.shape[1]):
            raise ValueError(f"kernels.outputs of what is not the residual stream. {BUILD}")
        whole = int(kernel_VD.shape[0] / self.parts.times.get("vocab", 1))
        if not 0 < vocab <= whole:
            raise ValueError(
                "kernels.outputs(x, kernel, vocab) is given the rows of a device's own "
                f"part as vocab. Give the number of the whole vocabulary, which is up to {whole}."
            )
        if logits is not None:
            raise ValueError(
                "kernels.outputs(x, kernel, vocab, logits): on a grid the step makes logits by "
                "itself, x @ kernel.T, masked from vocab on. Leave out the function. Scale x "
                "before; caps and biases of logits belong in a loss of your own, which is given "
                "logits."
            )
        return _made((self.stream.rows, self.stream.length, whole), x_BSD, kernel_VD)

    run_length = local.all_here
    counted_once = undealt = local.as_it_is
    dealt, mixed, sender = local.whole_batch, local.mix_now, local.by_xla

    def sum_over_batch(self, x: jax.Array) -> jax.Array:
        """Return sums of rows, added over all devices that have others."""
        return self.grid.sum_over_batch(x)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _stand_in(shape: tuple[int, ...], dtype: Any, *of: jax.Array) -> jax.Array:
    """Return zeros that stand for what follows from arrays; so do their gradients."""
    return jnp.zeros(shape, dtype)


def _forward(shape: tuple[int, ...], dtype: Any, *of: jax.Array):
    return jnp.zeros(shape, dtype), of


def _backward(shape: tuple[int, ...], dtype: Any, of: Any, gradient: jax.Array):
    inexact = lambda x: jnp.issubdtype(x.dtype, jnp.inexact)
    return tuple(jnp.zeros_like(x) if inexact(x) else None for x in of)


_stand_in.defvjp(_forward, _backward)


def _made(shape: tuple[int, ...], *of: jax.Array) -> jax.Array:
    return _stand_in(shape, jnp.result_type(*of), *of)


BUILD = (
    "Build layers of hfjax.models.parts (Linear, LayerNorm, RMSNorm, Dropout) and ask self.kernels "
    "(hfjax.models.parts.plain) for the rest: mean, lookup, attention, outputs, positions "
    "(docs/tensor_grids.md)."
)
