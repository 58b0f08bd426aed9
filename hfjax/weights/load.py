"""Weights stream from files into a layout: rows first, then devices move them to their places.

Each process reads its rows of a tensor (`rows_of_files`). One compiled program for each shape
orders them as ours are, casts them, and puts them into the stack of the parameter, which it is
given to keep; meanwhile the rows of the next are read.
"""

import math
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.distributed.consensus import in_all
from hfjax.parallel.offload.host_memory import is_host_sharding, of_results, to_host
from hfjax.parallel.param_specs import entries_of
from hfjax.sharding.layout import Layout
from hfjax.utils.paths import Flat, flatten
from hfjax.weights.file_rows import RowsOfFiles
from hfjax.weights.redistribute_rows import Way, ways_of
from hfjax.weights.tensor_files import FileTensor
from hfjax.weights.tensor_rules import PlacedTensor, Rule, Shape

AT_ONCE = 32 << 20  # bytes of files that move together, for each process


class Group(NamedTuple):
    """What moves together: tensors that share a block of a parameter, perhaps of several layers.

    Attributes:
        path: The parameter.
        at: Where in its first dimensions.
        first: The sizes of the dimensions after these that number tensors.
        slots: For each rule, its pieces in order.
    """

    path: str
    at: tuple[int, ...]
    first: tuple[int, ...]
    slots: tuple[tuple[PlacedTensor, ...], ...]

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rule of each slot."""
        return tuple(pieces[0].rule for pieces in self.slots)

    @property
    def twins(self) -> tuple[bool, ...]:
        """Which of them the files hold twice."""
        return tuple(pieces[0].twin is not None for pieces in self.slots)


def groups_of(pieces: Sequence[PlacedTensor], most: int) -> list[Group]:
    """Return what of one parameter moves together: at most so many bytes, if it can be cut so."""
    numbered = len(pieces[0].index)
    sizes = tuple(1 + max(p.index[i] for p in pieces) for i in range(numbered))
    bytes_ = sum(_bytes(piece) for piece in pieces)
    cut = numbered if _of_many_types(pieces) else 0  # rows of one array have one type
    while cut < numbered and bytes_ > most:
        bytes_ //= sizes[cut]
        cut += 1
    found: dict[tuple[int, ...], dict[Rule, list[PlacedTensor]]] = {}
    for piece in sorted(pieces, key=lambda p: (p.index, p.rule.start)):
        found.setdefault(piece.index[:cut], {}).setdefault(piece.rule, []).append(piece)
    return [
        Group(pieces[0].path, index, sizes[cut:], tuple(map(tuple, slots.values())))
        for index, slots in found.items()
    ]


def _of_many_types(pieces: Sequence[PlacedTensor]) -> bool:
    """Return whether tensors of one rule differ in type."""
    kinds = {(piece.rule, piece.tensor.dtype) for piece in pieces if piece.tensor is not None}
    return len(kinds) > len({piece.rule for piece in pieces})


def _bytes(piece: PlacedTensor) -> int:
    return math.prod(piece.rule.shape) * (piece.tensor.dtype.itemsize if piece.tensor else 4)


def by_path(pieces: Sequence[PlacedTensor]) -> dict[str, list[PlacedTensor]]:
    """Return the pieces of each parameter."""
    found: dict[str, list[PlacedTensor]] = {}
    for piece in pieces:
        found.setdefault(piece.path, []).append(piece)
    return found


@dataclass(eq=False)
class WeightStream:
    """What is read into the parameters of a layout; `parameters` does it."""

    layout: Layout
    pieces: Sequence[PlacedTensor]
    read: int = 0  # bytes, by this process

    def __post_init__(self) -> None:
        self.files = RowsOfFiles(self.layout.mesh)
        self._shardings = flatten(self.layout.shardings().params)

    @cached_property
    def groups(self) -> list[Group]:
        """What moves together, in the order of the parameters."""
        most = AT_ONCE * jax.process_count()
        return [g for pieces in by_path(self.pieces).values() for g in groups_of(pieces, most)]

    def parameters(self) -> Flat:
        """Return all parameters on their shards."""
        found: Flat = {}
        told: list[tuple[Group, Any]] = []
        with ThreadPoolExecutor(1) as beside:
            try:
                rows = beside.submit(self.rows_here, self.groups[0])
                for at, group in enumerate(self.groups):
                    here, last = rows.result(), at + 1 == len(self.groups)
                    if not last:
                        rows = beside.submit(self.rows_here, self.groups[at + 1])
                    stack, flags = self.moved(group, here, found.get(group.path))
                    told.append((group, jax.block_until_ready(flags)))
                    where = self._shardings[group.path]
                    ended = last or self.groups[at + 1].path != group.path
                    to_host_now = ended and is_host_sharding(where)
                    found[group.path] = _to_host(stack, where) if to_host_now else stack
            finally:
                self.files.close()
        self.read = in_all(self.files.ended)
        check_told(told)
        return found

    def rows_here(self, group: Group) -> list[list[np.ndarray]]:
        """Return the rows that are here, of each slot and of the twins: they are read."""
        ways = self._mover(group).ways
        return [self.files.read(tensors, ways[slot]) for slot, tensors in tensors_of(group)]

    def moved(self, group: Group, here: Sequence[Sequence[np.ndarray]], stack: Any) -> Any:
        """Return a parameter with rows in their place, and whether these are well."""
        mover = self._mover(group)
        slots = [slot for slot, _ in tensors_of(group)]
        rows = [
            self.files.on_devices(parts, mover.ways[slot])
            for slot, parts in zip(slots, here, strict=True)
        ]
        if stack is None and group.at:
            stack = mover.empty()
        kept = () if stack is None else (stack,)
        return mover.program(kept, np.array(group.at, np.int32), rows)

    def _mover(self, group: Group) -> "RowMover":
        spec = self._shardings[group.path].spec
        shape = tuple(self.layout.arrays[group.path].shape)
        dtype = np.dtype(self.layout.blueprint.parameters[group.path].dtype)
        where = NamedSharding(self.layout.mesh, P(*spec))
        return mover(of_program(group.rules), group.twins, group.first, shape, dtype, where)


def of_program(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return rules without the names in them: equal ones share a program."""
    plain = {"theirs": "", "ours": "", "layers": None, "twin": None, "transform": ""}
    return tuple(replace(rule, **plain) for rule in rules)


