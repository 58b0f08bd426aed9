"""Where a model's arrays lie on a mesh that is only a product of numbers: bytes, to the byte.

The rules are those of a layout (parallel/param_specs.py), applied without devices: a mesh of any
size costs a millisecond, and a side that does not divide is refused in the layout's own words.
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
from hfjax.parallel.mesh import AXES, SAMPLE_AXES, in_use, size_of
from hfjax.parallel.param_specs import Array, Placed, columns, pieces, sizes_near
from hfjax.parallel.strategy import Strategy
from hfjax.sharding.report import is_left_whole
from hfjax.utils.tables import human


class Sides(dict[str, int]):
    """The size of each axis; a mesh without devices."""

    @property
    def shape(self) -> "Sides":
        """The sizes themselves, as a mesh has them."""
        return self

    @property
    def size(self) -> int:
        """How many devices there are."""
        return math.prod(self.values())

    @classmethod
    def of(cls, **sizes: int) -> "Sides":
        """Return the sizes of all axes, 1 where none is given.

        >>> Sides.of(data=4)["tensor"]
        1
        """
        return cls({axis: sizes.get(axis, 1) for axis in AXES})

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.values()))


@dataclass(frozen=True)
class KeptArray:
    """One array of an optimizer's state: of which parameter, of which type."""

    path: str | None
    itemsize: int
    elements: int  # where it belongs to no parameter
    name: str


class Flow(NamedTuple):
    """What happens to some parameters."""

    kind: str  # fsdp, scattered, sharded moments, whole, shards; alone: nothing
    layers: bool  # whether they are of layers
    axes: tuple[str, ...]  # along which


@dataclass(frozen=True)
class Flows:
    """Elements of parameters by what happens to them."""

    elements: Mapping[Flow, int]

    def of(self, kind: str, layers: bool | None = None) -> int:
        """Return the elements of a kind."""
        inside = (True, False) if layers is None else (layers,)
        return sum(n for f, n in self.elements.items() if f.kind == kind and f.layers in inside)

    def along(self, kind: str, layers: bool) -> Iterator[tuple[tuple[str, ...], int]]:
        """Yield axes and elements of a kind."""
        for flow, size in self.elements.items():
            if flow.kind == kind and flow.layers == layers:
                yield flow.axes, size


@dataclass(frozen=True)
class ModelArrays:
    """The arrays of a model and of its optimizer's state, without a mesh."""

    arrays: tuple[Array, ...]
    dtypes: Mapping[str, Any]
    kept: tuple[KeptArray, ...]
    frozen: frozenset[str]
    others: int  # bytes of variables

    @classmethod
    def of(cls, layout: hfjax.Layout) -> "ModelArrays":
        """Return those of a layout, on whatever mesh."""
        found = []
        leaves = jax.tree_util.tree_leaves_with_path(layout.state_shapes.optimizer)
        for keys, leaf in leaves:
            placed = layout.parameter_of(keys, leaf)
            names = [str(getattr(k, "name", getattr(k, "key", ""))) for k in keys]
            name = "master" if "master" in names else "moments"
            size = leaf.dtype.itemsize
            found.append(KeptArray(placed and placed.path, size, math.prod(leaf.shape), name))
        dtypes = {path: p.dtype for path, p in layout.placed.items()}
        frozen = frozenset(path for path, p in layout.placed.items() if p.frozen)
        others = sum(
            x.size * x.dtype.itemsize for x in jax.tree.leaves(layout.state_shapes.variables)
        )
        arrays = tuple(layout.arrays[path] for path in layout.placed)
        return cls(arrays, dtypes, tuple(found), frozen, others)

    def placed(self, strategy: Strategy, sides: Sides, places: int | None = None) -> "ArraysPlaced":
        """Return where they lie; `places`: rows of stacked layers, where stages need more.

        Raises:
            ValueError: A side does not divide what it splits.
        """
        found = {}
        for array in self.arrays:
            if places is not None and array.path.startswith(LAYERS):
                array = replace(array, shape=(places, *array.shape[1:]))
            specs = columns(array, strategy, sides)  # type: ignore[arg-type]
            small = array.layer_size < strategy.smallest
            found[array.path] = Placed(
                sides,  # type: ignore[arg-type]
                array.path,
                array.shape,
                self.dtypes[array.path],
                *specs,
                small,
                array.axes,
                array.path in self.frozen,
                0,
                array.marked,
            )
        return ArraysPlaced(self, found, strategy, sides)


