"""What `hfjax.layout` and `Layout.freeze` refuse."""

import inspect
import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from hfjax.optimizers.transforms import is_optimizer
from hfjax.parallel.adapters.model_template import LAYERS, Blueprint
from hfjax.parallel.make_mesh import grid_2d
from hfjax.parallel.mesh import (
    AXES,
    BATCH_AXES,
    COLUMN_AXIS,
    EXPERT_AXES,
    MEANING,
    ROW_AXIS,
    SEQUENCE_AXES,
    describe_mesh,
    in_use,
    sides,
    size_of,
)
from hfjax.parallel.param_specs import Placed, batch_devices, entries_of
from hfjax.parallel.strategy import GRID, HSDP, Rules, Strategy, written
from hfjax.utils.keywords import is_whole
from hfjax.utils.paths import nearest

PACKED_TOGETHER = (
    "a pipeline packs the layers of a list into one row",
    "Freeze what lies outside the layers, stack them (hfjax.models.layers.stacked), or use no "
    "pipeline.",
)


def check_frozen(frozen: set[str], plan: Blueprint, arrangement: Any) -> None:
    """Refuse to freeze everything, or a part of what a pipeline packs."""
    if len(frozen) == len(plan.parameters):
        raise ValueError("freeze: all parameters are, and nothing would train. Use eval_step.")
    packs = plan.listed and arrangement is not None
    if packs and (layers := sorted(path for path in frozen if path.startswith(LAYERS))):
        raise ValueError(
            f"freeze: {layers[0]} is in a list of layers: {'. '.join(PACKED_TOGETHER)}"
        )


def check_patterns(patterns: tuple) -> None:
    """Refuse what are no patterns of paths."""
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f"freeze{patterns}: patterns of paths are expected, at least one, for instance "
            'layout.freeze("tokens", "layers/*").'
        )


def first_layers(paths: set[str], first: Any, plan: Blueprint) -> set[str]:
    """Return those of these paths that belong to the first layers; refuse what belongs to none."""
    if outside := sorted(path for path in paths if not path.startswith(LAYERS)):
        raise ValueError(
            f"freeze(…, first={first!r}): {outside[0]} is in no layer. Freeze the first layers by "
            'themselves: layout.freeze("layers/*", first=2), of a model in three parts.'
        )
    count = plan.number_of_layers
    if not is_whole(first, 1, count - 1):
        raise ValueError(
            f"freeze(…, first={first!r}): a number of layers from 1 to {count - 1} is expected; to "
            f"freeze all {count}, leave first away."
        )
    if not plan.listed:
        return paths
    return paths & {path for layer in plan.layers("train")[:first] for path in layer.paths}


def check_rows(plan: Blueprint, mesh: Mesh) -> None:
    """Refuse variables with a row for each row of a batch that does not split over the devices."""
    devices = batch_devices(mesh)
    for path, template in plan.variables.items():
        if plan.of_rows(path) and template.shape[0] % devices:
            raise ValueError(
                f"{path} {tuple(template.shape)} has a row for each row of the batch, and "
                f"{template.shape[0]} rows do not split over {devices} devices "
                f"({describe_mesh(mesh)}). Make the model for a multiple of {devices}."
            )


def idle_axes(placed: Iterable[Placed], strategy: Strategy, mesh: Mesh) -> list[str]:
    """Return mesh axes larger than 1 whose devices would repeat each other's work.

    An axis of rows that is for arrays with a dimension of some name (that of experts) needs one.
    """
    placed = list(placed)
    used = {a for p in placed for entry in entries_of(p.parameter, 0) for a in entry}
    named = {axis for p in placed for axis in (*p.stays, *p.gathered_unmarked)}
    shared = {a for axes in strategy.activations.values() for a in axes}.intersection(SEQUENCE_AXES)

    def works(axis: str) -> bool:
        meaning = MEANING[axis]
        if meaning.rows:
            return axis in named or not meaning.stays
        return axis in shared or (axis in used and bool(meaning.stays or meaning.partitioner))

    return [axis for axis in in_use(mesh, AXES) if not works(axis)]


def warn_of_gathered_experts(layout: Any) -> None:
    """Warn of arrays of experts that are gathered, since they are in no mixture of hfjax."""
    if told := gathered_experts(layout.placed.values()):
        warnings.warn(told, UserWarning, stacklevel=5)


