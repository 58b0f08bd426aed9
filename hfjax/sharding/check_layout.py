"""What `hfjax.layout` and `Layout.freeze` refuse."""

import inspect
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from hfjax.optimizers.transforms import is_optimizer
from hfjax.parallel.adapters.model_template import LAYERS, ModelTemplate
from hfjax.parallel.make_mesh import grid_2d
from hfjax.parallel.mesh import (
    AXES,
    BATCH_AXES,
    COLUMN_AXIS,
    EXPERT_AXES,
    MESH_AXES,
    ROW_AXIS,
    SEQUENCE_AXES,
    describe_mesh,
    grid_axes,
    in_use,
    size_of,
)
from hfjax.parallel.param_specs import ParamSpecs, batch_devices, entries_of
from hfjax.parallel.strategy import GRID, HSDP, Rules, Strategy, python_expression
from hfjax.utils.keywords import is_int
from hfjax.utils.renamed import MARKS

PACKED_TOGETHER = (
    "a pipeline packs the layers of a list into one row",
    "Freeze what lies outside the layers, stack them (hfjax.models.layers.stack_layers), or use no "
    "pipeline.",
)


def check_frozen(frozen: set[str], template: ModelTemplate, arrangement: Any) -> None:
    """Refuse to freeze everything, or a part of what a pipeline packs."""
    if len(frozen) == len(template.parameters):
        raise ValueError("freeze: all parameters are, and nothing would train. Use eval_step.")
    is_packed = template.is_layer_list and arrangement is not None
    if is_packed and (layers := sorted(path for path in frozen if path.startswith(LAYERS))):
        raise ValueError(
            f"freeze: {layers[0]} is in a list of layers: {'. '.join(PACKED_TOGETHER)}"
        )


def check_patterns(patterns: tuple) -> None:
    """Refuse what are no path patterns."""
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f"freeze{patterns}: patterns of paths are expected, at least one, for instance "
            'layout.freeze("tokens", "layers/*").'
        )


def first_layers(paths: set[str], first: Any, template: ModelTemplate) -> set[str]:
    """Return those of these paths that are in the first layers; refuse paths outside of layers."""
    if outside := sorted(path for path in paths if not path.startswith(LAYERS)):
        raise ValueError(
            f"freeze(…, first={first!r}): {outside[0]} is in no layer. Freeze the first layers by "
            'themselves: layout.freeze("layers/*", first=2), of a model in three parts.'
        )
    count = template.num_layers
    if not is_int(first, 1, count - 1):
        raise ValueError(
            f"freeze(…, first={first!r}): a number of layers from 1 to {count - 1} is expected; to "
            f"freeze all {count}, leave first away."
        )
    if not template.is_layer_list:
        return paths
    return paths & {path for layer in template.layers("train")[:first] for path in layer.paths}


def check_has_parameters(template: ModelTemplate) -> None:
    """Refuse a model without parameters."""
    if not template.parameters:
        raise ValueError(
            f"the model has no parameters ({len(template.variables)} other variables): there is "
            "nothing to train. What is trained is an nnx.Param, or a floating-point array of a "
            "bare tree."
        )


def check_has_examples(batch: Any) -> None:
    """Refuse a batch with something in it that has no dimension of examples."""
    for keys, x in jax.tree_util.tree_flatten_with_path(batch)[0]:
        if not getattr(x, "shape", ()):
            kind = type(x).__name__ if not hasattr(x, "shape") else "an array without dimensions"
            raise ValueError(
                f"batch_specs: batch{jax.tree_util.keystr(keys)} is {kind}: a batch is a pytree of "
                "arrays, or of their shapes, whose first dimension is that of the examples."
            )


def check_per_example_variables(template: ModelTemplate, mesh: Mesh) -> None:
    """Refuse per-example variables whose size does not divide by the devices."""
    devices = batch_devices(mesh)
    for path, variable in template.variables.items():
        if template.is_batched(path) and variable.shape[0] % devices:
            raise ValueError(
                f"{path} {tuple(variable.shape)} has an entry for each example of the batch, and "
                f"{variable.shape[0]} examples do not split over {devices} devices "
                f"({describe_mesh(mesh)}). Make the model for a multiple of {devices}."
            )


