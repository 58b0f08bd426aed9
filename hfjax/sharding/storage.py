"""How a state stores the layers: `ModelOrder`, `StackedLayers` or `PackedStages`.

Stacked arrays have an entry for each layer slot of each stage. The layers of a list are packed: a
row for each virtual stage, padded to the longest.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jax.typing import DTypeLike

from hfjax.parallel.adapters.model_template import LAYERS, ModelTemplate, items_of
from hfjax.parallel.layer_costs import flop_costs, parameter_costs
from hfjax.parallel.layer_order import Arrangement, arrange, balance_layers, layer_counts
from hfjax.parallel.mesh import PIPE_AXIS, STACK
from hfjax.parallel.packing import Mover, StagePackedLayers, packed_layers
from hfjax.parallel.param_specs import Array, ParamSpecs, column_specs, entries_of, num_shards
from hfjax.parallel.strategy import Strategy
from hfjax.sharding.optimizer_state import convert_layers
from hfjax.utils.paths import Flat

COLUMNS = ("parameter", "gradient", "optimizer_state")


def place_array(array: Array, dtype: DTypeLike, strategy: Strategy, mesh: Mesh) -> ParamSpecs:
    """Return the shardings of an array under a strategy."""
    small, specs = array.layer_size < strategy.smallest, column_specs(array, strategy, mesh)
    flags = {"small": small, "axes": array.axes, "takes_shards": array.takes_shards}
    return ParamSpecs(mesh, array.path, array.shape, dtype, *specs, **flags)


@dataclass(frozen=True)
class Source:
    """A model on a mesh, before its layers are assigned to stages."""

    mesh: Mesh
    strategy: Strategy
    template: ModelTemplate
    arrays: Mapping[str, Array]
    example: Any  # a batch, or its shapes; None: there is none

    def layers_per_stage(self, virtual: int, balance: str | Sequence[int]) -> list[int]:
        """Return how many layers each virtual stage gets."""
        if not self.template.is_layer_list or balance == "even" or not isinstance(balance, str):
            return layer_counts(self.number_of_layers, virtual, balance)
        if balance == "parameters":
            return balance_layers(parameter_costs(self.layers), virtual)
        x = None if self.example is None else self.embed_shapes
        requirement = "a batch, hfjax.layout(…, example=batch)"
        return balance_layers(flop_costs(self.layers, x, requirement), virtual)

    @property
    def stacked(self) -> list[str]:
        """The paths of stacked layers."""
        return [path for path, array in self.arrays.items() if array.axes[:1] == (STACK,)]

    @property
    def layers(self) -> list[Any]:
        """The modules and functions of a list of layers, with shapes in place of arrays."""
        return list(items_of(self.template.abstract("eval").layers))

    @property
    def number_of_layers(self) -> int:
        """How many layers the model has that can be assigned to stages."""
        return self.template.num_layers

    @property
    def embed_shapes(self) -> Any:
        """The shapes of the inputs of the first layer."""
        template = self.template
        shape = lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype)
        arrays = [
            {p: shape(v) for p, v in arrays_by_path.items()}
            for arrays_by_path in (template.parameters, template.variables)
        ]

        def embed(parameters: Any, variables: Any, batch: Any) -> Any:
            return template.merge(parameters, variables, "eval").embed(batch)

        return jax.eval_shape(embed, *arrays, self.example)

    def even_arrangement(self, param_specs: Mapping[str, ParamSpecs]) -> Arrangement | None:
        """Return an even, contiguous arrangement of layers, if stages shard them."""
        stages = self.mesh.shape[PIPE_AXIS]
        if self.template.is_layer_list:
            is_on_stages = stages > 1 and PIPE_AXIS in self.strategy.parameters.get(STACK, ())
        else:
            is_on_stages = any(PIPE_AXIS in p.sharded_compute for p in param_specs.values())
        if not (is_on_stages and self.template.is_layer_stack):
            return None
        stage_sizes = layer_counts(self.number_of_layers, stages)
        return arrange(stage_sizes, [(stage, 0) for stage in range(stages)])


# -- the three ways -----------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Storage(ABC):
    """How a state stores the layers of a model. `make_storage` makes one.

    Attributes:
        source: The model.
        arrangement: Of layers on stages; None: the model's order.
        packed: How a list of layers is packed into rows; None: it is not.
    """

    source: Source
    arrangement: Arrangement | None
    packed: StagePackedLayers | None

    @property
    @abstractmethod
    def order(self) -> np.ndarray | None:
        """The layer number of each stored entry, -1 where there is none."""

    @abstractmethod
    def stored_specs(self, specs: Mapping[str, ParamSpecs]) -> dict[str, ParamSpecs]:
        """Return the specs of the stored arrays, given specs of the model in any stored form."""

    @abstractmethod
    def create(self, arrays: Flat, seed: Any) -> Flat:
        """Return the parameters of a new model as they are stored; others may be among them."""

    @abstractmethod
    def to_stored_order(self, params: Flat, shardings: Mapping[str, NamedSharding]) -> Flat:
        """Return parameters in the model's order as they are stored, with these shardings."""