def tensors_of(group: Group) -> Iterator[tuple[int, list[FileTensor]]]:
    """Yield the tensors of each slot, then those of the twins, with the slot's number."""
    for slot, pieces in enumerate(group.slots):
        yield slot, [p.tensor for p in pieces if p.tensor is not None]
    for slot, pieces in enumerate(group.slots):
        if group.twins[slot]:
            yield slot, [p.twin for p in pieces if p.twin is not None]


def check_told(told: Sequence[tuple[Group, Any]]) -> None:
    """Refuse weights that are not finite, and a tensor that a file holds twice unlike."""
    for group, flags in told:
        finite, alike = (np.asarray(x) for x in flags)
        for pieces, fine in zip(group.slots, finite, strict=True):
            for piece, ok in zip(pieces, fine.reshape(-1), strict=True):
                if not ok:
                    raise ValueError(
                        f"{piece.name} holds numbers that are not finite (NaN or infinite): "
                        "nothing can be trained from it. Get the file again, or mend the tensor."
                    )
        twins = [p[0] for p, twin in zip(group.slots, group.twins, strict=True) if twin]
        for piece, same in zip(twins, alike, strict=True):
            if not same:
                raise ValueError(
                    f"config.json says tie_word_embeddings, and {piece.rule.twin} differs from "
                    f"{piece.name}: which one is meant? Say tie_word_embeddings: false in "
                    f"config.json to train both, or take {piece.rule.twin} out of the files."
                )


