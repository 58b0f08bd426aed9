"""Unlike trees of arrays in buffers of one length: what differs from stage to stage, in one shape.

All devices run one program, so what waits in a ring, goes to a neighbour or is stored has the same
shape on every stage. A tree is packed into one flat buffer for each dtype, as long as the largest
tree needs; the rest is zeros, and nothing reads it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.arrangement import Arrangement
from hfjax.parallel.reduction import Flat

PACKED = "layers/packed_"  # path of a stored array, before the name of its dtype


@dataclass(frozen=True, eq=False)
class Packing:
    """Where the arrays of each of these trees (of shapes and dtypes) lie in its buffers."""

    trees: Sequence[Any]
    multiple: int = 1  # of which the length of every buffer is one

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The length of the buffer of each dtype: what the largest tree needs."""
        names = sorted({_name(a) for tree in self.trees for a in jax.tree.leaves(tree)})
        largest = {name: max(self.used(i, name) for i in range(len(self.trees))) for name in names}
        return {name: -(-n // self.multiple) * self.multiple for name, n in largest.items()}

    @property
    def like(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The buffers' shapes and dtypes."""
        return {name: jax.ShapeDtypeStruct((n,), name) for name, n in self.lengths.items()}

    def used(self, i: int, name: str) -> int:
        """Return how many elements of a dtype a tree has."""
        leaves = jax.tree.leaves(self.trees[i])
        return sum(math.prod(a.shape) for a in leaves if _name(a) == name)

    def pack(self, i: int, tree: Any, dtypes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the buffers that hold a tree of the form of `trees[i]`.

        `dtypes` are those of the buffers, if the tree was cast since.
        """
        names = [_name(like) for like in jax.tree.leaves(self.trees[i])]
        leaves = list(zip(names, jax.tree.leaves(tree), strict=True))
        buffers = {}
        for name, length in self.lengths.items():
            parts = [jnp.ravel(a) for of, a in leaves if of == name]
            if rest := length - sum(part.size for part in parts):
                parts.append(jnp.zeros(rest, name if dtypes is None else dtypes[name]))
            buffers[name] = jnp.concatenate(parts) if len(parts) > 1 else parts[0]
        return buffers

    def starts(self, i: int) -> list[int]:
        """Return where each array of a tree begins in its buffer."""
        at, starts = dict.fromkeys(self.lengths, 0), []
        for a in jax.tree.leaves(self.trees[i]):
            starts.append(at[_name(a)])
            at[_name(a)] += math.prod(a.shape)
        return starts

    def unpack(self, i: int, buffers: Mapping[str, jax.Array]) -> Any:
        """Return the tree that was packed, in the buffers' dtypes."""
        form, starts = jax.tree.structure(self.trees[i]), self.starts(i)
        take = lambda a, start: buffers[_name(a)][start : start + math.prod(a.shape)]
        pairs = zip(jax.tree.leaves(self.trees[i]), starts, strict=True)
        return form.unflatten([take(a, start).reshape(a.shape) for a, start in pairs])


class Place(NamedTuple):
    """Where a parameter lies: in which stored array, in which row, from where on."""

    array: str
    row: int
    start: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class PackedLayers:
    """The parameters of a list of layers as stages store them: a row for each virtual stage.

    There is one array for each dtype, [stages * chunks, length of the longest row].
    """

    arrangement: Arrangement
    layers: Sequence[Flat]  # shapes and dtypes of the parameters of each layer, by path
    multiple: int

    @cached_property
    def packing(self) -> Packing:
        """How the parameters of each virtual stage lie in its row."""
        held = [
            {path: like for number in numbers for path, like in self.layers[number].items()}
            for numbers in self.arrangement.parts
        ]
        return Packing(held, self.multiple)

    @property
    def shapes(self) -> Flat:
        """Shapes and dtypes of what is stored, by path."""
        rows = self.arrangement.virtual.size
        return {
            PACKED + name: jax.ShapeDtypeStruct((rows, length), name)
            for name, length in self.packing.lengths.items()
        }

    @property
    def row_bytes(self) -> int:
        """The bytes of a row, of all dtypes."""
        lengths = self.packing.lengths.items()
        return sum(length * jnp.dtype(name).itemsize for name, length in lengths)

    @property
    def held_bytes(self) -> list[int]:
        """The bytes of each virtual stage's parameters; the rest of its row is padding."""
        packing, size = self.packing, lambda name: jnp.dtype(name).itemsize
        return [
            sum(packing.used(g, name) * size(name) for name in packing.lengths)
            for g in range(len(packing.trees))
        ]

    @cached_property
    def places(self) -> dict[str, Place]:
        """Where each parameter lies, by path, part after part."""
        places, row_of = {}, self.arrangement.virtual.reshape(-1).argsort()
        for g, held in enumerate(self.packing.trees):
            starts = zip(jax.tree.leaves(held), self.packing.starts(g), strict=True)
            for path, (a, start) in zip(sorted(held), starts, strict=True):
                places[path] = Place(PACKED + _name(a), int(row_of[g]), start, a.shape)
        return places

    def dtypes(self, flat: Flat) -> dict[str, Any]:
        """Return the dtype of each stored array for these arrays: moments may have others."""
        return {place.array: flat[path].dtype for path, place in self.places.items()}

    def row(self, g: int, flat: Flat, dtypes: Mapping[str, Any] | None = None) -> Flat:
        """Return the row of each stored array that a virtual stage has."""
        held = {path: flat[path] for path in self.packing.trees[g]}
        return {PACKED + name: row for name, row in self.packing.pack(g, held, dtypes).items()}

    def store(self, flat: Flat) -> Flat:
        """Return what is stored, from the arrays of all layers."""
        dtypes = self.dtypes(flat)
        stored = {path: jnp.zeros(x.shape, dtypes[path]) for path, x in self.shapes.items()}
        for path, (array, row, start, _) in self.places.items():
            piece = jnp.ravel(flat[path])[None]
            stored[array] = lax.dynamic_update_slice(stored[array], piece, (row, start))
        return stored

    def restore(self, stored: Flat) -> Flat:
        """Return the arrays of all layers."""
        take = lambda p: stored[p.array][p.row, p.start : p.start + math.prod(p.shape)]
        return {path: take(place).reshape(place.shape) for path, place in self.places.items()}


def _name(array: Any) -> str:
    return jnp.dtype(array.dtype).name
