"""Which dimensions of a parameter make a matrix, read from their names.

| names | what they are |
|---|---|
| layers, experts, gate_up, choice | a stack of matrices: each is orthogonalized by itself |
| heads, then head_dim, kv or no name | one side of a matrix: heads times the width of a head |
| qkv, after heads | queries, then a key, then a value: three matrices in one array |
| vocab, position, class, router | embeddings, heads of models and routers: AdamW |
| any other, or none | a side of a matrix of its own |

Matrices are [in, out], as x @ kernel has them: the first side is the input.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import jax
import jax.numpy as jnp

from hfjax.optimizers.layout_axes import LayoutAxes, Names

Dims = tuple[int, ...]

STACKS = ("layers", "experts", "gate_up", "choice")
HEADS = ("heads", "kv_heads")
WIDTHS = ("head_dim", "kv")  # of a head, after it
QKV = "qkv"
NOT_MATRICES = {
    "vocab": "an embedding or a head",
    "position": "an embedding",
    "class": "a head",
    "router": "a router",
}


@dataclass(frozen=True)
class MatrixAxes:
    """The dimensions of an array that holds matrices.

    Attributes:
        shape: The shape of the array.
        stacks: The dimensions that stack matrices.
        inputs: The dimensions that make the rows of a matrix.
        outputs: The dimensions that make its columns.
        qkv: The dimension, one of those of a side, with queries, a key and a value. None: none.
    """

    shape: tuple[int, ...]
    stacks: Dims
    inputs: Dims
    outputs: Dims
    qkv: int | None = None

    @property
    def sides(self) -> Dims:
        """The dimensions of both sides, in the order of the array."""
        return (*self.inputs, *self.outputs)

    def stack(self, x: jax.Array) -> jax.Array:
        """Return an array, or a shard of it, with its stacks first and flat: [B, *sides].

        >>> gate_up = MatrixAxes((2, 8, 16, 2), (0, 3), (1,), (2,))
        >>> gate_up.stack(jnp.ones((2, 8, 16, 2))).shape
        (4, 8, 16)
        """
        x = x.transpose(*self.stacks, *self.sides)
        count, sides = x.shape[: len(self.stacks)], x.shape[len(self.stacks) :]
        return x.reshape(math.prod(count), *sides)

    def unstack(self, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Return the array of this shape that `stack` has made flat."""
        order = (*self.stacks, *self.sides)
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return x.reshape([shape[dim] for dim in order]).transpose(inverse)

    def split(self, x: jax.Array) -> list[jax.Array]:
        """Return the matrices [B, in, out] of [B, *sides]: one, or those of q, k and v."""
        if self.qkv is None:
            return [self._flatten_sides(x)]
        dim = self._qkv_dim
        ends = (x.shape[dim] - 2, x.shape[dim] - 1)
        return [self._flatten_sides(part) for part in jnp.split(x, ends, axis=dim)]

    def join(self, matrices: list[jax.Array]) -> jax.Array:
        """Return the array [B, *sides] of which these are the matrices."""
        sides = [self.shape[dim] for dim in self.sides]
        count = len(matrices[0])
        if self.qkv is None:
            return matrices[0].reshape(count, *sides)
        dim = self._qkv_dim
        sizes = [sides[dim - 1] - 2, 1, 1]
        shapes = [(count, *sides[: dim - 1], size, *sides[dim:]) for size in sizes]
        parts = [x.reshape(shape) for x, shape in zip(matrices, shapes, strict=True)]
        return jnp.concatenate(parts, axis=dim)

    def __str__(self) -> str:
        """Return how many matrices of which sizes there are."""
        count = math.prod(self.shape[dim] for dim in self.stacks)
        size = lambda dims: math.prod(self.shape[dim] for dim in dims if dim != self.qkv)
        queries = None if self.qkv is None else self.shape[self.qkv] - 2
        rows, columns = size(self.inputs), size(self.outputs)
        if queries is None:
            return f"{count} x [{rows}, {columns}]"
        return f"{count} x q [{rows}, {queries * columns}], k and v [{rows}, {columns}]"

    @cached_property
    def _qkv_dim(self) -> int:
        """The dimension of q, k and v in [B, *sides]."""
        return 1 + self.sides.index(self.qkv)

    def _flatten_sides(self, x: jax.Array) -> jax.Array:
        rows = math.prod(x.shape[1 : 1 + len(self.inputs)])
        columns = math.prod(x.shape[1 + len(self.inputs) :])
        return x.reshape(x.shape[0], rows, columns)


