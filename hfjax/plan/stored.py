"""How a layout stores the layers: as the model has them, in rows of a stack, or packed.

Stacked arrays have a row for each place of each stage. The layers of a list are packed: a row for
each virtual stage, padded to the longest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec as P
from jax.typing import DTypeLike

from hfjax.parallel.arrangement import Arrangement, arrange, balanced, counts
from hfjax.parallel.engine.blueprint import LAYERS, Blueprint
from hfjax.parallel.engine.layers import items_of
from hfjax.parallel.layer_costs import flop_costs, parameter_costs
from hfjax.parallel.mesh import PIPE_AXIS, STACK
from hfjax.parallel.packing import packed_layers
from hfjax.parallel.placement import Array, Placed, columns, entries_of, pieces
from hfjax.parallel.strategy import Strategy

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
        if not over_stages:
            return None
        parts = counts(self.number_of_layers, stages)
        return arrange(parts, [(stage, 0) for stage in range(stages)])

    def stored(
        self, placed: Mapping[str, Placed], arrangement: Arrangement | None
    ) -> dict[str, Placed]:
        """Return the placement of what is stored when layers are arranged so."""
        store = _listed if self.blueprint.listed else _stacked
        return store(self, placed, arrangement)


def _stacked(
    source: Source, placed: Mapping[str, Placed], arrangement: Arrangement | None
) -> dict[str, Placed]:
    placed = dict(placed)
    for path, p in placed.items():
        if not p.stacked:
            continue
        layers, *rest = source.arrays[path].shape
        rows = layers if arrangement is None else arrangement.rows.size
        placed[path] = replace(p, shape=(rows, *rest))
        if rows % pieces(P(*p.parameter[:1]), source.mesh):  # only the model's own order
            placed[path] = replace(_beside(p, source.arrays[path].shape, 1), shape=(rows, *rest))
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


# -- packed -------------------------------------------------------------------------------


def _listed(
    source: Source, placed: Mapping[str, Placed], arrangement: Arrangement | None
) -> dict[str, Placed]:
    ends = {path: p for path, p in placed.items() if not path.startswith(LAYERS)}
    if arrangement is None:
        return ends | _as_in_the_model(source, placed)
    rows = {}
    packed = packed_layers(source.blueprint, source.mesh, arrangement)
    for path, like in packed.shapes.items():
        if path in placed:  # the specs that it has, the user's perhaps
            rows[path] = replace(placed[path], shape=like.shape)
        else:
            array = Array(path, like.shape, (STACK, None))
            rows[path] = place_array(array, like.dtype, source.strategy, source.mesh)
    return ends | rows


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