def gathered_experts(placed: Iterable[Placed]) -> str:
    """Return which arrays of experts are gathered over the axis that splits them; "": none."""
    experts = lambda p: [axis for axis in p.gathered_unmarked if axis in EXPERT_AXES]
    found = {p.path: axes for p in placed if (axes := experts(p))}
    if not found:
        return ""
    axes = sorted({axis for of in found.values() for axis in of})
    return (
        f"{', '.join(found)}: split over {', '.join(axes)}, and in no mixture of hfjax. So each "
        "device gathers all experts where the model reads them, and computes with its own rows: "
        "numbers are those of one device, what is sent is that of hfjax.FSDP. For tokens to travel "
        "to the experts, make the mixture of hfjax.models.moe.MoE(…, expert=lambda rngs: your "
        "module) (docs/experts.md)."
    )


def check_paths(axes: Mapping[str, tuple], plan: Blueprint) -> None:
    """Refuse names of axes for what is no parameter."""
    for path in axes:
        if path not in plan.parameters:
            raise ValueError(f"axes: no parameter {path!r}. {nearest(path, plan.parameters)}")


def check_arguments(model_init: Any, optimizer: Any, mesh: Any, strategy: Any) -> None:
    """Refuse arguments of the wrong kind."""
    wanted = {
        "model_init, a function of rngs": not callable(model_init)
        or isinstance(model_init, nnx.Module),
        "an optax optimizer": not is_optimizer(optimizer),
        "a mesh of hfjax.make_mesh": not isinstance(mesh, Mesh) or mesh.axis_names != AXES,
        "a hfjax.Strategy": not isinstance(strategy, Strategy),
    }
    given = [type(x).__name__ for x in (model_init, optimizer, mesh, strategy)]
    for (what, wrong), found in zip(wanted.items(), given, strict=True):
        if wrong:
            by_name = what == "a hfjax.Strategy" and isinstance(strategy, str)
            write = f" Write {written(strategy)}." if by_name else ""
            raise ValueError(
                f"layout(model_init, optimizer, mesh, strategy): {what} is expected, found {found}."
                f"{write}"
            )
    _check_takes_rngs(model_init)


def _check_takes_rngs(model_init: object) -> None:
    """Refuse a class that is not called with rngs alone, as model_init is."""
    if not isinstance(model_init, type):
        return
    takes, name = inspect.signature(model_init.__init__), model_init.__name__
    if not _binds(takes, None, None):
        others = "" if _binds(takes, None, rngs=None) else "…, "
        raise ValueError(
            f"layout(model_init, …): the class {name} cannot be called as {name}(rngs). Give a "
            f"function in its place: lambda rngs: {name}({others}rngs=rngs)."
        )


def _binds(takes: inspect.Signature, *given: Any, **named: Any) -> bool:
    try:
        takes.bind(*given, **named)
    except TypeError:
        return False
    return True


def check_dtypes(plan: Blueprint) -> None:
    """Refuse parameters that cannot be trained."""
    for path, template in plan.parameters.items():
        if not jnp.issubdtype(template.dtype, jnp.floating):
            raise ValueError(
                f"{path} {tuple(template.shape)} is {template.dtype}: a parameter is a real "
                "floating-point array. Keep what is not trained in another nnx.Variable, and a "
                "complex one as its real and imaginary part."
            )


def check_axes_of_model(plan: Blueprint, mesh: Mesh) -> None:
    """Refuse an axis that a model says it cannot be split over, by its `refuses`: {axis: why}."""
    model = plan.abstract("train")
    for axis, why in getattr(type(model), "refuses", {}).items():
        if mesh.shape[axis] > 1:
            raise ValueError(f"{type(model).__name__} on {describe_mesh(mesh)}: {why}")


def check_splits(strategy: Strategy, mesh: Mesh) -> None:
    """Refuse a part of a strategy that splits nothing on this mesh; warn where one device is all.

    Each strategy that `|` joined needs an axis larger than 1 among those of its rules (that of
    the batch aside).
    """
    _check_sides(strategy, mesh)
    needy = [part for part in strategy.parts if part.splits_over]
    idle = [part for part in needy if not in_use(mesh, part.splits_over)]
    if not idle:
        return
    names = " and ".join(part.name for part in idle)
    nothing = f"{strategy.name} on {describe_mesh(mesh)}: {names} would split nothing"
    if mesh.size == 1:
        said = f"{nothing}: every array is whole. Leave {names} out if that is meant."
        warnings.warn(said, UserWarning, stacklevel=3)
        return
    axes = " and ".join(dict.fromkeys(f"{a}=1" for part in idle for a in part.splits_over))
    raise ValueError(f"{nothing}, because of {axes}. {_advice(strategy, mesh)}")


