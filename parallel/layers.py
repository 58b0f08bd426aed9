"""Running a model's layers: the layer is the unit of gathering and of rematerialisation."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
from flax import nnx
from jax import lax

from hfjax.parallel.execution import Execution
from hfjax.parallel.fetch import Stored, whole

# Cheap to redo, and the way by which a gathered parameter could be saved under another name.
_MOVES = (
    "all_gather",
    "convert_element_type",
    "reshape",
    "transpose",
    "broadcast_in_dim",
    "squeeze",
    "slice",
    "name",
)


def _save_all_but_moves(prim, *_, **__) -> bool:
    return prim.name not in _MOVES


def _save_gathers(prim, *_, **__) -> bool:
    return prim.name == "all_gather"


def saving_policy(execution: Execution, gathers: bool) -> Callable | None:
    """Return what may be saved: a policy for jax.checkpoint, or None to save everything."""
    policies = jax.checkpoint_policies
    keep = gathers and not execution.reshard_after_forward
    if execution.remat == "none":
        return None if keep or not gathers else _save_all_but_moves
    named = {
        "full": policies.nothing_saveable,
        "except_last": policies.nothing_saveable,
        "dots": policies.dots_with_no_batch_dims_saveable,
    }
    policy = execution.remat if callable(execution.remat) else named[execution.remat]
    return policies.save_from_both_policies(policy, _save_gathers) if keep else policy


def is_list(layers: Any) -> bool:
    """Return whether the layers are a list of modules (else: one module of stacked arrays)."""
    return isinstance(layers, nnx.List | nnx.Sequential | list | tuple)


def items_of(layers: Any) -> Iterable[Any]:
    """Return the modules and functions of a list of layers."""
    return layers.layers if isinstance(layers, nnx.Sequential) else layers


def has_three_parts(model: Any) -> bool:
    """Return whether a model has `layers`, and methods `embed` and `head`."""
    methods = [getattr(type(model), name, None) for name in ("embed", "head")]
    return hasattr(model, "layers") and all(map(inspect.isfunction, methods))


def run_model(model: Any, batch: Any, execution: Execution, gathers: bool, platform: str) -> Any:
    """Return the outputs of a three-part model, layer by layer."""
    x, policy = model.embed(batch), saving_policy(execution, gathers)
    if is_list(model.layers):
        return model.head(_run_list(model.layers, x, policy))
    return model.head(_run_stack(model.layers, x, policy, _unroll(execution, policy, platform)))


def _unroll(execution: Execution, policy: Callable | None, platform: str) -> int | bool:
    """Return layers per turn of the scan: on a CPU all (10 % faster), if nothing is recomputed.

    Outside of a loop XLA:CPU merges what is recomputed with what it was computed from.
    """
    if execution.unroll is not None:
        return execution.unroll
    return (platform == "cpu" and policy is None) or 1


def layer_function(graph: nnx.GraphDef, policy: Callable | None, barrier: bool = True) -> Callable:
    """Return (parameters, variables, x) -> (x, variables) for one layer, rematerialised.

    The layer's parameters are fetched together, once, however often it reads them. Within a loop
    nothing merges what is recomputed with what it was computed from: a barrier against that would
    only keep the next layer's gathers from starting early.
    """

    def apply(parameters, variables, x):
        before = _raw(variables)  # merged variables are those of the state: written in place
        fetched = jax.tree.map(whole, parameters, is_leaf=lambda x: isinstance(x, Stored))
        layer = nnx.merge(graph, fetched, variables)
        x = layer(x)
        return x, _written(layer, before)

    return apply if policy is None else jax.checkpoint(apply, policy=policy, prevent_cse=barrier)


def _written(layer: nnx.Module, before: dict) -> nnx.State:
    """Return the variables that the layer has written to."""
    now = nnx.state(layer, nnx.Not(nnx.Param))
    values = _raw(now)
    flat = nnx.to_flat_state(now)
    return nnx.from_flat_state([(keys, v) for keys, v in flat if values[keys] is not before[keys]])


def _raw(state: nnx.State) -> dict:
    return {keys: variable.get_raw_value() for keys, variable in nnx.to_flat_state(state)}


def _run_stack(layers: nnx.Module, x: Any, policy: Callable | None, unroll: int | bool):
    graph, parameters, variables = nnx.split(layers, nnx.Param, ...)
    apply = layer_function(graph, policy, barrier=unroll is True or unroll != 1)
    x, variables = lax.scan(
        lambda x, layer: apply(*layer, x), x, (parameters, variables), unroll=unroll
    )
    nnx.update(layers, variables)
    return x


def _run_list(layers: Any, x: Any, policy: Callable | None) -> Any:
    for layer in items_of(layers):
        if not isinstance(layer, nnx.Module):  # a function, as nnx.Sequential may hold
            x = layer(x)
            continue
        graph, parameters, variables = nnx.split(layer, nnx.Param, ...)
        x, variables = layer_function(graph, policy)(parameters, variables, x)
        nnx.update(layer, variables)
    return x