def idle_axes(param_specs: Iterable[ParamSpecs], strategy: Strategy, mesh: Mesh) -> list[str]:
    """Return mesh axes larger than 1 along which devices would repeat each other's work.

    A batch axis for arrays with a dimension of a certain name (that of experts) needs such arrays.
    """
    param_specs = list(param_specs)
    split_axes = {a for p in param_specs for entry in entries_of(p.parameter, 0) for a in entry}
    marked_axes = {
        axis for p in param_specs for axis in (*p.sharded_compute, *p.avoidable_gather_axes)
    }
    sequence_axes = {a for axes in strategy.activations.values() for a in axes}.intersection(
        SEQUENCE_AXES
    )

    def is_used(axis: str) -> bool:
        meaning = MESH_AXES[axis]
        if meaning.batch:
            return axis in marked_axes or not meaning.keeps_sharded
        return axis in sequence_axes or (
            axis in split_axes and bool(meaning.keeps_sharded or meaning.auto)
        )

    return [axis for axis in in_use(mesh, AXES) if not is_used(axis)]


def warn_gathered_experts(layout: Any) -> None:
    """Warn of experts' arrays that are all-gathered, since they are in no mixture of hfjax."""
    if message := describe_gathered_experts(layout.param_specs.values()):
        warnings.warn(message, UserWarning, stacklevel=5)


def describe_gathered_experts(param_specs: Iterable[ParamSpecs]) -> str:
    """Return which experts' arrays are gathered over the axis that shards them; "": none."""
    gathered_axes = lambda p: [axis for axis in p.avoidable_gather_axes if axis in EXPERT_AXES]
    axes_by_path = {p.path: axes for p in param_specs if (axes := gathered_axes(p))}
    if not axes_by_path:
        return ""
    axes = sorted({axis for path_axes in axes_by_path.values() for axis in path_axes})
    return (
        f"{', '.join(axes_by_path)}: split over {', '.join(axes)}, and in no mixture of hfjax. So "
        "each device gathers all experts where the model reads them, and computes with its own "
        "examples: numbers are those of one device, what is sent is that of hfjax.FSDP. For tokens "
        "to travel to the experts, make the mixture of hfjax.models.moe.MoE(…, expert=lambda rngs: "
        "your module) (docs/experts.md)."
    )


def check_arguments(model_init: Any, optimizer: Any, mesh: Any, strategy: Any) -> None:
    """Refuse arguments of the wrong kind."""
    is_wrong = {
        "model_init, a function of rngs": not callable(model_init)
        or isinstance(model_init, nnx.Module),
        "an optax optimizer": not is_optimizer(optimizer),
        "a mesh of hfjax.make_mesh or jax.make_mesh": not isinstance(mesh, Mesh),
        "a hfjax.Strategy": not isinstance(strategy, Strategy),
    }
    type_names = [type(x).__name__ for x in (model_init, optimizer, mesh, strategy)]
    for (expected, is_invalid), type_name in zip(is_wrong.items(), type_names, strict=True):
        if is_invalid:
            is_strategy_name = expected == "a hfjax.Strategy" and isinstance(strategy, str)
            hint = f" Write {python_expression(strategy)}." if is_strategy_name else ""
            raise ValueError(
                f"layout(model_init, optimizer, mesh, strategy): {expected} is expected, found "
                f"{type_name}.{hint}"
            )
    _check_takes_rngs(model_init)


def _check_takes_rngs(model_init: object) -> None:
    """Refuse a class that cannot be called with rngs alone, as model_init is."""
    if not isinstance(model_init, type):
        return
    signature, name = inspect.signature(model_init.__init__), model_init.__name__
    if not _accepts(signature, None, None):
        others = "" if _accepts(signature, None, rngs=None) else "…, "
        raise ValueError(
            f"layout(model_init, …): the class {name} cannot be called as {name}(rngs). Give a "
            f"function in its place: lambda rngs: {name}({others}rngs=rngs)."
        )


