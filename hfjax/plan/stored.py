"""How a layout stores the layers: as the model has them, in rows of a stack, or packed.

Stacked arrays have a row for each place of each stage. The layers of a list are packed: a row for
each virtual stage, padded to the longest.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec as P
from jax.typing import DTypeLike

from hfjax.parallel.arrangement import Arrangement, arrange, balanced, counts
from hfjax.parallel.engine.blueprint import LAYERS
from hfjax.parallel.engine.layers import items_of
from hfjax.parallel.heterogeneous.layer_costs import flop_costs, parameter_costs
from hfjax.parallel.heterogeneous.packing import packed_layers
from hfjax.parallel.mesh import PIPE_AXIS, STACK
from hfjax.parallel.placement import Array, Placed, columns, entries_of, pieces
from hfjax.parallel.strategy import Strategy
from hfjax.plan.layout_like import LayoutLike


def shares(layout: LayoutLike, virtual: int, balance: str | Sequence[int]) -> list[int]:
    """Return how many layers each virtual stage gets."""
    if not layout.blueprint.listed or balance == "even" or not isinstance(balance, str):
        return counts(number_of_layers(layout), virtual, balance)
    layers = layers_of(layout)
    if balance == "parameters":
        return balanced(parameter_costs(layers), virtual)
    x = None if layout.example is None else embedded(layout)
    return balanced(flop_costs(layers, x, "a batch, hfjax.layout(…, example=batch)"), virtual)


def layers_of(layout: LayoutLike) -> list[Any]:
    """Return the modules and functions of a list of layers, shapes in place of arrays."""
    return list(items_of(layout.blueprint.abstract("eval").layers))


def embedded(layout: LayoutLike) -> Any:
    """Return the shapes of what enters the first layer."""
    plan = layout.blueprint
    shape = lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype)
    arrays = [{p: shape(v) for p, v in of.items()} for of in (plan.parameters, plan.variables)]

    def embed(parameters: Any, variables: Any, batch: Any) -> Any:
        return plan.merge(parameters, variables, "eval").embed(batch)

    return jax.eval_shape(embed, *arrays, layout.example)


COLUMNS = ("parameter", "gradient", "moment")


def place_array(array: Array, dtype: DTypeLike, strategy: Strategy, mesh: Mesh) -> Placed:
    """Return where a strategy puts an array."""
    small, specs = array.layer_size < strategy.smallest, columns(array, strategy, mesh)
    return Placed(mesh, array.path, array.shape, dtype, *specs, small=small, axes=array.axes)


def on_each_stage(layout: LayoutLike) -> Arrangement | None:
    """Return as many layers for each stage, one after the other, if layers lie on stages."""
    stages = layout.mesh.shape[PIPE_AXIS]
    if layout.blueprint.listed:
        over_stages = stages > 1 and PIPE_AXIS in layout.strategy.parameters.get(STACK, ())
    else:
        over_stages = any(PIPE_AXIS in p.stays for p in layout.placed.values())
    if not over_stages:
        return None
    parts = counts(number_of_layers(layout), stages)
    return arrange(parts, [(stage, 0) for stage in range(stages)])


def number_of_layers(layout: LayoutLike) -> int:
    """Return how many layers a model has that can be cut into stages."""
    if layout.blueprint.listed:
        return len(layout.blueprint.layers("train"))
    return next(layout.arrays[path].shape[0] for path, p in layout.placed.items() if p.stacked)


def stored(layout: LayoutLike, arrangement: Arrangement | None) -> dict[str, Placed]:
    """Return the placement of what is stored when layers are arranged so."""
    listed = layout.blueprint.listed
    return _listed(layout, arrangement) if listed else _stacked(layout, arrangement)


def _stacked(layout: LayoutLike, arrangement: Arrangement | None) -> dict[str, Placed]:
    placed = dict(layout.placed)
    for path, p in placed.items():
        if not p.stacked:
            continue
        layers, *rest = layout.arrays[path].shape
        rows = layers if arrangement is None else arrangement.rows.size
        placed[path] = replace(p, shape=(rows, *rest))
        if rows % pieces(P(*p.parameter[:1]), layout.mesh):  # only the model's own order
            placed[path] = replace(_beside(p, layout.arrays[path].shape, 1), shape=(rows, *rest))
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


def _listed(layout: LayoutLike, arrangement: Arrangement | None) -> dict[str, Placed]:
    ends = {path: p for path, p in layout.placed.items() if not path.startswith(LAYERS)}
    if arrangement is None:
        return ends | _as_in_the_model(layout)
    rows = {}
    packed = packed_layers(layout.blueprint, layout.mesh, arrangement)
    for path, like in packed.shapes.items():
        if path in layout.placed:  # the specs that it has, the user's perhaps
            rows[path] = replace(layout.placed[path], shape=like.shape)
        else:
            array = Array(path, like.shape, (STACK, None))
            rows[path] = place_array(array, like.dtype, layout.strategy, layout.mesh)
    return ends | rows


def _as_in_the_model(layout: LayoutLike) -> dict[str, Placed]:
    """Return the layers' own arrays; stages hold pieces of them, where one divides."""
    on_stages = PIPE_AXIS in layout.strategy.parameters.get(STACK, ())
    layers = {}
    for path, array in layout.arrays.items():
        if not path.startswith(LAYERS):
            continue
        known, dtype = layout.placed.get(path), layout.blueprint.parameters[path].dtype
        p = known or place_array(array, dtype, layout.strategy, layout.mesh)
        split = on_stages and layout.mesh.shape[PIPE_AXIS] > 1 and PIPE_AXIS not in p.parameter
        layers[path] = _beside(p, array.shape, 0) if split else p
    return layers
