"""Runs an equation: as JAX wrote it, or without the mesh under which a model was traced."""

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from hfjax.parallel.jaxprs.model_mesh import (
    SpecRequest,
    call_or_trace,
    change_mesh,
    current_model_mesh,
    is_model_mesh,
    trace_under_mesh,
)
from hfjax.parallel.jaxprs.walk import (
    body_of,
    called_body,
    interpret_jaxpr,
    name_of,
    params_of,
    with_constants,
)
from hfjax.parallel.mesh import names_of, on_one_device
from hfjax.utils.paths import is_random_key
from hfjax.utils.trace_context import MISPLACES_SCATTERS, current_auto_axes

PLACES = frozenset(["reshard", "sharding_constraint", "device_put"])


def bind(equation: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs of an equation for these values."""
    if name_of(equation) == "name":  # as an object it holds the global shape
        return [checkpoint_name(x, params_of(equation)["name"]) for x in values]
    is_placed = has_model_mesh(equation) or _places_on_own_mesh(equation)
    run = _bind_without_mesh if is_placed else _bind
    if not (MISPLACES_SCATTERS and name_of(equation).startswith("scatter")):
        return run(equation, values)
    operands = [_unsplit_along_scatter(equation, values[0]), *values[1:]]
    return [_unsplit_along_scatter(equation, x) for x in run(equation, operands)]


def inline_calls(equation: JaxprEqn, values: Sequence, run: Callable | None = None) -> Sequence:
    """Return the outputs of an equation; of a call, those of its body, run by `run`."""
    body = called_body(equation)
    return interpret_jaxpr(*body, values, run or inline_calls) if body else bind(equation, values)


def call_on_one_device(function: Callable[[], Any]) -> Callable[[], Any]:
    """Return a function of no arguments that may place arrays, and sum over data axes."""

    def run_traced() -> Any:
        program, shapes = trace_under_mesh(jax.make_jaxpr(function, return_shape=True))
        constants = list(map(plain_constant, program.consts))
        outs = interpret_jaxpr(program.jaxpr, constants, (), inline_calls)
        return jax.tree.unflatten(jax.tree.structure(shapes), outs)

    return on_one_device(partial(call_or_trace, function, run_traced))


def has_model_mesh(equation: JaxprEqn) -> bool:
    """Return whether an equation was traced under a mesh that only the model sees."""
    mesh = equation.ctx.cur_abstract_mesh
    return is_model_mesh(mesh) and not is_model_mesh(jax.sharding.get_abstract_mesh())


def _shardings(equation: JaxprEqn) -> list[NamedSharding]:
    """Return the shardings that an equation asks for."""
    params = (x if isinstance(x, tuple) else (x,) for x in equation.params.values())
    return [x for group in params for x in group if isinstance(x, NamedSharding)]


def is_in_own_shard_map(equation: JaxprEqn) -> bool:
    """Return whether an equation names axes of a `shard_map` over the mesh that a model sees."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    axes = axes if isinstance(axes, tuple | list) else (axes,)
    mesh = equation.ctx.cur_abstract_mesh
    types = (
        dict(zip(mesh.axis_names, mesh.axis_types, strict=True)) if has_model_mesh(equation) else {}
    )
    return bool(axes) and all(types.get(axis) is AxisType.Manual for axis in axes)


def over_single_devices(equation: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs of a collective over axes of size 1: its operands, in their shapes."""
    avals: list[Any] = [v.aval for v in equation.outvars]
    if equation.primitive.name == "axis_index":
        return [np.zeros((), avals[0].dtype)]
    if equation.primitive.name == "ppermute" and (0, 0) not in equation.params["perm"]:
        return [np.zeros(aval.shape, aval.dtype) for aval in avals]
    shapes_in = [getattr(v.aval, "shape", ()) for v in equation.invars]
    if shapes_in != [aval.shape for aval in avals]:
        line = source_info_util.summarize(equation.source_info)
        raise ValueError(
            f"{line}: lax.{equation.primitive.name} with tiled=False, in a jax.shard_map over the "
            "model's own mesh: inside a step its axes have size 1. Write tiled=True."
        )
    return values


def _places_on_own_mesh(equation: JaxprEqn) -> bool:
    """Return whether an equation places an array on a mesh that the model has made itself."""
    if equation.primitive.name not in PLACES:
        return False
    current, shardings = jax.sharding.get_abstract_mesh(), _shardings(equation)
    if any(s.memory_kind == "pinned_host" for s in shardings):
        return False
    return any(getattr(s.mesh, "abstract_mesh", s.mesh) != current for s in shardings)


def _bind(equation: JaxprEqn, values: Sequence[Any], mesh: Any = None) -> Sequence[Any]:
    parameters = equation.primitive.get_bind_params(equation.params)
    functions: Iterable[Any] = ()
    if isinstance(parameters, tuple):  # (functions, parameters) before jax 0.11
        functions, parameters = parameters
    with equation.ctx.manager, nullcontext() if mesh is None else change_mesh(mesh):
        results = equation.primitive.bind(*functions, *values, **parameters)
    return results if equation.primitive.multiple_results else [results]


def _bind_without_mesh(equation: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs of an equation, constrained by the spec that the model asks for."""
    if is_in_own_shard_map(equation):
        return over_single_devices(equation, values)
    if equation.primitive.name == "shard_map" and (body := body_of(equation)):
        return interpret_jaxpr(*body, values, bind)
    values = list(map(plain_number, values))
    specs = [sharding.spec for sharding in _shardings(equation)]
    if specs and equation.primitive.name in PLACES:
        outs = values
    else:
        params = {name: _plain(x) for name, x in equation.params.items()}
        outs = _bind(equation.replace(params=params), values, jax.sharding.get_abstract_mesh())
    for spec in specs:
        outs = [_constrain(equation, x, spec) for x in outs]
    return outs


def plain_number(value: Any) -> Any:
    """Return a value; of a number in a program only its dtype, not the mesh where it was traced."""
    return value if isinstance(value, jax.Array) else np.asarray(value)


def plain_constant(value: Any) -> Any:
    """Return an array that a model closes over, without the mesh that was set as it was made."""
    is_array = isinstance(value, jax.Array) and not isinstance(value, Tracer)
    if not is_array or AxisType.Explicit not in jax.typeof(value).sharding.mesh.axis_types:
        return value
    return value if is_random_key(value) else np.asarray(value)


def _plain(param: Any) -> Any:
    """Return a parameter of an equation without the model's mesh, in the programs that it holds."""
    if isinstance(param, NamedSharding):
        return None
    if hasattr(param, "axis_names") and is_model_mesh(param):
        return jax.sharding.get_abstract_mesh()
    if hasattr(getattr(param, "jaxpr", param), "eqns"):
        jaxpr, constants = with_constants(param)
        run = lambda *values: interpret_jaxpr(jaxpr, constants, values, bind)
        avals: list[Any] = [v.aval for v in jaxpr.invars]
        program = jax.make_jaxpr(run)(
            *(jax.ShapeDtypeStruct(x.shape, x.dtype, weak_type=x.weak_type) for x in avals)
        )
        return program if hasattr(param, "jaxpr") else program.jaxpr
    if isinstance(param, tuple | list):
        items = list(map(_plain, param))
        return type(param)(*items) if hasattr(param, "_fields") else type(param)(items)
    return param


def _constrain(equation: JaxprEqn, x: Any, spec: P) -> Any:
    """Return a result with the constraint that a spec is over the axes of XLA's partitioner."""
    mesh, model_mesh = jax.sharding.get_abstract_mesh(), current_model_mesh()
    constraint = model_mesh.constraint(spec)
    line = source_info_util.summarize(equation.source_info)
    aval: Any = equation.outvars[0].aval
    entries, shape = names_of(spec), _show(aval)
    if any(entries[x.ndim :]):
        raise ValueError(f"{line}: {spec} has {len(entries)} entries, and the array is {shape}.")
    if any(entries):
        model_mesh.requests[SpecRequest(line, spec, constraint)] = None
    for dim, axes in enumerate([] if constraint is None else names_of(constraint)):
        size = math.prod(mesh.shape[axis] for axis in axes)
        if x.shape[dim] % size:
            raise ValueError(
                f"{line}: {spec} splits dimension {dim} of an array of {shape} over "
                f"{', '.join(axes)} of size {size}, which does not divide it. Leave that entry "
                f"out, or take {', '.join(axes)} of another size."
            )
    return x if constraint is None else jax.lax.with_sharding_constraint(x, constraint)


def _unsplit_along_scatter(equation: JaxprEqn, x: Any) -> Any:
    """Return an array that XLA's partitioner does not split along the dimensions of a scatter."""
    if not current_auto_axes():
        return x
    dims = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
    spec = P(*(None if dim in dims else P.UNCONSTRAINED for dim in range(x.ndim)))
    return jax.lax.with_sharding_constraint(x, spec)


def _show(x: Any) -> str:
    return f"{x.dtype.name}[{', '.join(map(str, x.shape))}]"