@dataclass(frozen=True)
class ArraysPlaced:
    """Where arrays lie, and what follows for one device."""

    model: ModelArrays
    placed: Mapping[str, Placed]
    strategy: Strategy
    sides: Sides

    def local(self, p: Placed, spec: P) -> int:
        """Return the elements of an array that a device holds, placed by a spec."""
        return math.prod(p.shape) // pieces(spec, self.sides)  # type: ignore[arg-type]

    @cached_property
    def parameters(self) -> int:
        """Bytes of parameters on a device, wherever they are kept."""
        return sum(self.local(p, p.parameter) * p.dtype.itemsize for p in self.placed.values())

    @cached_property
    def gradients(self) -> int:
        """Bytes of gradients as they accumulate."""
        return self._gradients(lambda p: p.gradient)

    @cached_property
    def scattered_gradients(self) -> int:
        """Bytes of gradients where each goes to its moments at once."""
        return self._gradients(lambda p: p.moment)

    def _gradients(self, spec: Callable[[Placed], P]) -> int:
        """Return the bytes of gradients that lie as `spec` says: at least float32."""
        trained = [p for p in self.placed.values() if not p.frozen]
        return sum(self.local(p, spec(p)) * max(p.dtype.itemsize, 4) for p in trained)

    @cached_property
    def moments(self) -> dict[str, int]:
        """Bytes of the optimizer's state by name: moments, master."""
        found = {"moments": 0, "master": 0}
        for kept in self.model.kept:
            if kept.path is None:
                found[kept.name] += kept.elements * kept.itemsize
                continue
            p = self.placed[kept.path]
            found[kept.name] += self.local(p, p.moment) * kept.itemsize
        return found

    @cached_property
    def on_host(self) -> dict[str, int]:
        """Bytes of the state that the host keeps, by what they are."""
        all_of = {"parameters": self.parameters, **self.moments}
        there = {name for name, kind in self.strategy.memory.items() if kind == "host"}
        return {name: size if name in there else 0 for name, size in all_of.items()}

    @cached_property
    def state(self) -> int:
        """Bytes of the state on the device."""
        whole = self.parameters + sum(self.moments.values()) + self.model.others
        return whole - sum(self.on_host.values())

    @property
    def left_whole(self) -> str | None:
        """Which arrays no size of the axes of `*` divides, in words; None: there is none."""
        rules = ("parameter", self.strategy.parameters), ("moment", self.strategy.moments)
        for column, axes in ((column, of.get("*", ())) for column, of in rules):
            whole = [p for p in self.placed.values() if is_left_whole(p, column, axes)]
            if whole:
                size, over = size_of(axes, self.sides), "+".join(in_use(self.sides, axes))
                bytes_there = sum(
                    self.local(p, getattr(p, column)) * p.dtype.itemsize for p in whole
                )
                near = " or ".join(map(str, sizes_near(whole, size)))
                divides = f": {near} divide them" * bool(near)
                return (
                    f"{over}={size} divides no dimension of {len(whole)} arrays, whose {column}s "
                    f"({human(bytes_there)}) every device has whole{divides}"
                )
        return None

    # -- what is sent of parameters and gradients -----------------------------------------

    @cached_property
    def gathers_layers(self) -> bool:
        """Whether devices gather parameters of layers."""
        return self.flows.of("fsdp", True) > 0

    @cached_property
    def flows(self) -> Flows:
        """What a device gathers and sums of parameters and gradients, in elements."""
        samples, found = in_use(self.sides, SAMPLE_AXES), Counter[Flow]()
        for p in self.placed.values():
            inside = p.path.startswith(LAYERS)
            tensor = [axis for _, axes in p.tensor_dims for axis in axes]
            here = math.prod(p.here) // size_of(tensor, self.sides)
            over = tuple(axis for axis in samples if axis not in p.stays)
            axes_of = lambda column, p=p, over=over: self._in_order(p, column, over)
            moved, scattered, kept = map(axes_of, ("parameter", "gradient", "moment"))
            kinds = {"fsdp": moved, "scattered": scattered, "sharded moments": kept, "whole": over}
            kind = next((name for name, axes in kinds.items() if axes), "alone")
            found[Flow(kind, inside, kinds.get(kind, ()))] += here
            left = tuple(axis for axis in over if axis not in scattered)
            if moved and left:  # shards are added over the others
                shard = here // max(size_of(scattered, self.sides), 1)
                found[Flow("shards", inside, left)] += shard
        return Flows(found)

    def _in_order(self, p: Placed, column: str, over: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes of rows over which a column splits what is moved."""
        return tuple(axis for axis in over if axis in p.split_axes(column))
