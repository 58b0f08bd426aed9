"""What a step refuses before it is traced: what cannot run, or would have no effect."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from hfjax.checks.feature_conflicts import check_combinations
from hfjax.optimizers.transforms import stored_dtype
from hfjax.parallel.execution import Execution
from hfjax.parallel.extensions.kernel_dispatch.choose_kernel import check_kernels
from hfjax.parallel.mesh import (
    AXES,
    EXPERT_AXES,
    EXPERTS,
    MESH_AXES,
    PIPE_AXIS,
    describe_mesh,
    grid_axes,
    in_use,
)
from hfjax.parallel.offload.host_memory import check_has_host_memory
from hfjax.parallel.precision.by_path import PrecisionByPath, matches_path
from hfjax.sharding.check_layout import check_grid_specs, warn_gathered_experts
from hfjax.sharding.check_state import is_traced
from hfjax.sharding.layout import Layout, State
from hfjax.utils.mean import check_loss_signature
from hfjax.utils.paths import match_patterns


def check_step_arguments(layout: object, loss: object) -> None:
    """Refuse what is no layout, or no loss."""
    if not isinstance(layout, Layout) or not callable(loss):
        raise ValueError(
            f"train_step and eval_step take a layout and a loss(outputs, batch), found "
            f"{type(layout).__name__} and {type(loss).__name__}."
        )
    check_loss_signature(loss)


def check_state_shardings(layout: Layout, state: State) -> None:
    """Refuse a state that is sharded as by another layout of the model."""
    shardings = layout.shardings()
    for column in ("params", "optimizer"):
        pairs = jax.tree_util.tree_flatten_with_path(getattr(state, column))[0]
        expected = jax.tree.leaves(getattr(shardings, column))
        if len(pairs) != len(expected):  # layers that another schedule has packed
            return
        for (keys, x), sharding in zip(pairs, expected, strict=True):
            if not is_traced(x) and not _has_sharding(x, sharding):
                raise ValueError(
                    "this state was made with another layout: "
                    f"{column}{jax.tree_util.keystr(keys)} lies as {_describe_sharding(x)}, and "
                    f"this layout ({layout.strategy.name} on {describe_mesh(layout.mesh)}) has it "
                    f"as {sharding.spec}. Give train_step the layout that the state was made with, "
                    "or move the state: jax.device_put(state, layout.shardings())."
                )


def _has_sharding(x: Any, sharding: Any) -> bool:
    """Return whether an array has this sharding, on these devices."""
    own_sharding = getattr(x, "sharding", None)
    return own_sharding is not None and own_sharding.is_equivalent_to(sharding, x.ndim)


def _describe_sharding(x: Any) -> str:
    """Return the sharding of an array in readable form."""
    sharding = getattr(x, "sharding", None)
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
        if isinstance(mesh, Mesh) and mesh.axis_names == AXES:
            return f"{sharding.spec} on {describe_mesh(mesh)}"
        return f"{sharding.spec} on {dict(mesh.shape)}"
    devices = getattr(sharding, "device_set", ())
    return f"{len(devices)} devices" if len(devices) > 1 else "one array"


def check_execution(layout: Layout, execution: Execution, training: bool = False) -> None:
    """Refuse what cannot run, or would have no effect."""
    check_combinations(layout, execution)
    if idle_axes := layout.unused_axes():
        _refuse_idle(layout, idle_axes)
    if grid_axes(layout.mesh):
        check_grid_specs(layout.param_specs, layout.strategy.parameters)
    if execution.dispatch != "auto":
        _check_dispatch(layout, execution.dispatch)
    check_kernels(execution.kernels, layout.mesh.devices.flat[0])
    if isinstance(by_path := execution.precision, PrecisionByPath):
        _check_by_path(layout, by_path)
    if training:
        _check_scale(layout, execution.precision)
        _check_after_step(layout)
        warn_gathered_experts(layout)
    stages = layout.mesh.shape[PIPE_AXIS]
    if training and stages > 1 and execution.schedule is None:
        raise ValueError(
            f"{describe_mesh(layout.mesh)}: a pipe axis needs a schedule, for instance "
            f'schedule=hfjax.Schedule("1f1b", microbatches={4 * stages}).'
        )
    if execution.offload is not None:
        check_has_host_memory(layout.mesh)


def _refuse_idle(layout: Layout, idle_axes: Sequence[str]) -> None:
    """Refuse mesh axes whose devices would repeat each other's work."""
    if batch_axes := [axis for axis in idle_axes if MESH_AXES[axis].batch]:
        axis, dim_name = batch_axes[0], MESH_AXES[batch_axes[0]].keeps_sharded
        raise ValueError(
            f"mesh {describe_mesh(layout.mesh)}: no parameter stays split over {axis} under "
            f"{layout.strategy.name}. It is for arrays with a dimension named {dim_name!r} "
            + (
                "(hfjax.models.moe has such layers) and a strategy that splits it: add "
                "hfjax.EXPERT. "
                if axis in EXPERT_AXES
                else f"and a strategy that splits it: parameters={{{dim_name!r}: {axis!r}}}. "
            )
            + "To split only the batch, use data in its place."
        )
    raise ValueError(
        f"mesh {describe_mesh(layout.mesh)}: {', '.join(idle_axes)} splits neither the batch nor a "
        f"parameter under {layout.strategy.name}: its devices would repeat each other's work. "
        "Set it to 1, or add a strategy that uses it (hfjax.TENSOR uses tensor, hfjax.GRID row and "
        "tensor, hfjax.CONTEXT context, hfjax.EXPERT expert, hfjax.PIPE pipe)."
    )


