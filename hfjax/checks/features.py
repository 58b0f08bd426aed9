"""What a user can turn on: how it is detected, how it was written, and the least that turns it on.

`hfjax.checks.feature_conflicts` says which of them go together.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh

from hfjax.optimizers.transforms import Averaged, ema, master_weights, stored_dtype
from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import (
    EXPERT_AXES,
    PIPE_AXIS,
    SEQUENCE_AXES,
    auto_axes,
    grid_axes,
    in_use,
)
from hfjax.parallel.precision.dtypes import PRECISIONS
from hfjax.parallel.remat import Remat
from hfjax.parallel.schedules.named import Schedule
from hfjax.parallel.schedules.table import Table
from hfjax.parallel.settings import KernelChoices
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

UserText = Callable[[Layout, Execution], str | None]

# Features with a long name, by which code finds an entry.
NOT_ELEMENT_BY_ELEMENT = "optimizer not element by element"
NOT_IN_PARTS = "model not in three parts"


class Feature(NamedTuple):
    """Something that a user can turn on: how it is detected, and the least that turns it on.

    Attributes:
        user_text: (layout, execution) -> how it was written, None if it is not used. None in place
            of the function: only a trial or a trace can tell.
        execution: Fields of Execution.
        strategy: A strategy that has it.
        mesh: Sizes of axes.
        optimizer: Function of another optimizer that returns one with it.
        freeze: The pattern of frozen parameters.
        model: What kind of model it is, in a word.
        needs: Features that are used where this one is: what refuses them refuses this one.
    """

    user_text: UserText | None
    execution: Mapping[str, Any] = {}
    strategy: Strategy | None = None
    mesh: Mapping[str, int] = {}
    optimizer: Callable | None = None
    freeze: str = ""
    model: str = ""
    needs: tuple[str, ...] = ()


# -- how each was written -----------------------------------------------------------------------


def _text_of_field(name: str, default: Any) -> UserText:
    """Return how a field of the execution was written."""

    def user_text(_: Layout, execution: Execution) -> str | None:
        value = getattr(execution, name)
        return None if value == default else f"{name}={_quoted(value)}"

    return user_text


def _quoted(value: Any) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def _precision_text(_: Layout, execution: Execution) -> str | None:
    names = {value: repr(name).replace("'", '"') for name, value in PRECISIONS.items()}
    precision = execution.precision
    return (
        None
        if precision == PRECISIONS["stored"]
        else f"precision={names.get(precision, precision)}"
    )


def _remat_text(_: Layout, execution: Execution) -> str | None:
    remat = execution.remat
    options = {
        "every": remat.every > 1 and f"every:{remat.every}",
        "group": remat.group > 1 and f"group:{remat.group}",
        "names": remat.names and f"names:{','.join(remat.names)}",
    }
    option = next(filter(None, options.values()), remat.what)
    return None if option == "none" else f"remat={_quoted(option)}"


def _remat_text_if(condition: Callable[[Remat], bool]) -> UserText:
    return lambda layout, run: _remat_text(layout, run) if condition(run.remat) else None


def _offload_text(_: Layout, execution: Execution) -> str | None:
    offload = execution.offload
    if offload is None:
        return None
    option = f"names:{','.join(offload.names)}" if offload.names else "dots"
    return f"offload={offload.ratio if offload.ratio is not None else _quoted(option)}"


def _kernels_text(_: Layout, execution: Execution) -> str | None:
    kernels = execution.kernels
    choice = dict(kernels.named) | {"*": kernels.rest} if kernels.named else kernels.rest
    return None if kernels == KernelChoices() else f"kernels={_quoted(choice)}"


def _schedule_text(layout: Layout, execution: Execution) -> str | None:
    stages = layout.mesh.shape[PIPE_AXIS]
    if execution.schedule is not None:
        return f"schedule {execution.schedule.name}"
    return f"pipe={stages}" if stages > 1 else None


def _table_text_if(condition: Callable[[Table], bool]) -> UserText:
    def user_text(layout: Layout, execution: Execution) -> str | None:
        schedule, stages = execution.schedule, layout.mesh.shape[PIPE_AXIS]
        is_match = schedule is not None and condition(schedule.table(stages))
        return _schedule_text(layout, execution) if is_match else None

    return user_text


def _branches_text(layout: Layout, execution: Execution) -> str | None:
    schedule, stages = execution.schedule, layout.mesh.shape[PIPE_AXIS]
    if schedule is None or schedule.branches is not True or schedule.table(stages).branches:
        return None  # a table that needs branches has them anyway
    return f"schedule {schedule.name}, branches=True"


def _asynchronous_text(layout: Layout, execution: Execution) -> str | None:
    schedule = execution.schedule
    is_asynchronous = schedule is not None and schedule.asynchronous
    return _schedule_text(layout, execution) if is_asynchronous else None


def _split_text(column: str) -> UserText:
    """Return how a column of one parameter is sharded, of a layer's if any is."""

    def user_text(layout: Layout, execution: Execution) -> str | None:
        param_specs = sorted(
            layout.param_specs.values(), key=lambda p: not p.path.startswith(LAYERS)
        )
        split_param = next((p for p in param_specs if p.split_dims(column)), None)
        if split_param is None:
            return None
        spec_text = f"{getattr(split_param, column)} under {layout.strategy.name}"
        return f"the {column} of {split_param.path} {split_param.shape} split as {spec_text}"

    return user_text