def _to_host(x: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.jit(to_host, out_shardings=of_results(sharding))(x)


@dataclass(frozen=True)
class RowMover:
    """The program that moves groups of one shape.

    Attributes:
        rules: Of its slots.
        twins: Which slots come twice.
        first: The sizes of the dimensions that number tensors in a group.
        shape: The shape of the parameter.
        dtype: Its type.
        where: Where it lies.
    """

    rules: tuple[Rule, ...]
    twins: tuple[bool, ...]
    first: Shape
    shape: Shape
    dtype: np.dtype
    where: NamedSharding

    @property
    def numbered(self) -> int:
        """How many dimensions the index of a group has."""
        return len(self.shape) - len(self.first) - len(self.rules[0].order)

    @cached_property
    def ways(self) -> list[Way]:
        """The way of each slot."""
        entries = entries_of(self.where.spec, len(self.shape))[self.numbered :]
        shape = self.shape[self.numbered + len(self.first) :]
        mesh = self.where.mesh
        assert isinstance(mesh, Mesh)
        return ways_of(mesh, self.rules, self.first, entries, shape)

    @cached_property
    def inner(self) -> P:
        """How a block is split."""
        return P(
            *(e or None for e in entries_of(self.where.spec, len(self.shape))[self.numbered :])
        )

    def empty(self) -> jax.Array:
        """Return a parameter that nothing was put into."""
        return jax.jit(lambda: jnp.zeros(self.shape, self.dtype), out_shardings=self.where)()

    @cached_property
    def program(self) -> jax.stages.Wrapped:
        """The program (stack or nothing, index, rows) -> (stack, whether rows are well)."""
        mesh, spec = self.where.mesh, self.where.spec
        slots = [*range(len(self.rules)), *(i for i, twin in enumerate(self.twins) if twin)]
        rows = [self.ways[slot].spec for slot in slots]

        def move(kept: tuple, index: jax.Array, given: Sequence[jax.Array]) -> Any:
            specs: Any = {
                "in_specs": ((spec,) * len(kept), P(), rows),
                "out_specs": (spec if kept else self.inner, (P(), P())),
            }
            return jax.shard_map(self._on_device, mesh=mesh, check_vma=False, **specs)(
                kept, index, given
            )

        return jax.jit(move, donate_argnums=0)

    def _on_device(self, kept: tuple, index: jax.Array, given: Sequence[jax.Array]) -> Any:
        rows, others = given[: len(self.ways)], given[len(self.ways) :]
        finite = [self.every(jnp.isfinite(x), len(self.first)) for x in rows]
        twins = [x for x, twin in zip(rows, self.twins, strict=True) if twin]
        alike = [self.every(x == y, 0) for x, y in zip(twins, others, strict=True)]
        block = self._joined([way.arrive(x) for way, x in zip(self.ways, rows, strict=True)])
        block = self.ways[0].cut(block).astype(self.dtype)
        flags = jnp.stack(finite), jnp.array(alike)
        return (self._put(kept[0], block, index) if kept else block), flags

    def every(self, flags: jax.Array, first: int) -> jax.Array:
        """Return whether all are set, on all devices, for each tensor."""
        here = flags.all(tuple(range(first, flags.ndim))).astype(jnp.int32)
        return lax.pmin(here, self.where.mesh.axis_names) > 0

    def _joined(self, parts: Sequence[jax.Array]) -> jax.Array:
        """Return the block that several tensors share."""
        along = self.rules[0].along
        return parts[0] if along is None else jnp.concatenate(parts, len(self.first) + along)

    def _put(self, stack: jax.Array, block: jax.Array, index: jax.Array) -> jax.Array:
        """Return a stack with a block at an index of its first dimensions, which may be split."""
        at, here = own_index(self.where, stack.shape[: self.numbered], index)
        start = [*at, *[0] * block.ndim]
        new = block.reshape(*[1] * self.numbered, *block.shape)
        if here is not None:
            new = jnp.where(here, new, lax.dynamic_slice(stack, start, new.shape))
        return lax.dynamic_update_slice(stack, new, start)


@cache
def mover(*fields: Any) -> RowMover:
    """Return the mover with these fields: one for each shape, so that it compiles once."""
    return RowMover(*fields)


def own_index(where: NamedSharding, sizes: Shape, index: jax.Array) -> tuple[list[Any], Any]:
    """Return an index within what a device has of a stack, and whether it is there.

    None: each device has all of the first dimensions.
    """
    at, here = [], None
    for axes, size, i in zip(entries_of(where.spec, len(sizes)), sizes, index, strict=False):
        if math.prod(where.mesh.shape[a] for a in axes) > 1:
            i = i - lax.axis_index(axes) * size
            inside = (0 <= i) & (i < size)
            here = inside if here is None else here & inside
            i = jnp.clip(i, 0, size - 1)
        at.append(i)
    return at, here
