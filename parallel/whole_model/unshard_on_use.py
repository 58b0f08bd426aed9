"""A model's own program, in which each parameter is gathered where it is first used.

A whole model (not a layer stack) is traced as one device would run it: its parameters and its batch
are global arrays, and whatever it does with them is right. It may differentiate with respect to
parameters, add up their squares, scan over them. Then its program is run equation by equation, on
this device's examples (parallel/spmd). A parameter is gathered, once, by the first equation that
uses it; inside of a scan or of a rematerialised function it is gathered there, again for each layer
and each pass. (A layer-stack model is gathered layer by layer: layer_stack/run_layers.py.)
"""

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax

from hfjax.parallel.engine.unshard import ShardedParam
from hfjax.parallel.mesh import EXPERT_AXES
from hfjax.parallel.spmd.interpreter import eval_partitioned, global_shapes, make_context
from hfjax.parallel.spmd.partition_context import (
    CommEvent,
    PartitionContext,
    is_recording,
    trace_global,
)
from hfjax.parallel.spmd.placements import ONE_DEVICE, AxisGroup, Ungathered, is_distributed
from hfjax.parallel.spmd.rule_calls import RuleCall, keep_as_call


def unshard_on_use(
    function: Callable,
    parameters: Mapping[str, ShardedParam],
    *arguments: Any,
    group: AxisGroup = ONE_DEVICE,
    comms: list[CommEvent] | None = None,
) -> Any:
    """Return `function({path: full parameter}, *arguments)`, given stored parameters.

    Args:
        function: Of trees of global arrays.
        parameters: As this device stores them.
        arguments: Trees of arrays, and `ShardedValue`s where this device has some of the examples.
        group: The devices that have the others.
        comms: Records communication across examples.

    Returns:
        A tree of replicated arrays, of `ShardedValue` and of `PartialValue`.
    """
    full_shapes = {path: param.full_shape for path, param in parameters.items()}
    with hide_mesh():
        shapes = global_shapes(group, arguments)
        program, out_shapes = trace_global(group, function, full_shapes, *shapes)
    params = {path: _Parameter(param) for path, param in parameters.items()}
    values = jax.tree.leaves((params, arguments), is_leaf=is_distributed)
    handlers = {"make_ungathered": _Parameter, "on_sliced_params": _warn_split}
    ctx = make_context(group, [] if comms is None else comms, values, **handlers)
    outs = eval_partitioned(ctx, program.jaxpr, program.consts, values)
    return jax.tree.unflatten(jax.tree.structure(out_shapes), list(map(ctx.materialize, outs)))


def hide_mesh() -> Any:
    """Return the context in which a model sees no mesh, unless the partitioner has part of it.

    Collectives over named axes work all the same, and the kind of device stays known.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if set(getattr(mesh, "manual_axes", ())) != set(mesh.axis_names):
        return nullcontext()
    device = getattr(mesh, "abstract_device", None)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


class _Parameter(Ungathered):
    """A parameter that is gathered when an equation uses it, once."""

    def __init__(self, param: ShardedParam) -> None:
        self.param, self._full = param, None

    def unshard(self) -> jax.Array:
        """Return the full parameter."""
        if self._full is None:
            self._full = self.param.unshard()
        return self._full

    @property
    def can_slice(self) -> bool:
        """Whether its first dimension is unsharded, so that a scan may slice it."""
        plan, ndim = self.param.comm_plan, self.param.value.ndim
        return all(collective.dim != -ndim for collective in (*plan.gathers, *plan.scatters))


def _warn_split(scanned: Iterable[Any]) -> None:
    """Warn of stacks that are gathered before a scan, since the layers themselves are sharded.

    A stack of experts is none of layers.
    """
    of_experts = lambda plan: any(
        set(collective.axes) & set(EXPERT_AXES) for collective in plan.gathers
    )
    plans = [p.param.comm_plan for p in scanned if not p.can_slice]
    split = [plan for plan in plans if not of_experts(plan)]
    if split:
        rest = lambda plan: ", ".join(["None"] * (len(plan.shape) - 1))
        names = ", ".join(f'"{plan.path}": ("layers", {rest(plan)})' for plan in split)
        warnings.warn(
            f"{len(split)} stacked parameters are split along the dimension over which the model "
            "scans, so all layers are gathered before the scan. To gather them one by one, name "
            f"that dimension: hfjax.layout(…, axes={{{names}}}).",
            UserWarning,
            stacklevel=2,
        )


# -- calls that are wrapped when the program runs -----------------------------------------------


def wrap_at_run(wrap: Callable, function: Callable) -> Callable:
    """Return `wrap(function)`, of a function of trees of arrays.

    In a model that is being traced it is wrapped only when the program runs: it then gets stored
    parameters, and gathers them when and as often as it wants.
    """
    return (
        keep_as_call(partial(_wrapping_rule, wrap), function) if is_recording() else wrap(function)
    )


def _wrapping_rule(
    wrap: Callable, call: RuleCall, ctx: PartitionContext, body: Any, arguments: Any
) -> Any:
    """Return what a wrapped call returns: the rule of `wrap_at_run`."""
    is_param_or_value = lambda x: isinstance(x, ShardedParam) or is_distributed(x)

    def function(*arguments: Any) -> Any:
        inner = ctx.child()
        leaves = jax.tree.leaves(arguments, is_leaf=is_param_or_value)
        values = [_Parameter(x) if isinstance(x, ShardedParam) else x for x in leaves]
        outs = inner.run(inner, *body, values)
        return call.out_tree.unflatten(list(map(inner.materialize, outs)))

    leaves, treedef = jax.tree.flatten(arguments, is_leaf=is_distributed)
    params = [v.param if isinstance(v, _Parameter) else ctx.materialize(v) for v in leaves]
    return wrap_at_run(wrap, function)(
        *treedef.unflatten(params)
    )  # again, if another program is traced
