"""How a state stores the layers: `AsInModel`, `Stacked` or `Packed`.

Stacked arrays have a row for each place of each stage. The layers of a list are packed: a row for
each virtual stage, padded to the longest.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike

from hfjax.parallel.adapters.model_template import LAYERS, Blueprint, items_of
from hfjax.parallel.layer_costs import flop_costs, parameter_costs
from hfjax.parallel.layer_order import Arrangement, arrange, balanced, counts
from hfjax.parallel.mesh import PIPE_AXIS, STACK
from hfjax.parallel.packing import Mover, OnStages, packed_layers
from hfjax.parallel.param_specs import Array, Placed, columns, entries_of, pieces
from hfjax.parallel.strategy import Strategy
from hfjax.sharding.optimizer_state import converted
from hfjax.utils.paths import Flat

COLUMNS = ("parameter", "gradient", "moment")


def place_array(array: Array, dtype: DTypeLike, strategy: Strategy, mesh: Mesh) -> Placed:
    """Return where a strategy puts an array."""
    small, specs = array.layer_size < strategy.smallest, columns(array, strategy, mesh)
    about = {"small": small, "axes": array.axes, "marked": array.marked}
    return Placed(mesh, array.path, array.shape, dtype, *specs, **about)


@dataclass(frozen=True)
class Source:
    """A model on a mesh, before its layers are put on stages."""

    mesh: Mesh
    strategy: Strategy
    blueprint: Blueprint
    arrays: Mapping[str, Array]
    example: Any  # a batch, or its shapes; None: there is none

    def shares(self, virtual: int, balance: str | Sequence[int]) -> list[int]:
        """Return how many layers each virtual stage gets."""
        if not self.blueprint.listed or balance == "even" or not isinstance(balance, str):
            return counts(self.number_of_layers, virtual, balance)
        if balance == "parameters":
            return balanced(parameter_costs(self.layers), virtual)
        x = None if self.example is None else self.embedded
        wanted = "a batch, hfjax.layout(…, example=batch)"
        return balanced(flop_costs(self.layers, x, wanted), virtual)

    @property
    def stacked(self) -> list[str]:
        """The paths of what stacks layers."""
        return [path for path, array in self.arrays.items() if array.axes[:1] == (STACK,)]

    @property
    def layers(self) -> list[Any]:
        """The modules and functions of a list of layers, shapes in place of arrays."""
        return list(items_of(self.blueprint.abstract("eval").layers))

    @property
    def number_of_layers(self) -> int:
        """How many layers the model has that can be cut into stages."""
        return self.blueprint.number_of_layers

    @property
    def embedded(self) -> Any:
        """The shapes of what enters the first layer."""
        plan = self.blueprint
        shape = lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype)
        arrays = [{p: shape(v) for p, v in of.items()} for of in (plan.parameters, plan.variables)]

        def embed(parameters: Any, variables: Any, batch: Any) -> Any:
            return plan.merge(parameters, variables, "eval").embed(batch)

        return jax.eval_shape(embed, *arrays, self.example)

    def on_each_stage(self, placed: Mapping[str, Placed]) -> Arrangement | None:
        """Return as many layers for each stage, one after the other, if layers lie on stages."""
        stages = self.mesh.shape[PIPE_AXIS]
        if self.blueprint.listed:
            over_stages = stages > 1 and PIPE_AXIS in self.strategy.parameters.get(STACK, ())
        else:
            over_stages = any(PIPE_AXIS in p.stays for p in placed.values())
        if not (over_stages and self.blueprint.three_parts):
            return None
        parts = counts(self.number_of_layers, stages)
        return arrange(parts, [(stage, 0) for stage in range(stages)])


# -- the three ways -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Storage(ABC):
    """How a state stores the layers of a model. `storage_of` makes one.

    Attributes:
        source: The model.
        arrangement: Of layers on stages; None: the model's own order.
        packed: How the layers of a list lie in rows; None: they are not packed.
    """

    source: Source
    arrangement: Arrangement | None
    packed: OnStages | None

    @property
    @abstractmethod
    def order(self) -> np.ndarray | None:
        """The number of the layer in each stored row, -1 where there is none."""

    @abstractmethod
    def placed(self, placed: Mapping[str, Placed]) -> dict[str, Placed]:
        """Return where what is stored lies, of a model that is placed so, stored in any way."""

    @abstractmethod
    def created(self, arrays: Flat, seed: Any) -> Flat:
        """Return the parameters of a new model as they are stored; others may be among them."""

    @abstractmethod
    def stored(self, params: Flat, on: Mapping[str, NamedSharding]) -> Flat:
        """Return parameters in the model's order as they are stored, on these shardings."""


@final
@dataclass(frozen=True, eq=False)
class AsInModel(Storage):
    """Each layer where the model has it."""

    @property
    def order(self) -> np.ndarray | None:
        """The layers of a stack in the model's order; None: nothing is stacked."""
        layers = [self.source.arrays[path].shape[0] for path in self.source.stacked]
        return np.arange(layers[0], dtype=np.int32) if layers else None

    def placed(self, placed: Mapping[str, Placed]) -> dict[str, Placed]:
        """Return where the model's own arrays lie."""
        if self.source.blueprint.listed:
            return _ends(placed) | _as_in_the_model(self.source, placed)
        rows = {path: self.source.arrays[path].shape[0] for path in self.source.stacked}
        return _with_rows(self.source, placed, rows)

    def created(self, arrays: Flat, seed: Any) -> Flat:
        """Return the arrays as they are."""
        return arrays

    def stored(self, params: Flat, on: Mapping[str, NamedSharding]) -> Flat:
        """Return parameters as they are."""
        return params


