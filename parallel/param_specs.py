"""From rules to PartitionSpecs: the sharding of each dimension of one array, and every check."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jax.sharding import Mesh, PartitionSpec as P

from hfjax.parallel.mesh import (
    AXES,
    BATCH_AXES,
    EXPERTS,
    MESH_AXES,
    PIPE_AXIS,
    ROW_AXIS,
    STACK,
    TENSOR_AXES,
    auto_axes,
    batch_axes,
    describe_mesh,
    grid_axes,
    in_use,
    keeps_sharded,
    keeps_sharded_by_name,
    manual_axes,
    names_of,
    size_of,
    unused_axes,
)
from hfjax.parallel.strategy import Axes, Rules, Strategy

Dims = tuple[tuple[int, Axes], ...]  # (dimension, mesh axes); dimensions count from the end


@dataclass(frozen=True)
class ParamSpecs:
    """One parameter, and the specs of it, its accumulated gradient and its optimizer state."""

    mesh: Mesh
    path: str
    shape: tuple[int, ...]
    dtype: Any
    parameter: P
    gradient: P
    optimizer_state: P
    small: bool  # below the size from which the strategy shards arrays
    axes: tuple[str | None, ...] = ()  # the logical name of each dimension
    frozen: bool = False  # no gradient, no optimizer state
    frozen_layers: int = 0  # of a stack, the number of first layers that are frozen
    takes_shards: bool = False  # its module takes shards of it (see `Axis`)

    @property
    def stacked(self) -> bool:
        """Whether dimension 0 stacks layers."""
        return self.axes[:1] == (STACK,)

    def manual_spec(self, column: str) -> P:
        """Return the manual part of a column's spec."""
        return manual_part(getattr(self, column), self.mesh)

    def split_dims(self, column: str) -> Dims:
        """Return the dimensions that a column shards over manual axes, counted from the end.

        Those that stay sharded when read are not among them: a stage's layers, for instance.
        """
        dims = self._dims(self.manual_spec(column))
        is_gathered = lambda dim, axis: not keeps_sharded(axis, self._name(dim), self.takes_shards)
        gathered = [
            (dim, tuple(axis for axis in axes if is_gathered(dim, axis))) for dim, axes in dims
        ]
        return tuple((dim, axes) for dim, axes in gathered if axes)

    def split_axes(self, *columns: str) -> set[str]:
        """Return the axes of the `split_dims` of these columns."""
        return {axis for column in columns for _, axes in self.split_dims(column) for axis in axes}

    def optimizer_only_dims(self, column: str) -> Dims:
        """Return the dimensions that optimizer state shards over axes unused by a column."""
        done = self.split_axes(column)
        dims = self.split_dims("optimizer_state")
        rest = [(dim, tuple(axis for axis in axes if axis not in done)) for dim, axes in dims]
        return tuple((dim, axes) for dim, axes in rest if axes)

    @property
    def sharded_compute(self) -> Axes:
        """The axes over which the parameter stays sharded: no gathers, no gradient sums."""
        return self._split_by(lambda axis, name: keeps_sharded(axis, name, self.takes_shards))

    @property
    def avoidable_gather_axes(self) -> Axes:
        """The axes over which it would stay sharded if its module took shards of it."""
        by_name = self._split_by(keeps_sharded_by_name)
        return tuple(axis for axis in by_name if axis not in self.sharded_compute)

    def _split_by(self, predicate: Callable[[str, str | None], bool]) -> Axes:
        """Return the manual axes that shard the parameter and for which `predicate(axis, name)`."""
        dims = self._dims(self.manual_spec("parameter"))
        return tuple(a for dim, axes in dims for a in axes if predicate(a, self._name(dim)))

    @property
    def gathered_shape(self) -> tuple[int, ...]:
        """The shape when read: full but over `sharded_compute`, tensor axes not divided."""
        entries = entries_of(
            keep_axes(self.manual_spec("parameter"), self.sharded_compute), len(self.shape)
        )
        sizes = [size_of(axes, self.mesh) for axes in entries]
        return tuple(n // size for n, size in zip(self.shape, sizes, strict=True))

    def _name(self, dim: int) -> str | None:
        return self.axes[dim] if self.axes else None

    @property
    def tensor_dims(self) -> Dims:
        """The dimensions that the partitioner keeps sharded while others are gathered or scattered.

        Empty if one of them is sharded over manual axes too: the pieces of a tensor shard are not
        contiguous then, and the partitioner has to reorder them.
        """
        if not auto_axes(self.mesh):
            return ()
        columns = ("parameter", "gradient", "optimizer_state")
        moved = {dim for column in columns for dim, _ in self.split_dims(column)}
        dims = self._dims(auto_part(self.parameter))
        return () if moved & {dim for dim, _ in dims} else dims

    def shard_shape(self, column: str) -> tuple[int, ...]:
        """Return the shape of a device's shard, tensor axes not divided."""
        entries = zip(
            self.shape, entries_of(self.manual_spec(column), len(self.shape)), strict=True
        )
        return tuple(length // size_of(axes, self.mesh) for length, axes in entries)

    def _dims(self, spec: P) -> Dims:
        entries = enumerate(entries_of(spec, len(self.shape)))
        return tuple((dim - len(self.shape), axes) for dim, axes in entries if axes)


@dataclass(frozen=True)
class Array:
    """One array of the model: its path, its shape and the logical name of each dimension."""

    path: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    takes_shards: bool = False  # its module takes shards of it (see `Axis`)

    def __post_init__(self) -> None:
        if len(self.axes) != len(self.shape):
            raise ValueError(
                f"{self.path}: axes {self.axes} name {len(self.axes)} dimensions, "
                f"the array has shape {self.shape}. Name each dimension, None where it has no name."
            )

    @property
    def layer_size(self) -> int:
        """The number of elements that one layer holds."""
        return math.prod(n for n, name in zip(self.shape, self.axes, strict=True) if name != STACK)


def spec_from_rules(
    array: Array, rules: Rules, mesh: Mesh, smallest: float = 0, base: P | None = None
) -> P:
    """Return the spec that `rules` give an array, on top of `base`."""
    entries = entries_of(base or P(), len(array.shape))
    for dim, name in enumerate(array.axes):
        entries[dim] += tuple(a for a in rules.get(name or "", ()) if a not in entries[dim])
    spec = spec_of_entries(entries)
    check_spec(array, spec, mesh)
    if "*" not in rules or array.layer_size < smallest:
        return spec
    used = {axis for entry in entries for axis in entry}
    free = tuple(axis for axis in rules["*"] if axis not in used | unused_axes(mesh))
    return _split_any_dim(array, entries, free, mesh)


def _split_any_dim(array: Array, entries: list[Axes], axes: Axes, mesh: Mesh) -> P:
    """Shard the first free dimension that divides over `axes`; none: the array stays as it is.

    On a grid they may be minor to row or tensor on a dimension: gathered over them, the shard of
    each device is in order.
    """
    grid = set(grid_axes(mesh))
    for dim, (length, name) in enumerate(zip(array.shape, array.axes, strict=True)):
        free = grid.issuperset(entries[dim]) and name != STACK
        needs_rule = name is not None and any(MESH_AXES[a].keeps_sharded == name for a in axes)
        free = free and not needs_rule  # what stays sharded needs a rule by name
        if axes and free and length and length % size_of((*entries[dim], *axes), mesh) == 0:
            entries[dim] += axes
            break
    return spec_of_entries(entries)


def sizes_near(arrays: Iterable[Array | ParamSpecs], size: int) -> list[int]:
    """Return the sizes next to `size`, below and above, that divide a dimension of each array.

    >>> sizes_near([Array("w", (32, 96, 64), ("layers", None, None))], 24 + 16)
    [32, 48]
    """
    of = [[n for n, name in zip(a.shape, a.axes, strict=True) if name != STACK] for a in arrays]
    divides = lambda size: all(any(n % size == 0 for n in dims) for dims in of)
    most = min(map(max, of), default=0)
    spans = range(min(size - 1, most), 1, -1), range(size + 1, most + 1)
    near = [next(filter(divides, span), None) for span in spans]
    return [n for n in near if n is not None]


def column_specs(
    array: Array, strategy: Strategy, mesh: Mesh, spec: P | None = None
) -> tuple[P, P, P]:
    """Return the specs of the parameter, its accumulated gradient and its optimizer state."""
    smallest = strategy.smallest
    if spec is None:
        spec = spec_from_rules(array, strategy.parameters, mesh, smallest)
    if strategy.gradients.get("*") == ():  # requested: accumulate unsharded, reduce once
        entries = zip(entries_of(spec, len(array.axes)), array.axes, strict=True)
        is_kept = partial(keeps_sharded, takes_shards=array.takes_shards)
        full_gradient = spec_of_entries(
            [tuple(a for a in e if is_kept(a, name)) for e, name in entries]
        )
        return (
            spec,
            full_gradient,
            spec_from_rules(array, strategy.optimizer_state, mesh, smallest, spec),
        )
    gradient = spec_from_rules(array, strategy.gradients, mesh, smallest, spec)
    return (
        spec,
        gradient,
        spec_from_rules(array, strategy.optimizer_state, mesh, smallest, gradient),
    )


def check_spec(array: Array, spec: P, mesh: Mesh) -> None:
    """Refuse a spec that this array cannot have on this mesh, with what to do instead."""
    label = f"{array.path} {array.shape}: {spec}"
    if len(spec) > len(array.shape):
        raise ValueError(f"{label} has {len(spec)} entries for {len(array.shape)} dimensions.")
    dim_of: dict[str, int] = {}
    for dim, axes in enumerate(entries_of(spec, len(array.shape))):
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f"{label}: unknown mesh axis {axis!r}. Axes: {', '.join(AXES)}.")
            if axis in dim_of:
                raise ValueError(
                    f"{label} uses mesh axis {axis!r} twice (dimensions {dim_of[axis]} and {dim}). "
                    "A mesh axis splits one dimension of an array: keep one of them."
                )
            dim_of[axis] = dim
        _check_dim(array, dim, axes, mesh, label)


def _check_dim(array: Array, dim: int, axes: Axes, mesh: Mesh, label: str) -> None:
    manual = [a in manual_axes(mesh) for a in axes]
    if manual != sorted(manual, reverse=True):
        legal = tuple(sorted(axes, key=lambda a: a not in manual_axes(mesh)))
        raise ValueError(
            f"{label}: on one dimension, {' and '.join(BATCH_AXES)} come before "
            f"{' and '.join(TENSOR_AXES)} (the other order adds permutes and gathers to every "
            f"step). Write {legal}."
        )
    is_gathered = lambda axis: not keeps_sharded_by_name(axis, array.axes[dim], array.takes_shards)
    if (gathered := list(map(is_gathered, axes))) != sorted(gathered):
        legal = tuple(sorted(axes, key=is_gathered))
        raise ValueError(
            f"{label}: on dimension {dim} ({array.axes[dim]}), what stays split comes before what "
            f"is gathered. Write {legal}."
        )
    size = size_of(axes, mesh)
    if array.axes[dim] == STACK and any(manual):
        if axes == (PIPE_AXIS,):  # storage is padded where the layers do not divide
            return
        if size > 1:
            raise ValueError(
                f"{label}: dimension {dim} stacks the layers and is sliced layer by layer, so it "
                f"cannot be split over {axes}, only over {PIPE_AXIS}. Split another dimension."
            )
    if PIPE_AXIS in axes and STACK in array.axes:
        raise ValueError(
            f"{label}: {PIPE_AXIS} splits the layers, dimension {array.axes.index(STACK)}, and no "
            "other dimension of theirs."
        )
    if array.shape[dim] % size:
        raise ValueError(
            f"{label}: dimension {dim} ({array.axes[dim] or 'unnamed'}, {array.shape[dim]}) does "
            f"not divide by {size} ({describe_mesh(mesh)}). {_advice(array, dim, axes, mesh)}"
        )


def _advice(array: Array, dim: int, axes: Axes, mesh: Mesh) -> str:
    name, length, size = array.axes[dim], array.shape[dim], size_of(axes, mesh)
    if name == "vocab":
        padded = math.ceil(length / size) * size
        return f"Pad the vocabulary in the model's config: vocab={padded} (or a multiple of 128)."
    if name == "heads":
        fits = [n for n in range(size, 1, -1) if length % n == 0]
        return f"{length} heads need a tensor axis that divides them: {fits or 'only 1'} fit."
    if name == EXPERTS:
        fits = [n for n in range(2, length + 1) if length % n == 0]
        return f"Axes over which {length} experts can lie: {fits}; or choose a multiple of {size}."
    if grid_axes(mesh) and name:
        fits = [n for n in range(size, 1, -1) if length % n == 0]
        return f"A grid needs a {axes[0]} that divides it: {fits or 'only 1'} would do."
    legal = [d for d, n in enumerate(array.shape) if n % size == 0 and array.axes[d] != STACK]
    return f"Dimensions that do: {legal}." if legal else "None does: use P() or a smaller axis."


def entries_of(spec: P, ndim: int) -> list[Axes]:
    """Return one tuple of mesh axes per dimension.

    >>> entries_of(P("fsdp", ("data", "tensor")), 3)
    [('fsdp',), ('data', 'tensor'), ()]
    """
    return [*names_of(spec), *[()] * (ndim - len(spec))]


def spec_of_entries(entries: Sequence[Axes]) -> P:
    """Return the spec with these mesh axes for each dimension: the inverse of `entries_of`."""
    tidy = [None if not e else e[0] if len(e) == 1 else e for e in entries]
    while tidy and tidy[-1] is None:
        tidy.pop()
    return P(*tidy)


def keep_axes(spec: P, allowed: Sequence[str]) -> P:
    """Return a spec with these axes only."""
    return spec_of_entries(
        [tuple(a for a in e if a in allowed) for e in entries_of(spec, len(spec))]
    )


def manual_part(spec: P, mesh: Mesh) -> P:
    """Return the part of a spec whose collectives our source writes, axes of size 1 left out.

    XLA does not always drop a collective over single devices (with a tensor axis its partitioner
    refuses one), so none is written.
    """
    return keep_axes(spec, in_use(mesh, manual_axes(mesh)))


def auto_part(spec: P) -> P:
    """Return the part of a spec whose collectives the partitioner derives."""
    return keep_axes(spec, TENSOR_AXES)


def num_shards(spec: P, mesh: Mesh) -> int:
    """Return the number of shards into which a spec splits an array."""
    return math.prod(size_of(axes, mesh) for axes in entries_of(spec, len(spec)))


def batch_spec(mesh: Mesh) -> P:
    """Return the spec of each array of a batch: whole examples, split over the batch axes."""
    return P(batch_axes(mesh))


def batch_devices(mesh: Mesh) -> int:
    """Return the number of devices that shard the batch."""
    return size_of(BATCH_AXES, mesh)


def num_batch_shards(mesh: Mesh) -> int:
    """Return the most shards that a microbatch is split into: in attention on a grid.

    >>> from hfjax.parallel.make_mesh import make_mesh
    >>> num_batch_shards(make_mesh(fsdp=2, row=2, tensor=2))
    4
    """
    return size_of((*BATCH_AXES, ROW_AXIS), mesh)
