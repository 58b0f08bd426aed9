"""What a user can turn on: how each is seen, how it was written, and the least that turns it on.

`hfjax.checks.combinations` says which of it go together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from hfjax.optimizers.transforms import Averaged, ema, master, stored_dtype
from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import (
    EXPERT_AXES,
    PIPE_AXIS,
    SEQUENCE_AXES,
    in_use,
    partitioned,
    sides,
)
from hfjax.parallel.precision.dtypes import PRECISIONS
from hfjax.parallel.remat import Remat
from hfjax.parallel.schedules.named import Schedule
from hfjax.parallel.schedules.table import Table
from hfjax.parallel.settings import Wanted
from hfjax.parallel.strategy import (
    CONTEXT,
    EXPERT,
    FSDP,
    GRID,
    HOST_OPTIMIZER,
    HOST_PARAMETERS,
    PIPE,
    SEQUENCE,
    TENSOR,
    ZERO1,
    ZERO2,
    Strategy,
)
from hfjax.sharding.layout import Layout

AsWritten = Callable[[Layout, Execution], str | None]

# Features with a long name, that code finds a row by.
NOT_ELEMENT_BY_ELEMENT = "optimizer not element by element"
NOT_IN_PARTS = "model not in three parts"


class Feature(NamedTuple):
    """Something that a user can turn on: how it is seen, and the least that turns it on.

    Attributes:
        as_written: (layout, execution) -> how it was written, None if it is not used. None in place
            of the function: only a trial or a trace can tell.
        execution: Fields of Execution.
        strategy: What a strategy has.
        mesh: Sizes of axes.
        optimizer: What is made of another optimizer.
        freeze: The pattern of what is frozen.
        model: What it is of the model, in a word.
        needs: Features that are used where this one is: what refuses them refuses this one.
    """

    as_written: AsWritten | None
    execution: Mapping[str, Any] = {}
    strategy: Strategy | None = None
    mesh: Mapping[str, int] = {}
    optimizer: Callable | None = None
    freeze: str = ""
    model: str = ""
    needs: tuple[str, ...] = ()


# -- how each was written -----------------------------------------------------------------------


def _of(name: str, unused: Any) -> AsWritten:
    """Return how a field of the execution was written."""

    def as_written(_: Layout, execution: Execution) -> str | None:
        value = getattr(execution, name)
        return None if value == unused else f"{name}={_quoted(value)}"

    return as_written


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _precision(_: Layout, execution: Execution) -> str | None:
    words = {value: repr(word).replace("'", '"') for word, value in PRECISIONS.items()}
    given = execution.precision
    return None if given == PRECISIONS["stored"] else f"precision={words.get(given, given)}"


def _remat(_: Layout, execution: Execution) -> str | None:
    remat = execution.remat
    words = {
        "every": remat.every > 1 and f"every:{remat.every}",
        "group": remat.group > 1 and f"group:{remat.group}",
        "names": remat.names and f"names:{','.join(remat.names)}",
    }
    word = next(filter(None, words.values()), remat.what)
    return None if word == "none" else f"remat={_quoted(word)}"


def _remat_that(is_so: Callable[[Remat], bool]) -> AsWritten:
    return lambda layout, run: _remat(layout, run) if is_so(run.remat) else None


def _offload(_: Layout, execution: Execution) -> str | None:
    offload = execution.offload
    if offload is None:
        return None
    named = f"names:{','.join(offload.names)}" if offload.names else "dots"
    return f"offload={offload.ratio if offload.ratio is not None else _quoted(named)}"


def _kernels(_: Layout, execution: Execution) -> str | None:
    kernels = execution.kernels
    given = dict(kernels.named) | {"*": kernels.rest} if kernels.named else kernels.rest
    return None if kernels == Wanted() else f"kernels={_quoted(given)}"


def _schedule(layout: Layout, execution: Execution) -> str | None:
    stages = layout.mesh.shape[PIPE_AXIS]
    if execution.schedule is not None:
        return f"schedule {execution.schedule.name}"
    return f"pipe={stages}" if stages > 1 else None


def _table_that(is_so: Callable[[Table], bool]) -> AsWritten:
    def as_written(layout: Layout, execution: Execution) -> str | None:
        schedule, stages = execution.schedule, layout.mesh.shape[PIPE_AXIS]
        there = schedule is not None and is_so(schedule.table(stages))
        return _schedule(layout, execution) if there else None

    return as_written


def _branches(layout: Layout, execution: Execution) -> str | None:
    schedule, stages = execution.schedule, layout.mesh.shape[PIPE_AXIS]
    if schedule is None or schedule.branches is not True or schedule.table(stages).branches:
        return None  # a table that needs branches has them anyway
    return f"schedule {schedule.name}, branches=True"


def _asynchronous(layout: Layout, execution: Execution) -> str | None:
    schedule = execution.schedule
    there = schedule is not None and schedule.asynchronous
    return _schedule(layout, execution) if there else None


def _split(column: str) -> AsWritten:
    """Return what of a column is split: of layers, if anything of them is."""

    def as_written(layout: Layout, execution: Execution) -> str | None:
        placed = sorted(layout.placed.values(), key=lambda p: not p.path.startswith(LAYERS))
        found = next((p for p in placed if p.split_dims(column)), None)
        if found is None:
            return None
        where = f"{getattr(found, column)} under {layout.strategy.name}"
        return f"the {column} of {found.path} {found.shape} split as {where}"

    return as_written


def _axis(axes_of: Callable[[Mesh], Sequence[str]]) -> AsWritten:
    """Return the size of the first of some axes, if one is in use."""

    def as_written(layout: Layout, _: Execution) -> str | None:
        axes = axes_of(layout.mesh)
        return f"{axes[0]}={layout.mesh.shape[axes[0]]}" if axes else None

    return as_written


def _grid(layout: Layout, _: Execution) -> str | None:
    sizes = [f"{axis}={layout.mesh.shape[axis]}" for axis in sides(layout.mesh)]
    return f"a grid of {' x '.join(sizes)}" if sizes else None


def _strategy_that(is_so: Callable[[Layout], Any]) -> AsWritten:
    return lambda layout, _: f"strategy {layout.strategy.name}" if is_so(layout) else None


def _averages(layout: Layout, _: Execution) -> str | None:
    is_average = lambda x: isinstance(x, Averaged)
    kept = jax.tree.leaves(layout.state_shapes.optimizer, is_leaf=is_average)
    return "hfjax.ema" if any(map(is_average, kept)) else None


def _master(layout: Layout, _: Execution) -> str | None:
    return None if stored_dtype(layout.optimizer, None) is None else "hfjax.master"


def _frozen(layout: Layout, _: Execution) -> str | None:
    frozen = next((p for p in layout.placed.values() if p.frozen or p.still), None)
    if frozen is None:
        return None
    return f'freeze("{frozen.path}"{f", first={frozen.still}" * bool(frozen.still)})'


def _listed(layout: Layout, _: Execution) -> str | None:
    return "a list of layers" if layout.blueprint.listed else None


def _called(layout: Layout, _: Execution) -> str | None:
    if not layout.blueprint.three_parts:
        return "a model in one part"
    return None if layout.forward is None else "forward= of the layout"


# -- the rows -----------------------------------------------------------------------------------


def _scheduled(name: str, as_written: AsWritten, *needs: str, **fields: Any) -> Feature:
    execution = {"schedule": Schedule(name, 4, **fields)}
    return Feature(as_written, execution, PIPE, {"pipe": 2}, needs=needs)


FEATURES: dict[str, Feature] = {
    "accumulate": Feature(_of("accumulate", 1), {"accumulate": 2}),
    "clip": Feature(_of("clip", None), {"clip": 0.1}),
    "precision": Feature(_precision, {"precision": "bf16"}),
    "loss scale": Feature(
        lambda _, execution: (
            f"a loss scale ({execution.precision.compute or 'float16'})"
            if execution.precision.scale
            else None
        ),
        {"precision": "fp16"},
        needs=("precision",),
    ),
    "remat": Feature(_remat, {"remat": "full"}),
    "remat every, group": Feature(
        _remat_that(lambda remat: remat.unit > 1), {"remat": "every:2"}, needs=("remat",)
    ),
    "remat except_last": Feature(
        _remat_that(lambda remat: remat.what == "except_last"),
        {"remat": "except_last"},
        needs=("remat", "schedule"),
    ),
    "offload": Feature(_offload, {"offload": 0.5}),
    "reshard_after_forward=False": Feature(
        _of("reshard_after_forward", True), {"reshard_after_forward": False}
    ),
    "reduction=hierarchical": Feature(
        _of("reduction", "flat"), {"reduction": "hierarchical"}, mesh={"data": 2, "fsdp": 2}
    ),
    "optimizer_in_backward": Feature(
        _of("optimizer_in_backward", False), {"optimizer_in_backward": True}
    ),
    "nonfinite=skip": Feature(_of("nonfinite", "stop"), {"nonfinite": "skip"}),
    "kernels": Feature(_kernels, {"kernels": "reference"}),
    "unroll": Feature(_of("unroll", None), {"unroll": 1}),
    "split_rows": Feature(_of("split_rows", 1), {"split_rows": 2}),
    "schedule": _scheduled("1f1b", _schedule),
    "schedule that splits B and W": _scheduled(
        "zb", _table_that(lambda table: table.split), "schedule"
    ),
    "schedule that branches": _scheduled(
        "1f1b-published", _table_that(lambda table: bool(table.branches)), "schedule"
    ),
    "branches=True": _scheduled("1f1b", _branches, "schedule", branches=True),
    "asynchronous schedule": _scheduled("pipedream", _asynchronous, "schedule"),
    "ZERO1": Feature(_split("moment"), strategy=ZERO1, mesh={"data": 2}),
    "ZERO2": Feature(_split("gradient"), strategy=ZERO2, mesh={"data": 2}),
    "FSDP": Feature(_split("parameter"), strategy=FSDP, mesh={"fsdp": 2}),
    "TENSOR": Feature(_axis(partitioned), strategy=TENSOR, mesh={"tensor": 2}),
    "SEQUENCE": Feature(
        _strategy_that(lambda layout: "seq" in layout.strategy.activations),
        strategy=SEQUENCE,
        needs=("TENSOR",),
    ),
    "GRID": Feature(_grid, strategy=GRID, mesh={"row": 2, "tensor": 2}),
    "EXPERT": Feature(
        _axis(lambda mesh: in_use(mesh, EXPERT_AXES)),
        strategy=EXPERT,
        mesh={"expert": 2},
        model="experts",
    ),
    "CONTEXT": Feature(
        _axis(lambda mesh: in_use(mesh, SEQUENCE_AXES)), strategy=CONTEXT, mesh={"context": 2}
    ),
    "HOST_OPTIMIZER": Feature(
        _strategy_that(lambda layout: layout.hosted.optimizer), strategy=HOST_OPTIMIZER
    ),
    "HOST_PARAMETERS": Feature(
        _strategy_that(lambda layout: layout.hosted.parameters), strategy=HOST_PARAMETERS
    ),
    NOT_ELEMENT_BY_ELEMENT: Feature(None, optimizer=lambda _: optax.lamb(1e-2)),
    "hfjax.ema": Feature(_averages, optimizer=lambda optimizer: ema(optimizer, 0.9)),
    "hfjax.master": Feature(_master, optimizer=master),
    "freeze": Feature(_frozen, freeze="positions"),
    "list of layers": Feature(_listed, model="listed"),
    NOT_IN_PARTS: Feature(_called, model="called"),
    "statistics that a model writes": Feature(None, model="counting"),
}


def as_written(name: str, layout: Layout, execution: Execution) -> str | None:
    """Return how the user wrote a feature, None if it is not used."""
    of = FEATURES[name].as_written
    return None if of is None else of(layout, execution)


def lineage(name: str) -> list[str]:
    """Return what a feature needs, and itself.

    >>> lineage("remat except_last")
    ['remat', 'schedule', 'remat except_last']
    """
    above = [other for need in FEATURES[name].needs for other in lineage(need)]
    return [*dict.fromkeys(above), name]