def _check_sides(strategy: Strategy, mesh: Mesh) -> None:
    """Refuse a part of a grid's rows, and a grid that has one side only."""
    placed = (strategy.parameters, strategy.gradients, strategy.moments, strategy.activations)
    if not any(ROW_AXIS in axes for column in placed for axes in column.values()):
        return
    if not GRID.parameters.items() <= strategy.parameters.items():
        raise ValueError(
            f"strategy {strategy.name} splits over {ROW_AXIS} without the other rows of hfjax.GRID "
            f"({', '.join(GRID.parameters)}): a linear map needs both sides of a grid. Join all of "
            "it: hfjax.FSDP | hfjax.GRID."
        )
    sizes = {axis: mesh.shape[axis] for axis in (ROW_AXIS, COLUMN_AXIS)}
    if mesh.size > 1 and 1 in sizes.values():
        here = " and ".join(f"{axis}=1" for axis, n in sizes.items() if n == 1)
        raise ValueError(
            f"{strategy.name} on {describe_mesh(mesh)}: a grid has two sides larger than 1, and "
            f"here is {here}. {_advice_of_sides(strategy, mesh.size)} Of one side it is "
            "hfjax.TENSOR | hfjax.SEQUENCE, on the axis tensor alone."
        )


def _advice_of_sides(strategy: Strategy, devices: int) -> str:
    """Return the smallest sides for so many devices, as a program writes them."""
    factors = [n for n in range(2, devices + 1) if devices % n == 0]
    sides = next(((r, c) for r in factors for c in factors if devices % (r * c) == 0), None)
    if sides is None:
        return f"{devices} devices form no grid: take 4, 6, 8 …"
    rest = devices // math.prod(sides)
    others = {"fsdp" if "*" in strategy.parameters else "data": rest} if rest > 1 else {}
    written = ", ".join(f"{axis}={n}" for axis, n in (others | grid_2d(*sides)).items())
    return f"Write make_mesh({written}), for instance."


def check_on_grid(placed: Mapping[str, Placed], splits: Rules) -> None:
    """Refuse parameters that lie as no grid has them.

    Args:
        placed: Where each parameter lies.
        splits: The strategy's rules of parameters.
    """
    for path, p in placed.items():
        for name, axes in zip(p.axes, entries_of(p.parameter, len(p.shape)), strict=True):
            sides = tuple(a for a in splits.get(name or "", ()) if a in (ROW_AXIS, COLUMN_AXIS))
            rest = axes[len(sides) :]
            if axes[: len(sides)] != sides or {ROW_AXIS, COLUMN_AXIS}.intersection(rest):
                raise ValueError(
                    f"{path} {p.shape}: {p.parameter} is not how a grid splits {p.axes}: row and "
                    "tensor split what hfjax.GRID says, as the first axis of a dimension. Leave "
                    'them to the strategy; others may follow, ("row", "fsdp").'
                )


def _advice(strategy: Strategy, mesh: Mesh) -> str:
    sizes = _sizes_that_split(strategy, mesh)
    if sizes is None:
        return f"{mesh.size} devices are too few for all of {strategy.name}: leave one out."
    used = [(axis, n) for axis, n in sizes.items() if n > 1]
    call = ", ".join(f"{axis}={n}" for axis, n in used)
    flags = " ".join(f"--mesh.{axis} {n}" for axis, n in used)
    return f"Write make_mesh({call}) (hfjax train: {flags}), or leave that strategy out."


def _sizes_that_split(strategy: Strategy, mesh: Mesh) -> dict[str, int] | None:
    """Return a mesh of as many devices on which each part splits something; None: there is none."""
    needy = [part for part in strategy.parts if part.splits_over]
    useful = {*BATCH_AXES, *(axis for part in needy for axis in part.splits_over)}
    sizes = {axis: n if axis in useful else 1 for axis, n in mesh.shape.items()}
    sizes["data"] *= mesh.size // math.prod(sizes.values())
    for number, part in enumerate(needy, 1):
        stays = ((axis,) for axis in sides(mesh))  # a grid stays one
        wanted = [*(p.splits_over for p in needy[:number]), *stays]
        works = lambda s, wanted=wanted: all(size_of(axes, s) > 1 for axes in wanted)
        tried = (sizes, *(_moved(sizes, axis, part) for axis in (*BATCH_AXES, *AXES)))
        if (found := next(filter(works, tried), None)) is None:
            return None
        sizes = found
    return sizes


def _moved(sizes: dict[str, int], axis: str, part: Strategy) -> dict[str, int]:
    """Return the sizes with devices of one axis given to a part that has none."""
    n, to = sizes[axis], min(part.splits_over, key=AXES.index)
    least = next((factor for factor in range(2, n + 1) if n % factor == 0), 1)
    share = least
    if {axis, to} <= set(BATCH_AXES):  # rows are split as before; of HSDP's some stay
        share = n // least if part.name == HSDP.name and n > least else n
    return {**sizes, axis: n // share, to: sizes[to] * share}