def _axis_text(axes_of: Callable[[Mesh], Sequence[str]]) -> UserText:
    """Return the size of the first of some axes, if one is in use."""

    def user_text(layout: Layout, _: Execution) -> str | None:
        axes = axes_of(layout.mesh)
        return f"{axes[0]}={layout.mesh.shape[axes[0]]}" if axes else None

    return user_text


def _grid_text(layout: Layout, _: Execution) -> str | None:
    sizes = [f"{axis}={layout.mesh.shape[axis]}" for axis in grid_axes(layout.mesh)]
    return f"a grid of {' x '.join(sizes)}" if sizes else None


def _strategy_text_if(condition: Callable[[Layout], Any]) -> UserText:
    return lambda layout, _: f"strategy {layout.strategy.name}" if condition(layout) else None


def _ema_text(layout: Layout, _: Execution) -> str | None:
    is_average = lambda x: isinstance(x, Averaged)
    nodes = jax.tree.leaves(layout.state_shapes.optimizer, is_leaf=is_average)
    return "hfjax.optimizers.ema" if any(map(is_average, nodes)) else None


def _master_text(layout: Layout, _: Execution) -> str | None:
    return (
        None if stored_dtype(layout.optimizer, None) is None else "hfjax.optimizers.master_weights"
    )


def _freeze_text(layout: Layout, _: Execution) -> str | None:
    frozen_param = next(
        (p for p in layout.param_specs.values() if p.frozen or p.frozen_layers), None
    )
    if frozen_param is None:
        return None
    count = frozen_param.frozen_layers
    return f'freeze("{frozen_param.path}"{f", first={count}" * bool(count)})'


def _layer_list_text(layout: Layout, _: Execution) -> str | None:
    return "a list of layers" if layout.template.is_layer_list else None


def _whole_model_text(layout: Layout, _: Execution) -> str | None:
    if not layout.template.is_layer_stack:
        return "a model in one part"
    return None if layout.forward is None else "forward= of the layout"


# -- the entries --------------------------------------------------------------------------------


def _schedule_feature(name: str, user_text: UserText, *needs: str, **fields: Any) -> Feature:
    execution = {"schedule": Schedule(name, 4, **fields)}
    return Feature(user_text, execution, PIPE, {"pipe": 2}, needs=needs)