def _accepts(signature: inspect.Signature, *args: Any, **kwargs: Any) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def check_dtypes(template: ModelTemplate) -> None:
    """Refuse parameters that cannot be trained."""
    for path, param in template.parameters.items():
        if not jnp.issubdtype(param.dtype, jnp.floating):
            raise ValueError(
                f"{path} {tuple(param.shape)} is {param.dtype}: a parameter is a real "
                "floating-point array. Keep what is not trained in another nnx.Variable, and a "
                "complex one as its real and imaginary part."
            )


def check_axes_of_model(template: ModelTemplate, mesh: Mesh) -> None:
    """Refuse an axis over which a model cannot be sharded, as its `refuses` says: {axis: why}."""
    model = template.abstract("train")
    for axis, why in getattr(type(model), "refuses", {}).items():
        if mesh.shape[axis] > 1:
            raise ValueError(f"{type(model).__name__} on {describe_mesh(mesh)}: {why}")


def check_marks(template: ModelTemplate) -> None:
    """Refuse an old mark of a variable: it would have no effect."""
    for path, variable in {**template.parameters, **template.variables}.items():
        for old, new in MARKS.items():
            if isinstance(variable, nnx.Variable) and variable.get_metadata(old, None) is not None:
                raise ValueError(f"{path} is marked {old}=…, which is {new}=… now: write that.")


def check_splits(strategy: Strategy, mesh: Mesh) -> None:
    """Refuse a part of a strategy that shards nothing on this mesh; warn if there is one device.

    Each strategy that `|` joined needs an axis larger than 1 among those of its rules (that of
    the batch excepted).
    """
    _check_grid(strategy, mesh)
    splitting = [strategy_part for strategy_part in strategy.parts if strategy_part.splits_over]
    idle = [
        strategy_part for strategy_part in splitting if not in_use(mesh, strategy_part.splits_over)
    ]
    if not idle:
        return
    names = " and ".join(strategy_part.name for strategy_part in idle)
    problem = f"{strategy.name} on {describe_mesh(mesh)}: {names} would split nothing"
    if mesh.size == 1:
        message = f"{problem}: every array is whole. Leave {names} out if that is meant."
        warnings.warn(message, UserWarning, stacklevel=3)
        return
    axes = " and ".join(
        dict.fromkeys(f"{a}=1" for strategy_part in idle for a in strategy_part.splits_over)
    )
    raise ValueError(f"{problem}, because of {axes}. {_mesh_advice(strategy, mesh)}")


def _check_grid(strategy: Strategy, mesh: Mesh) -> None:
    """Refuse only some of a grid's rules, and a grid with a side of size 1."""
    columns = (
        strategy.parameters,
        strategy.gradients,
        strategy.optimizer_state,
        strategy.activations,
    )
    if not any(ROW_AXIS in axes for column in columns for axes in column.values()):
        return
    if not GRID.parameters.items() <= strategy.parameters.items():
        raise ValueError(
            f"strategy {strategy.name} splits over {ROW_AXIS} without the other rows of hfjax.GRID "
            f"({', '.join(GRID.parameters)}): a linear map needs both sides of a grid. Join all of "
            "it: hfjax.FSDP | hfjax.GRID."
        )
    sizes = {axis: mesh.shape[axis] for axis in (ROW_AXIS, COLUMN_AXIS)}
    if mesh.size > 1 and 1 in sizes.values():
        unit_axes = " and ".join(f"{axis}=1" for axis, n in sizes.items() if n == 1)
        raise ValueError(
            f"{strategy.name} on {describe_mesh(mesh)}: a grid has two sides larger than 1, and "
            f"here is {unit_axes}. {_grid_advice(strategy, mesh.size)} Of one side it is "
            "hfjax.TENSOR | hfjax.SEQUENCE, on the axis tensor alone."
        )