@final
@dataclass(frozen=True, eq=False)
class ModelOrder(Storage):
    """Layers in the model's order."""

    @property
    def order(self) -> np.ndarray | None:
        """The layers of a stack in order; None: nothing is stacked."""
        layers = [self.source.arrays[path].shape[0] for path in self.source.stacked]
        return np.arange(layers[0], dtype=np.int32) if layers else None

    def stored_specs(self, specs: Mapping[str, ParamSpecs]) -> dict[str, ParamSpecs]:
        """Return the specs of the model's own arrays."""
        if self.source.template.is_layer_list:
            return _end_specs(specs) | _layer_specs(self.source, specs)
        stack_sizes = {path: self.source.arrays[path].shape[0] for path in self.source.stacked}
        return _resize_stacks(self.source, specs, stack_sizes)

    def create(self, arrays: Flat, seed: Any) -> Flat:
        """Return the arrays unchanged."""
        return arrays

    def to_stored_order(self, params: Flat, shardings: Mapping[str, NamedSharding]) -> Flat:
        """Return parameters unchanged."""
        return params


@final
@dataclass(frozen=True, eq=False)
class StackedLayers(Storage):
    """Stacks with an entry for each layer slot of each stage."""

    arrangement: Arrangement

    @property
    def order(self) -> np.ndarray:
        """The layer number of each entry."""
        return np.asarray(self.arrangement.stored_order, np.int32)

    def stored_specs(self, specs: Mapping[str, ParamSpecs]) -> dict[str, ParamSpecs]:
        """Return the specs of stacks, and of all that is not stacked."""
        stack_sizes = dict.fromkeys(self.source.stacked, self.arrangement.stored_order.size)
        return _resize_stacks(self.source, specs, stack_sizes)

    def create(self, arrays: Flat, seed: Any) -> Flat:
        """Return the arrays with stacks in stored order."""
        return arrays | self._store_stacks({path: arrays[path] for path in self.source.stacked})

    def to_stored_order(self, params: Flat, shardings: Mapping[str, NamedSharding]) -> Flat:
        """Return parameters with stacks in stored order."""
        stacks = {path: params[path] for path in self.source.stacked}
        store_stacks = jax.jit(
            self._store_stacks, out_shardings={path: shardings[path] for path in stacks}
        )
        return params | store_stacks(stacks)

    def _store_stacks(self, stacks: Flat) -> Flat:
        return {path: self.arrangement.store(x) for path, x in stacks.items()}