FEATURES: dict[str, Feature] = {
    "gradient_accumulation_steps": Feature(
        _text_of_field("gradient_accumulation_steps", 1), {"gradient_accumulation_steps": 2}
    ),
    "max_grad_norm": Feature(_text_of_field("max_grad_norm", None), {"max_grad_norm": 0.1}),
    "precision": Feature(_precision_text, {"precision": "bf16"}),
    "loss scale": Feature(
        lambda _, execution: (
            f"a loss scale ({execution.precision.compute or 'float16'})"
            if execution.precision.scale
            else None
        ),
        {"precision": "fp16"},
        needs=("precision",),
    ),
    "remat": Feature(_remat_text, {"remat": "full"}),
    "remat every, group": Feature(
        _remat_text_if(lambda remat: remat.unit > 1), {"remat": "every:2"}, needs=("remat",)
    ),
    "remat except_last": Feature(
        _remat_text_if(lambda remat: remat.what == "except_last"),
        {"remat": "except_last"},
        needs=("remat", "schedule"),
    ),
    "offload": Feature(_offload_text, {"offload": 0.5}),
    "reshard_after_forward=False": Feature(
        _text_of_field("reshard_after_forward", True), {"reshard_after_forward": False}
    ),
    "gradient_reduction=hierarchical": Feature(
        _text_of_field("gradient_reduction", "flat"),
        {"gradient_reduction": "hierarchical"},
        mesh={"data": 2, "fsdp": 2},
    ),
    "optimizer_in_backward": Feature(
        _text_of_field("optimizer_in_backward", False), {"optimizer_in_backward": True}
    ),
    "on_nonfinite=skip": Feature(_text_of_field("on_nonfinite", "stop"), {"on_nonfinite": "skip"}),
    "kernels": Feature(_kernels_text, {"kernels": "reference"}),
    "unroll": Feature(_text_of_field("unroll", None), {"unroll": 1}),
    "tensor_overlap_chunks": Feature(
        _text_of_field("tensor_overlap_chunks", 1), {"tensor_overlap_chunks": 2}
    ),
    "schedule": _schedule_feature("1f1b", _schedule_text),
    "schedule that splits B and W": _schedule_feature(
        "zb", _table_text_if(lambda table: table.splits_backward), "schedule"
    ),
    "schedule that branches": _schedule_feature(
        "1f1b-published", _table_text_if(lambda table: bool(table.branches)), "schedule"
    ),
    "branches=True": _schedule_feature("1f1b", _branches_text, "schedule", branches=True),
    "asynchronous schedule": _schedule_feature("pipedream", _asynchronous_text, "schedule"),
    "ZERO1": Feature(_split_text("optimizer_state"), strategy=ZERO1, mesh={"data": 2}),
    "ZERO2": Feature(_split_text("gradient"), strategy=ZERO2, mesh={"data": 2}),
    "FSDP": Feature(_split_text("parameter"), strategy=FSDP, mesh={"fsdp": 2}),
    "TENSOR": Feature(_axis_text(auto_axes), strategy=TENSOR, mesh={"tensor": 2}),
    "SEQUENCE": Feature(
        _strategy_text_if(lambda layout: "seq" in layout.strategy.activations),
        strategy=SEQUENCE,
        needs=("TENSOR",),
    ),
    "GRID": Feature(_grid_text, strategy=GRID, mesh={"row": 2, "tensor": 2}),
    "EXPERT": Feature(
        _axis_text(lambda mesh: in_use(mesh, EXPERT_AXES)),
        strategy=EXPERT,
        mesh={"expert": 2},
        model="experts",
    ),
    "CONTEXT": Feature(
        _axis_text(lambda mesh: in_use(mesh, SEQUENCE_AXES)), strategy=CONTEXT, mesh={"context": 2}
    ),
    "HOST_OPTIMIZER": Feature(
        _strategy_text_if(lambda layout: layout.host_memory.optimizer), strategy=HOST_OPTIMIZER
    ),
    "HOST_PARAMETERS": Feature(
        _strategy_text_if(lambda layout: layout.host_memory.parameters), strategy=HOST_PARAMETERS
    ),
    NOT_ELEMENT_BY_ELEMENT: Feature(None, optimizer=lambda _: optax.lamb(1e-2)),
    "hfjax.optimizers.ema": Feature(_ema_text, optimizer=lambda optimizer: ema(optimizer, 0.9)),
    "hfjax.optimizers.master_weights": Feature(_master_text, optimizer=master_weights),
    "freeze": Feature(_freeze_text, freeze="positions"),
    "list of layers": Feature(_layer_list_text, model="listed"),
    NOT_IN_PARTS: Feature(_whole_model_text, model="called"),
    "statistics that a model writes": Feature(None, model="counting"),
}


def user_text(name: str, layout: Layout, execution: Execution) -> str | None:
    """Return how the user wrote a feature, None if it is not used."""
    text_of = FEATURES[name].user_text
    return None if text_of is None else text_of(layout, execution)


def needed_features(name: str) -> list[str]:
    """Return what a feature needs, and itself.

    >>> needed_features("remat except_last")
    ['remat', 'schedule', 'remat except_last']
    """
    needed = [other for need in FEATURES[name].needs for other in needed_features(need)]
    return [*dict.fromkeys(needed), name]
