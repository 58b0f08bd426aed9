"""Arrays that differ from stage to stage, packed into buffers of one length.

All devices run one program, so stashed residuals, messages and stored parameters have the same
shape on every stage. A tree is packed into one flat buffer for each dtype, as long as the largest
tree needs; the rest is zeros that nothing reads. `PackedLayers` and `StagePackedLayers` make, store
and restore packed layers without any device holding all of them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.parallel.adapters.model_template import LAYERS, ModelTemplate
from hfjax.parallel.jaxprs.program import trace_flat
from hfjax.parallel.layer_order import Arrangement
from hfjax.parallel.mesh import PIPE_AXIS
from hfjax.parallel.param_specs import batch_devices
from hfjax.utils.paths import Flat, Index, Tree, is_random_key
from hfjax.utils.vma import mark_varying

PACKED = "layers/packed_"  # path of a stored array, before the name of its dtype


@dataclass(frozen=True, eq=False)
class Packing:
    """The layout of each of these trees (of shapes and dtypes) in flat buffers."""

    trees: Sequence[Any]
    multiple: int = 1  # every buffer's length is a multiple of it

    @cached_property
    def lengths(self) -> dict[str, int]:
        """The length of the buffer of each dtype: what the largest tree needs."""
        names = sorted({_dtype_name(a) for tree in self.trees for a in jax.tree.leaves(tree)})
        largest = {
            name: max(self.num_elements(i, name) for i in range(len(self.trees))) for name in names
        }
        return {name: -(-n // self.multiple) * self.multiple for name, n in largest.items()}

    @property
    def like(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The buffers' shapes and dtypes."""
        return {name: jax.ShapeDtypeStruct((n,), name) for name, n in self.lengths.items()}

    def num_elements(self, i: int, name: str) -> int:
        """Return how many elements of a dtype a tree has."""
        leaves = jax.tree.leaves(self.trees[i])
        return sum(math.prod(a.shape) for a in leaves if _dtype_name(a) == name)

    def pack(self, i: int, tree: Tree, dtypes: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the buffers that hold a tree of the structure of `trees[i]`.

        `dtypes` are those of the buffers, if the tree was cast since.
        """
        names = [_dtype_name(like) for like in jax.tree.leaves(self.trees[i])]
        leaves = list(zip(names, jax.tree.leaves(tree), strict=True))
        buffers = {}
        for name, length in self.lengths.items():
            arrays = [jnp.ravel(a) for of, a in leaves if of == name]
            if rest := length - sum(array.size for array in arrays):
                arrays.append(jnp.zeros(rest, name if dtypes is None else dtypes[name]))
            buffers[name] = jnp.concatenate(arrays) if len(arrays) > 1 else arrays[0]
        return buffers

    def starts(self, i: int) -> list[int]:
        """Return where each array of a tree begins in its buffer."""
        at, starts = dict.fromkeys(self.lengths, 0), []
        for a in jax.tree.leaves(self.trees[i]):
            starts.append(at[_dtype_name(a)])
            at[_dtype_name(a)] += math.prod(a.shape)
        return starts

    def unpack(self, i: int, buffers: Mapping[str, jax.Array]) -> Any:
        """Return the tree that was packed, in the buffers' dtypes."""
        treedef, starts = jax.tree.structure(self.trees[i]), self.starts(i)
        take = lambda a, start: buffers[_dtype_name(a)][start : start + math.prod(a.shape)]
        pairs = zip(jax.tree.leaves(self.trees[i]), starts, strict=True)
        return treedef.unflatten([take(a, start).reshape(a.shape) for a, start in pairs])


class Location(NamedTuple):
    """The location of a parameter: its stored array, its row, and its start in that row."""

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
        """The packing of each virtual stage's row."""
        stage_trees = [
            {path: like for number in numbers for path, like in self.layers[number].items()}
            for numbers in self.arrangement.stage_layers
        ]
        return Packing(stage_trees, self.multiple)

    @property
    def shapes(self) -> Flat:
        """Shapes and dtypes of the stored arrays, by path."""
        num_rows = self.arrangement.virtual.size
        return {
            PACKED + name: jax.ShapeDtypeStruct((num_rows, length), name)
            for name, length in self.packing.lengths.items()
        }

    @property
    def row_bytes(self) -> int:
        """The bytes of a row, of all dtypes."""
        lengths = self.packing.lengths.items()
        return sum(length * jnp.dtype(name).itemsize for name, length in lengths)

    @property
    def param_bytes(self) -> list[int]:
        """The bytes of each virtual stage's parameters; the rest of its row is padding."""
        packing, size = self.packing, lambda name: jnp.dtype(name).itemsize
        return [
            sum(packing.num_elements(g, name) * size(name) for name in packing.lengths)
            for g in range(len(packing.trees))
        ]

    @cached_property
    def locations(self) -> dict[str, Location]:
        """The location of each parameter, by path, stage after stage."""
        locations, row_of = {}, self.arrangement.virtual.reshape(-1).argsort()
        for g, tree in enumerate(self.packing.trees):
            starts = zip(jax.tree.leaves(tree), self.packing.starts(g), strict=True)
            for path, (a, start) in zip(sorted(tree), starts, strict=True):
                locations[path] = Location(PACKED + _dtype_name(a), int(row_of[g]), start, a.shape)
        return locations

    def dtypes(self, flat: Flat) -> dict[str, Any]:
        """Return the dtype of each stored array for these arrays: optimizer state may differ."""
        return {location.array: flat[path].dtype for path, location in self.locations.items()}

    def pack_row(self, g: int, flat: Flat, dtypes: Mapping[str, Any] | None = None) -> Flat:
        """Return a virtual stage's row of each stored array."""
        tree = {path: flat[path] for path in self.packing.trees[g]}
        return {
            PACKED + name: buffer for name, buffer in self.packing.pack(g, tree, dtypes).items()
        }

    def store(self, flat: Flat) -> Flat:
        """Return the stored arrays, given the arrays of all layers."""
        dtypes = self.dtypes(flat)
        buffers = {path: jnp.zeros(x.shape, dtypes[path]) for path, x in self.shapes.items()}
        for path, (array, row, start, _) in self.locations.items():
            values = jnp.ravel(flat[path])[None]
            buffers[array] = lax.dynamic_update_slice(buffers[array], values, (row, start))
        return buffers

    def restore(self, buffers: Flat) -> Flat:
        """Return the arrays of all layers."""
        take = lambda p: buffers[p.array][p.row, p.start : p.start + math.prod(p.shape)]
        return {
            path: take(location).reshape(location.shape)
            for path, location in self.locations.items()
        }


def _dtype_name(array: Any) -> str:
    if is_random_key(array):
        raise ValueError(
            f"layers of a list hand on a random key {array.dtype}{list(array.shape)}: in a "
            "pipeline that travels in a buffer of numbers. Hand on jax.random.key_data(key), and "
            "take jax.random.wrap_key_data of it in the layer."
        )
    return jnp.dtype(array.dtype).name


ROW = 1024  # the length of a row is a multiple of it: most numbers of devices divide it


@dataclass(frozen=True, eq=False)
class StagePackedLayers(PackedLayers):
    """Packed layers, each row on its stage."""

    mesh: Mesh

    def create(self, create: Callable, seed: Index) -> Flat:
        """Return the layers of a new model; each stage creates its own and no other."""
        paths = list(self.locations)
        program = trace_flat(
            lambda seed: list(map(create(seed).__getitem__, paths)), jnp.asarray(seed)
        )
        outputs = dict(zip(paths, program.outputs, strict=True))

        def make_row(g: int, seed: Index) -> Flat:
            mine = list(self.packing.trees[g])
            arrays = program.subprogram([outputs[path] for path in mine])(seed)
            packed = self.pack_row(g, dict(zip(mine, arrays, strict=True)))
            return mark_varying(packed, {PIPE_AXIS})

        def device(seed: Index) -> Flat:
            stage, rows = lax.axis_index(PIPE_AXIS), []
            for chunk in self.arrangement.virtual.T:
                branches = [lambda seed, g=g: make_row(g, seed) for g in chunk]
                rows.append(lax.switch(stage, branches, seed))
            return {path: jnp.stack([row[path] for row in rows]) for path in self.shapes}

        specs: dict[str, Any] = {"in_specs": P(), "out_specs": P(PIPE_AXIS)}
        return jax.shard_map(device, mesh=self.mesh, **specs)(seed)


@dataclass(frozen=True, eq=False)
class Mover:
    """Stores and restores arrays on a mesh, one by one: each is full only while it is copied.

    In one program the partitioner would gather all of them at the same time.
    """

    packed: PackedLayers
    mesh: Mesh
    shardings: Mapping[str, NamedSharding]  # of the arrays returned, by path

    @property
    def locations(self) -> Mapping[str, Location]:
        """The location of each parameter."""
        return self.packed.locations

    def store(self, flat: Flat) -> Flat:
        """Return the stored arrays, given the arrays of all layers."""
        dtypes = self.packed.dtypes(flat)
        buffers = {
            path: jnp.zeros(x.shape, dtypes[path], device=self.shardings[path])
            for path, x in self.packed.shapes.items()
        }
        for path, location in self.locations.items():
            buffer = buffers[location.array]
            buffers[location.array] = _put(
                buffer, flat[path], *self._indices(location), buffer.sharding
            )
        return buffers

    def restore(self, buffers: Flat) -> Flat:
        """Return the arrays of all layers."""
        take = lambda path, p: _take(
            buffers[p.array], *self._indices(p), p.shape, self.shardings[path]
        )
        return {path: take(path, location) for path, location in self.locations.items()}

    def _indices(self, location: Location) -> tuple[int, int, int]:
        on_each = self.packed.arrangement.virtual.size // self.mesh.shape[PIPE_AXIS]
        return location.row // on_each, location.row % on_each, location.start


@partial(jax.jit, static_argnums=5, donate_argnums=0)
def _put(
    buffer: jax.Array, array: jax.Array, stage: int, row: int, start: int, sharding: NamedSharding
) -> jax.Array:
    """Return the buffer with one array written to its location."""

    def device(
        buffer: jax.Array, array: jax.Array, stage: Index, row: Index, start: Index
    ) -> jax.Array:
        changed = lax.dynamic_update_slice(buffer, array.reshape(1, -1), (row, start))
        return jnp.where(lax.axis_index(PIPE_AXIS) == stage, changed, buffer)

    in_specs, out_specs = (P(PIPE_AXIS), P(), P(), P(), P()), P(PIPE_AXIS)
    put = jax.shard_map(device, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs)
    return lax.with_sharding_constraint(put(buffer, array, stage, row, start), sharding)


@partial(jax.jit, static_argnums=(4, 5))
def _take(
    buffer: jax.Array,
    stage: int,
    row: int,
    start: int,
    shape: tuple[int, ...],
    sharding: NamedSharding,
) -> jax.Array:
    """Return one array from its location."""

    def device(buffer: jax.Array, stage: Index, row: Index, start: Index) -> jax.Array:
        own = lax.dynamic_slice(buffer, (row, start), (1, math.prod(shape)))
        own = jnp.where(lax.axis_index(PIPE_AXIS) == stage, own, jnp.zeros((), own.dtype))
        return lax.psum(own, PIPE_AXIS).reshape(shape)

    in_specs = (P(PIPE_AXIS), P(), P(), P())
    take = jax.shard_map(device, mesh=sharding.mesh, in_specs=in_specs, out_specs=P())
    return lax.with_sharding_constraint(take(buffer, stage, row, start), sharding)


def packed_layers(
    template: ModelTemplate, mesh: Mesh, arrangement: Arrangement
) -> StagePackedLayers:
    """Return the packed form of a list of layers."""
    shape = lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype)
    layers = [
        {path: shape(template.parameters[path]) for path in layer.paths}
        for layer in _check_unshared(template)
    ]
    return StagePackedLayers(arrangement, layers, math.lcm(ROW, batch_devices(mesh)), mesh)


def _check_unshared(template: ModelTemplate) -> list[Any]:
    """Return the layers; refuse a parameter that is not of one layer only."""
    layers, owners = template.layers("train"), dict[str, int]()
    for number, layer in enumerate(layers):
        for path in layer.paths:
            if path in owners or not path.startswith(LAYERS):
                other = (
                    f"layer {owners[path]}" if path in owners else "what lies outside of the layers"
                )
                raise ValueError(
                    f"layer {number} shares {path} with {other}: in a pipeline each layer's "
                    "parameters are its own, on one stage. Give it its own, or move what is "
                    "shared into embed and head."
                )
            owners[path] = number
    return layers