def _check_dispatch(layout: Layout, dispatch: str) -> None:
    """Refuse a choice of dispatch where no tokens travel; the axis of hfjax.EXPERT may be off."""
    is_off = EXPERTS in layout.strategy.parameters and not in_use(layout.mesh, EXPERT_AXES)
    kept_axes = {axis for p in layout.param_specs.values() for axis in p.sharded_compute}
    if not is_off and not kept_axes.intersection(EXPERT_AXES):
        raise ValueError(
            f"dispatch={dispatch!r} on {describe_mesh(layout.mesh)} under {layout.strategy.name}: "
            "no tokens travel, since no mixture of hfjax.models.moe has its experts on several "
            "devices. Leave dispatch out, or take hfjax.EXPERT and make_mesh(expert=…)."
        )


def _check_by_path(layout: Layout, precision: PrecisionByPath) -> None:
    """Refuse patterns that match nothing, and those that distinguish what one row stores."""
    match_patterns([pattern for pattern, _ in precision.given], layout.template.parameters)
    experts: dict[str, set[Any]] = {}
    for path, p in layout.param_specs.items():
        if EXPERTS in p.axes:
            experts.setdefault(path.rpartition("/")[0], set()).add(precision.at(path))
    if split_paths := [path for path, precisions in experts.items() if len(precisions) > 1]:
        raise ValueError(
            f"precision by path tells the arrays of the experts {split_paths[0]} apart, which are "
            f'computed together. Name all of them: "{split_paths[0]}*".'
        )
    packed = layout.storage.packed
    if packed and (
        named_paths := [path for path in packed.locations if matches_path(precision, path)]
    ):
        raise ValueError(
            f"precision by path, and {named_paths[0]} is packed into one row with others: a "
            "pipeline of unlike layers has one precision for all layers. Name only what is outside "
            "of them."
        )


def _check_scale(layout: Layout, precision: Any) -> None:
    """Refuse float16 without a loss scale, without float32 copies, and a scale without float16."""
    half_paths = [
        path for path, p in layout.param_specs.items() if p.dtype == jnp.float16 and not p.frozen
    ]
    if half_paths and stored_dtype(layout.optimizer, None) is None:
        raise ValueError(
            f"{half_paths[0]} is stored in float16: its updates would be too small for it. Store "
            "it in float32, or keep a float32 copy: hfjax.optimizers.master_weights(optimizer)."
        )
    compute_dtypes = {
        path: precision.at(path).of(p.dtype).compute for path, p in layout.param_specs.items()
    }
    float16_paths = [path for path, dtype in compute_dtypes.items() if dtype == jnp.float16]
    if float16_paths and not precision.scale:
        raise ValueError(
            f"{float16_paths[0]} is computed in float16, which needs a loss scale: "
            'Precision(scale=hfjax.LossScale()). Or compute otherwise (precision="bf16").'
        )
    if precision.scale and not float16_paths:
        raise ValueError(
            "a loss scale, and nothing is float16: no parameter is stored or computed in it. Use "
            'Precision(compute="float16", scale=…), or leave the scale out.'
        )


def _check_after_step(layout: Layout) -> None:
    """Refuse variables that the model's own `after_step` would have to update, if it has none."""
    variables = layout.template.variables.items()
    needs_after_step = lambda v: (
        isinstance(v, nnx.Variable) and v.get_metadata("needs_after_step", False)
    )
    paths = [path for path, variable in variables if needs_after_step(variable)]
    if paths and not hasattr(layout.template.abstract("train"), "after_step"):
        raise ValueError(
            f"{paths[0]} moves once in a step (Router(bias_rate=…)), and the model has no method "
            "after_step(variables, metrics) that moves it. Give it one that returns "
            "hfjax.models.moe.after_step(variables, metrics, rate), or take bias_rate=0."
        )
