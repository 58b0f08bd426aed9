"""Packed layers on the stages of a mesh: made, stored and restored without a device holding all."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.parallel.arrangement import Arrangement
from hfjax.parallel.blueprint import LAYERS, Blueprint
from hfjax.parallel.mesh import PIPE_AXIS
from hfjax.parallel.packing import PackedLayers, Place
from hfjax.parallel.placement import batch_devices
from hfjax.parallel.program import piece
from hfjax.parallel.reduction import Flat

ROW = 1024  # the length of a row is a multiple of it: most numbers of devices divide it


@dataclass(frozen=True, eq=False)
class OnStages(PackedLayers):
    """Packed layers, each row on its stage."""

    mesh: Mesh

    def create(self, create: Callable, seed: Any) -> Flat:
        """Return the layers of a new model; each stage makes its own and no other."""
        paths = list(self.places)
        program = piece(lambda seed: list(map(create(seed).__getitem__, paths)), jnp.asarray(seed))
        outputs = dict(zip(paths, program.outputs, strict=True))

        def row(g: int, seed: Any) -> Flat:
            mine = list(self.packing.trees[g])
            made = program.part([outputs[path] for path in mine])(seed)
            held = self.row(g, dict(zip(mine, made, strict=True)))
            return lax.pcast(held, PIPE_AXIS, to="varying")

        def device(seed: Any) -> Flat:
            stage, rows = lax.axis_index(PIPE_AXIS), []
            for chunk in self.arrangement.virtual.T:
                branches = [lambda seed, g=g: row(g, seed) for g in chunk]
                rows.append(lax.switch(stage, branches, seed))
            return {path: jnp.stack([row[path] for row in rows]) for path in self.shapes}

        return self._on_devices(device, P(), P(PIPE_AXIS))(seed)

    def _on_devices(self, device: Callable, in_specs: Any, out_specs: Any) -> Callable:
        return jax.shard_map(device, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)


@dataclass(frozen=True, eq=False)
class Mover:
    """Stores and restores arrays that lie on a mesh, one by one: each is whole only while it moves.

    In one program the partitioner would gather all of them at once.
    """

    packed: PackedLayers
    mesh: Mesh
    shardings: Mapping[str, NamedSharding]  # of the arrays returned, by path

    @property
    def places(self) -> Mapping[str, Place]:
        """Where each parameter lies."""
        return self.packed.places

    def store(self, flat: Flat) -> Flat:
        """Return what is stored, from the arrays of all layers."""
        dtypes = self.packed.dtypes(flat)
        stored = {
            path: jnp.zeros(x.shape, dtypes[path], device=self.shardings[path])
            for path, x in self.packed.shapes.items()
        }
        for path, place in self.places.items():
            rows = stored[place.array]
            stored[place.array] = _put(rows, flat[path], *self._at(place), rows.sharding)
        return stored

    def restore(self, stored: Flat) -> Flat:
        """Return the arrays of all layers."""
        take = lambda path, p: _take(stored[p.array], *self._at(p), p.shape, self.shardings[path])
        return {path: take(path, place) for path, place in self.places.items()}

    def _at(self, place: Place) -> tuple[int, int, int]:
        on_each = self.packed.arrangement.virtual.size // self.mesh.shape[PIPE_AXIS]
        return place.row // on_each, place.row % on_each, place.start


@partial(jax.jit, static_argnums=5, donate_argnums=0)
def _put(rows: jax.Array, array: jax.Array, stage: int, row: int, start: int, on: NamedSharding):
    """Return the rows with one array put into its place."""

    def device(rows, array, stage, row, start):
        changed = lax.dynamic_update_slice(rows, array.reshape(1, -1), (row, start))
        return jnp.where(lax.axis_index(PIPE_AXIS) == stage, changed, rows)

    in_specs, out_specs = (P(PIPE_AXIS), P(), P(), P(), P()), P(PIPE_AXIS)
    move = jax.shard_map(device, mesh=on.mesh, in_specs=in_specs, out_specs=out_specs)
    return lax.with_sharding_constraint(move(rows, array, stage, row, start), on)


@partial(jax.jit, static_argnums=(4, 5))
def _take(
    rows: jax.Array, stage: int, row: int, start: int, shape: tuple[int, ...], on: NamedSharding
):
    """Return one array from its place."""

    def device(rows, stage, row, start):
        own = lax.dynamic_slice(rows, (row, start), (1, math.prod(shape)))
        own = jnp.where(lax.axis_index(PIPE_AXIS) == stage, own, jnp.zeros((), own.dtype))
        return lax.psum(own, PIPE_AXIS).reshape(shape)

    in_specs = (P(PIPE_AXIS), P(), P(), P())
    move = jax.shard_map(device, mesh=on.mesh, in_specs=in_specs, out_specs=P())
    return lax.with_sharding_constraint(move(rows, stage, row, start), on)


def packed_layers(blueprint: Blueprint, mesh: Mesh, arrangement: Arrangement) -> OnStages:
    """Return how the layers of a list are packed."""
    shape = lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype)
    layers = [
        {path: shape(blueprint.parameters[path]) for path in layer.paths}
        for layer in _unshared(blueprint)
    ]
    return OnStages(arrangement, layers, math.lcm(ROW, batch_devices(mesh)), mesh)


def _unshared(blueprint: Blueprint) -> list[Any]:
    """Return the layers, unless one of their parameters belongs to another part as well."""
    layers, seen = blueprint.layers("train"), dict[str, int]()
    for number, layer in enumerate(layers):
        for path in layer.paths:
            if path in seen or not path.startswith(LAYERS):
                other = f"layer {seen[path]}" if path in seen else "what lies outside of the layers"
                raise ValueError(
                    f"layer {number} shares {path} with {other}: in a pipeline each layer's "
                    "parameters are its own, on one stage. Give it its own, or move what is "
                    "shared into embed and head."
                )
            seen[path] = number
    return layers