class MatrixReader:
    """Which parameters of a model are matrices, by the names of their dimensions.

    Args:
        axes: The arrays of its layout.
    """

    def __init__(self, axes: LayoutAxes) -> None:
        self._axes = {path: array.axes for path, array in axes.arrays.items()}
        self._packed, self._head_shapes = axes.packed, set[tuple[int, ...]]()
        for array in axes.arrays.values():
            names, dims = array.axes, _side_dims(array.axes)
            if len(dims) > 2:
                self._head_shapes |= {
                    (array.shape[a], array.shape[b])
                    for a, b in pairwise(dims)
                    if names[a] in HEADS and names[b] in (*WIDTHS, None)
                }

    def __contains__(self, path: str) -> bool:
        return path in self._axes or self._is_packed(path)

    def _is_packed(self, path: str) -> bool:
        return bool(self._packed) and path.startswith(self._packed)

    def find(self, path: str, shape: tuple[int, ...]) -> MatrixAxes | str:
        """Return where the matrices of a parameter are, or why it has none.

        Args:
            path: The path of the parameter.
            shape: Its shape; stacks may be of another length than in the model.

        Raises:
            ValueError: Names do not say whether it is a matrix.
        """
        if self._is_packed(path):
            return "packed layers"
        names = self._axes[path]
        if reason := next((NOT_MATRICES[x] for x in names if x in NOT_MATRICES), None):
            return reason
        dims = _side_dims(names)
        if len(dims) > 1 and not any(names[dim] for dim in dims):
            raise _unnamed_error(path, shape)
        sides = self._sides(path, shape, dims)
        if len(sides) != 2:
            return "no matrix" if len(sides) < 2 else f"{len(sides)} sides, no matrix"
        stacks = tuple(dim for dim, name in enumerate(names) if name in STACKS)
        qkv = next((dim for dim in dims if names[dim] == QKV), None)
        if qkv is not None and shape[qkv] < 3:
            raise ValueError(
                f"muon: {path} {list(shape)}: dimension {qkv} is named {QKV!r}, which holds "
                f"queries, then a key, then a value: at least 3, found {shape[qkv]}."
            )
        return MatrixAxes(tuple(shape), stacks, tuple(sides[0]), tuple(sides[1]), qkv)

    def _sides(self, path: str, shape: tuple[int, ...], dims: list[int]) -> list[list[int]]:
        """Return the dimensions of each side."""
        names, sides = self._axes[path], list[list[int]]()
        for before, dim in zip([None, *dims], dims, strict=False):
            follows_heads = before is not None and names[before] in (*HEADS, QKV)
            is_width = names[dim] in WIDTHS or (
                names[dim] is None
                and before is not None
                and (
                    len(dims) > 2
                    or names[before] == QKV
                    or (shape[before], shape[dim]) in self._head_shapes
                )
            )
            if follows_heads and (is_width or names[dim] == QKV):
                sides[-1].append(dim)
            else:
                sides.append([dim])
        if len(sides) > 2 and any(names[side[0]] is None for side in sides):
            raise ValueError(
                f"muon: {path} {list(shape)} with axes {names}: which dimensions make the two sides"
                f" of a matrix is not clear. Name all: {QKV!r} for queries, a key and a value "
                f"after heads, {WIDTHS[0]!r} for the width of a head, {STACKS[-1]!r} for what "
                "stacks matrices, others as you like; or let another optimizer update it: "
                f'hfjax.optimizers.by_path({{"{path}": optax.adamw(…), "*": '
                "hfjax.optimizers.muon(…)})."
            )
        return sides


def _side_dims(names: Names) -> list[int]:
    """Return the dimensions that stack no matrices."""
    return [dim for dim, name in enumerate(names) if name not in STACKS]


def _unnamed_error(path: str, shape: tuple[int, ...]) -> ValueError:
    return ValueError(
        f"muon: {path} {list(shape)} has no names of its dimensions, by which muon tells "
        "matrices from stacks of vectors and from embeddings. Name them: hfjax.layout(…, "
        f'axes={{"{path}": {_example_names(len(shape))}}}); or let another optimizer '
        f'update it: hfjax.optimizers.by_path({{"{path}": optax.adamw(…), "*": '
        "hfjax.optimizers.muon(…)})."
    )


def _example_names(rank: int) -> str:
    """Return names for an array of this rank, as an example.

    >>> _example_names(2)
    '("embed", "mlp")'
    """
    if rank == 2:
        return '("embed", "mlp")'
    if rank == 4:
        return '("height", "width", "channel_in", "channel_out")'
    return "(" + ", ".join(['"…"'] * rank) + ")"
