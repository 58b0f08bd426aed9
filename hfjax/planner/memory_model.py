"""Shards a model's arrays over a mesh that is only a set of axis sizes: bytes, to the byte.

The rules are those of a layout (parallel/param_specs.py), applied without devices: a mesh of any
size costs a millisecond, and an axis that does not divide is refused in the layout's own words.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec as P

import hfjax
from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.mesh import AXES, DATA_AXES, in_use, size_of
from hfjax.parallel.param_specs import Array, ParamSpecs, num_shards, sizes_near
from hfjax.parallel.strategy import Strategy
from hfjax.sharding.host_memory import rule_of
from hfjax.sharding.report import is_large_replicated
from hfjax.sharding.storage import place_array
from hfjax.utils.tables import human


class MeshShape(dict[str, int]):
    """The size of each axis; a mesh without devices."""

    @property
    def shape(self) -> "MeshShape":
        """The sizes themselves, under the name that a mesh has for them."""
        return self

    @property
    def size(self) -> int:
        """The number of devices."""
        return math.prod(self.values())

    @classmethod
    def of(cls, **sizes: int) -> "MeshShape":
        """Return the sizes of all axes, 1 where none is given.

        >>> MeshShape.of(data=4)["tensor"]
        1
        """
        return cls({axis: sizes.get(axis, 1) for axis in AXES})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.values()))


@dataclass(frozen=True)
class OptimizerArray:
    """One array of an optimizer's state: its parameter and dtype."""

    path: str | None
    itemsize: int
    elements: int  # where it belongs to no parameter
    name: str


class Flow(NamedTuple):
    """What happens to some parameters in a step."""

    kind: str  # fsdp, scattered, sharded moments, whole, shards; alone: nothing
    layers: bool  # whether they belong to layers
    axes: tuple[str, ...]  # the axes of the collective


@dataclass(frozen=True)
class Flows:
    """Elements of parameters by what happens to them."""

    elements: Mapping[Flow, int]

    def of(self, kind: str, in_layers: bool | None = None) -> int:
        """Return the elements of a kind."""
        inside = (True, False) if in_layers is None else (in_layers,)
        return sum(n for f, n in self.elements.items() if f.kind == kind and f.layers in inside)

    def elements_by_axes(self, kind: str, in_layers: bool) -> Iterator[tuple[tuple[str, ...], int]]:
        """Yield axes and elements of a kind."""
        for flow, size in self.elements.items():
            if flow.kind == kind and flow.layers == in_layers:
                yield flow.axes, size


@dataclass(frozen=True)
class ModelArrays:
    """The arrays of a model and of its optimizer state, without a mesh."""

    arrays: tuple[Array, ...]
    dtypes: Mapping[str, Any]
    optimizer_arrays: tuple[OptimizerArray, ...]
    frozen: frozenset[str]
    others: int  # bytes of variables

    @classmethod
    def of(cls, layout: hfjax.Layout) -> "ModelArrays":
        """Return the arrays of a layout, on whatever mesh."""
        states = []
        leaves = jax.tree_util.tree_leaves_with_path(layout.state_shapes.optimizer)
        for keys, leaf in leaves:
            specs = layout.parameter_of(keys, leaf)
            path, size = specs and specs.path, leaf.dtype.itemsize
            states.append(OptimizerArray(path, size, math.prod(leaf.shape), rule_of(keys)))
        dtypes = {path: p.dtype for path, p in layout.param_specs.items()}
        frozen = frozenset(path for path, p in layout.param_specs.items() if p.frozen)
        others = sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(layout.state_shapes.variables)
        )
        arrays = tuple(layout.arrays[path] for path in layout.param_specs)
        return cls(arrays, dtypes, tuple(states), frozen, others)

    def place(
        self, strategy: Strategy, mesh: MeshShape, num_layers: int | None = None
    ) -> "ArrayPlacements":
        """Return the arrays' placements; `num_layers`: length of the stack, if stages need more.

        Raises:
            ValueError: An axis does not divide the dimension that it shards.
        """
        param_specs = {}
        for array in self.arrays:
            if num_layers is not None and array.path.startswith(LAYERS):
                array = replace(array, shape=(num_layers, *array.shape[1:]))
            p = place_array(array, self.dtypes[array.path], strategy, mesh)  # type: ignore[arg-type]
            param_specs[array.path] = replace(p, frozen=array.path in self.frozen)
        return ArrayPlacements(self, param_specs, strategy, mesh)