@final
@dataclass(frozen=True, eq=False)
class Stacked(Storage):
    """A row of a stack for each place of each stage."""

    arrangement: Arrangement

    @property
    def order(self) -> np.ndarray:
        """The number of the layer in each row."""
        return np.asarray(self.arrangement.rows, np.int32)

    def placed(self, placed: Mapping[str, Placed]) -> dict[str, Placed]:
        """Return where the rows lie, and all that is not stacked."""
        return _with_rows(
            self.source, placed, dict.fromkeys(self.source.stacked, self.arrangement.rows.size)
        )

    def created(self, arrays: Flat, seed: Any) -> Flat:
        """Return the arrays with the rows of stacks where they are stored."""
        return arrays | self._rows({path: arrays[path] for path in self.source.stacked})

    def stored(self, params: Flat, on: Mapping[str, NamedSharding]) -> Flat:
        """Return parameters with the rows of stacks where they are stored."""
        rows = {path: params[path] for path in self.source.stacked}
        move = jax.jit(self._rows, out_shardings={path: on[path] for path in rows})
        return params | move(rows)

    def _rows(self, stacks: Flat) -> Flat:
        return {path: self.arrangement.store(x) for path, x in stacks.items()}


@final
@dataclass(frozen=True, eq=False)
class Packed(Storage):
    """A row for each virtual stage, which the parameters of its layers fill."""

    arrangement: Arrangement
    packed: OnStages

    @property
    def order(self) -> np.ndarray:
        """The numbers of the layers in each row: [rows, most layers]."""
        order = self.arrangement.order
        return np.asarray(order.reshape(-1, order.shape[-1]), np.int32)

    def placed(self, placed: Mapping[str, Placed]) -> dict[str, Placed]:
        """Return where the rows lie, and embed and head."""
        source, rows = self.source, {}
        for path, like in self.packed.shapes.items():
            if path in placed:  # the specs that it has, the user's perhaps
                rows[path] = replace(placed[path], shape=like.shape)
            else:
                array = Array(path, like.shape, (STACK, None))
                rows[path] = place_array(array, like.dtype, source.strategy, source.mesh)
        return _ends(placed) | rows

    def created(self, arrays: Flat, seed: Any) -> Flat:
        """Return the arrays, and beside them the rows, each made on its stage."""
        return arrays | self.packed.create(self.source.blueprint.create, seed)

    def stored(self, params: Flat, on: Mapping[str, NamedSharding]) -> Flat:
        """Return embed, head and the rows."""
        return converted(None, Mover(self.packed, self.source.mesh, on), params)


def storage_of(source: Source, arrangement: Arrangement | None) -> Storage:
    """Return how a state stores layers that are arranged so; None: as the model has them."""
    if arrangement is None:
        return AsInModel(source, None, None)
    if source.blueprint.listed:
        packed = packed_layers(source.blueprint, source.mesh, arrangement)
        return Packed(source, arrangement, packed)
    return Stacked(source, arrangement, None)


# -- where arrays lie ---------------------------------------------------------------------


def _ends(placed: Mapping[str, Placed]) -> dict[str, Placed]:
    return {path: p for path, p in placed.items() if not path.startswith(LAYERS)}


def _with_rows(
    source: Source, placed: Mapping[str, Placed], stacks: Mapping[str, int]
) -> dict[str, Placed]:
    """Return the placement of stacks that have so many rows, and of all else."""
    placed = dict(placed)
    for path, rows in stacks.items():
        p, whole = placed[path], source.arrays[path].shape
        shape = (rows, *whole[1:])
        placed[path] = replace(p, shape=shape)
        if rows % pieces(P(*p.parameter[:1]), source.mesh):  # only the model's own order
            placed[path] = replace(_beside(p, whole, 1), shape=shape)
    return placed


def _beside(p: Placed, shape: tuple[int, ...], first: int) -> Placed:
    """Return the placement that splits a dimension from `first` on over the stages."""
    size, specs = p.mesh.shape[PIPE_AXIS], {}
    for column in COLUMNS:
        entries = entries_of(getattr(p, column), len(shape))
        entries[:first] = [()] * first
        dims = range(first, len(shape))
        free = [dim for dim in dims if not entries[dim] and shape[dim] % size == 0]
        if free:
            entries[free[0]] = (PIPE_AXIS,)
        specs[column] = P(*entries)
    return replace(p, **specs)


def _as_in_the_model(source: Source, placed: Mapping[str, Placed]) -> dict[str, Placed]:
    """Return the layers' own arrays; stages hold pieces of them, where one divides."""
    on_stages = PIPE_AXIS in source.strategy.parameters.get(STACK, ())
    layers = {}
    for path, array in source.arrays.items():
        if not path.startswith(LAYERS):
            continue
        known, dtype = placed.get(path), source.blueprint.parameters[path].dtype
        p = known or place_array(array, dtype, source.strategy, source.mesh)
        split = on_stages and source.mesh.shape[PIPE_AXIS] > 1 and PIPE_AXIS not in p.parameter
        layers[path] = _beside(p, array.shape, 0) if split else p
    return layers