def _grid_advice(strategy: Strategy, devices: int) -> str:
    """Return the smallest grid for this many devices, as a program writes it."""
    factors = [n for n in range(2, devices + 1) if devices % n == 0]
    grid_shape = next(((r, c) for r in factors for c in factors if devices % (r * c) == 0), None)
    if grid_shape is None:
        return f"{devices} devices form no grid: take 4, 6, 8 …"
    num_rest = devices // math.prod(grid_shape)
    others = {"fsdp" if "*" in strategy.parameters else "data": num_rest} if num_rest > 1 else {}
    arguments = ", ".join(f"{axis}={n}" for axis, n in (others | grid_2d(*grid_shape)).items())
    return f"Write make_mesh({arguments}), for instance."


def check_grid_specs(param_specs: Mapping[str, ParamSpecs], splits: Rules) -> None:
    """Refuse parameters that are not sharded as on a grid.

    Args:
        param_specs: How each parameter is sharded.
        splits: The strategy's rules for parameters.
    """
    for path, p in param_specs.items():
        for name, axes in zip(p.axes, entries_of(p.parameter, len(p.shape)), strict=True):
            leading_axes = tuple(
                a for a in splits.get(name or "", ()) if a in (ROW_AXIS, COLUMN_AXIS)
            )
            rest = axes[len(leading_axes) :]
            if axes[: len(leading_axes)] != leading_axes or {ROW_AXIS, COLUMN_AXIS}.intersection(
                rest
            ):
                raise ValueError(
                    f"{path} {p.shape}: {p.parameter} is not how a grid splits {p.axes}: row and "
                    "tensor split what hfjax.GRID says, as the first axis of a dimension. Leave "
                    'them to the strategy; others may follow, ("row", "fsdp").'
                )


def _mesh_advice(strategy: Strategy, mesh: Mesh) -> str:
    sizes = _splitting_sizes(strategy, mesh)
    if sizes is None:
        return f"{mesh.size} devices are too few for all of {strategy.name}: leave one out."
    used_axes = [(axis, n) for axis, n in sizes.items() if n > 1]
    call = ", ".join(f"{axis}={n}" for axis, n in used_axes)
    flags = " ".join(f"--mesh.{axis} {n}" for axis, n in used_axes)
    return f"Write make_mesh({call}) (hfjax train: {flags}), or leave that strategy out."


def _splitting_sizes(strategy: Strategy, mesh: Mesh) -> dict[str, int] | None:
    """Return sizes of such a mesh on which each part shards something; None: there are none."""
    splitting = [strategy_part for strategy_part in strategy.parts if strategy_part.splits_over]
    useful_axes = {
        *BATCH_AXES,
        *(axis for strategy_part in splitting for axis in strategy_part.splits_over),
    }
    sizes = {axis: n if axis in useful_axes else 1 for axis, n in mesh.shape.items()}
    sizes["data"] *= mesh.size // math.prod(sizes.values())
    for number, strategy_part in enumerate(splitting, 1):
        kept_axes = ((axis,) for axis in grid_axes(mesh))  # a grid stays a grid
        required = [*(p.splits_over for p in splitting[:number]), *kept_axes]
        is_split = lambda s, required=required: all(size_of(axes, s) > 1 for axes in required)
        candidates = (
            sizes,
            *(_move_devices(sizes, axis, strategy_part) for axis in (*BATCH_AXES, *AXES)),
        )
        if (match := next(filter(is_split, candidates), None)) is None:
            return None
        sizes = match
    return sizes


def _move_devices(sizes: dict[str, int], axis: str, strategy_part: Strategy) -> dict[str, int]:
    """Return the sizes with devices of one axis moved to a part that has none."""
    n, target_axis = sizes[axis], min(strategy_part.splits_over, key=AXES.index)
    smallest_factor = next((factor for factor in range(2, n + 1) if n % factor == 0), 1)
    moved_factor = smallest_factor
    if {axis, target_axis} <= set(BATCH_AXES):  # batch sharded as before; of HSDP's some stay
        moved_factor = (
            n // smallest_factor if strategy_part.name == HSDP.name and n > smallest_factor else n
        )
    return {**sizes, axis: n // moved_factor, target_axis: sizes[target_axis] * moved_factor}