@dataclass(frozen=True)
class ArrayPlacements:
    """The placements of arrays, and what follows for one device."""

    model: ModelArrays
    param_specs: Mapping[str, ParamSpecs]
    strategy: Strategy
    mesh: MeshShape

    def local_size(self, p: ParamSpecs, spec: P) -> int:
        """Return the elements of an array on a device under a partition spec."""
        return math.prod(p.shape) // num_shards(spec, self.mesh)  # type: ignore[arg-type]

    @cached_property
    def parameters(self) -> int:
        """Bytes of parameters on a device, in whichever memory."""
        return sum(
            self.local_size(p, p.parameter) * p.dtype.itemsize for p in self.param_specs.values()
        )

    @cached_property
    def gradients(self) -> int:
        """Bytes of gradients as they are accumulated."""
        return self._gradient_bytes(lambda p: p.gradient)

    @cached_property
    def scattered_gradients(self) -> int:
        """Bytes of gradients if each is reduce-scattered at once to its optimizer state."""
        return self._gradient_bytes(lambda p: p.optimizer_state)

    def _gradient_bytes(self, spec: Callable[[ParamSpecs], P]) -> int:
        """Return the bytes of gradients with these partition specs, in at least float32."""
        trainable = [p for p in self.param_specs.values() if not p.frozen]
        return sum(self.local_size(p, spec(p)) * max(p.dtype.itemsize, 4) for p in trainable)

    @cached_property
    def optimizer_bytes(self) -> dict[str, int]:
        """Bytes of the optimizer state by name: moments, master."""
        sizes = {"optimizer_state": 0, "master": 0}
        for array in self.model.optimizer_arrays:
            if array.path is None:
                sizes[array.name] += array.elements * array.itemsize
                continue
            p = self.param_specs[array.path]
            sizes[array.name] += self.local_size(p, p.optimizer_state) * array.itemsize
        return sizes

    @cached_property
    def on_host(self) -> dict[str, int]:
        """Bytes of the state in host memory, by kind."""
        all_of = {"parameters": self.parameters, **self.optimizer_bytes}
        host_names = {name for name, kind in self.strategy.memory.items() if kind == "host"}
        return {name: size if name in host_names else 0 for name, size in all_of.items()}

    @cached_property
    def state(self) -> int:
        """Bytes of the state in device memory."""
        total = self.parameters + sum(self.optimizer_bytes.values()) + self.model.others
        return total - sum(self.on_host.values())

    @property
    def replication_note(self) -> str | None:
        """A message on arrays that no size of the axes of `*` divides; None: there is none."""
        rules = (
            ("parameter", self.strategy.parameters),
            ("optimizer_state", self.strategy.optimizer_state),
        )
        for column, axes in ((column, of.get("*", ())) for column, of in rules):
            replicated = [
                p for p in self.param_specs.values() if is_large_replicated(p, column, axes)
            ]
            if replicated:
                size, over = size_of(axes, self.mesh), "+".join(in_use(self.mesh, axes))
                bytes_there = sum(
                    self.local_size(p, getattr(p, column)) * p.dtype.itemsize for p in replicated
                )
                near = " or ".join(map(str, sizes_near(replicated, size)))
                divides = f": {near} divide them" * bool(near)
                return (
                    f"{over}={size} divides no dimension of {len(replicated)} arrays, whose "
                    f"{column}s ({human(bytes_there)}) every device has whole{divides}"
                )
        return None

    # -- what is sent of parameters and gradients -----------------------------------------

    @cached_property
    def gathers_layers(self) -> bool:
        """Whether devices all-gather parameters of layers."""
        return self.flows.of("fsdp", True) > 0

    @cached_property
    def flows(self) -> Flows:
        """What a device gathers and reduces of parameters and gradients, in elements."""
        data_axes, elements = in_use(self.mesh, DATA_AXES), Counter[Flow]()
        for p in self.param_specs.values():
            inside = p.path.startswith(LAYERS)
            tensor = [axis for _, axes in p.tensor_dims for axis in axes]
            size = math.prod(p.gathered_shape) // size_of(tensor, self.mesh)
            over = tuple(axis for axis in data_axes if axis not in p.sharded_compute)
            axes_of = lambda column, p=p, over=over: self._ordered_axes(p, column, over)
            p_axes, g_axes, m_axes = map(axes_of, ("parameter", "gradient", "optimizer_state"))
            kinds = {"fsdp": p_axes, "scattered": g_axes, "sharded moments": m_axes, "whole": over}
            kind = next((name for name, axes in kinds.items() if axes), "alone")
            elements[Flow(kind, inside, kinds.get(kind, ()))] += size
            left = tuple(axis for axis in over if axis not in g_axes)
            if p_axes and left:  # shards are all-reduced over the other axes
                shard = size // max(size_of(g_axes, self.mesh), 1)
                elements[Flow("shards", inside, left)] += shard
        return Flows(elements)

    def _ordered_axes(self, p: ParamSpecs, column: str, over: tuple[str, ...]) -> tuple[str, ...]:
        """Return the batch axes over which a column shards what is sent."""
        return tuple(axis for axis in over if axis in p.split_axes(column))