@final
@dataclass(frozen=True, eq=False)
class PackedStages(Storage):
    """A row for each virtual stage, filled with the parameters of its layers."""

    arrangement: Arrangement
    packed: StagePackedLayers

    @property
    def order(self) -> np.ndarray:
        """The layer numbers of each row: [rows, most layers]."""
        order = self.arrangement.order
        return np.asarray(order.reshape(-1, order.shape[-1]), np.int32)

    def stored_specs(self, specs: Mapping[str, ParamSpecs]) -> dict[str, ParamSpecs]:
        """Return the specs of the rows, and of embed and head."""
        source, packed_specs = self.source, {}
        for path, like in self.packed.shapes.items():
            if path in specs:  # its own specs, the user's perhaps
                packed_specs[path] = replace(specs[path], shape=like.shape)
            else:
                array = Array(path, like.shape, (STACK, None))
                packed_specs[path] = place_array(array, like.dtype, source.strategy, source.mesh)
        return _end_specs(specs) | packed_specs

    def create(self, arrays: Flat, seed: Any) -> Flat:
        """Return the arrays together with the rows, each created on its stage."""
        return arrays | self.packed.create(self.source.template.create, seed)

    def to_stored_order(self, params: Flat, shardings: Mapping[str, NamedSharding]) -> Flat:
        """Return embed, head and the rows."""
        return convert_layers(None, Mover(self.packed, self.source.mesh, shardings), params)


def make_storage(source: Source, arrangement: Arrangement | None) -> Storage:
    """Return how a state stores layers arranged so; None: in the model's order."""
    if arrangement is None:
        return ModelOrder(source, None, None)
    if source.template.is_layer_list:
        packed = packed_layers(source.template, source.mesh, arrangement)
        return PackedStages(source, arrangement, packed)
    return StackedLayers(source, arrangement, None)


# -- specs of stored arrays ---------------------------------------------------------------


def _end_specs(param_specs: Mapping[str, ParamSpecs]) -> dict[str, ParamSpecs]:
    return {path: p for path, p in param_specs.items() if not path.startswith(LAYERS)}


def _resize_stacks(
    source: Source, param_specs: Mapping[str, ParamSpecs], stack_sizes: Mapping[str, int]
) -> dict[str, ParamSpecs]:
    """Return the specs of stacks with so many entries, and of all other parameters."""
    param_specs = dict(param_specs)
    for path, stack_size in stack_sizes.items():
        p, model_shape = param_specs[path], source.arrays[path].shape
        shape = (stack_size, *model_shape[1:])
        param_specs[path] = replace(p, shape=shape)
        if stack_size % num_shards(P(*p.parameter[:1]), source.mesh):  # only in the model's order
            param_specs[path] = replace(_split_over_stages(p, model_shape, 1), shape=shape)
    return param_specs


def _split_over_stages(p: ParamSpecs, shape: tuple[int, ...], first_dim: int) -> ParamSpecs:
    """Return the specs that shard one dimension, from `first_dim` on, over the stages."""
    size, specs = p.mesh.shape[PIPE_AXIS], {}
    for column in COLUMNS:
        entries = entries_of(getattr(p, column), len(shape))
        entries[:first_dim] = [()] * first_dim
        dims = range(first_dim, len(shape))
        free_dims = [dim for dim in dims if not entries[dim] and shape[dim] % size == 0]
        if free_dims:
            entries[free_dims[0]] = (PIPE_AXIS,)
        specs[column] = P(*entries)
    return replace(p, **specs)


def _layer_specs(source: Source, param_specs: Mapping[str, ParamSpecs]) -> dict[str, ParamSpecs]:
    """Return the specs of the layers' own arrays; stages shard them where a dimension divides."""
    on_stages = PIPE_AXIS in source.strategy.parameters.get(STACK, ())
    layers = {}
    for path, array in source.arrays.items():
        if not path.startswith(LAYERS):
            continue
        old_specs, dtype = param_specs.get(path), source.template.parameters[path].dtype
        p = old_specs or place_array(array, dtype, source.strategy, source.mesh)
        is_split = on_stages and source.mesh.shape[PIPE_AXIS] > 1 and PIPE_AXIS not in p.parameter
        layers[path] = _split_over_stages(p, array.shape, 0) if is_split else p
    return layers
