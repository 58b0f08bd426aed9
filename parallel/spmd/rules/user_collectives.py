"""Rules of what reaches out of a program: the user's collectives, and callbacks."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import DropVar, JaxprEqn

from hfjax.parallel.spmd.partition_context import CommEvent, PartitionContext, aval_of
from hfjax.parallel.spmd.placements import PartialValue, ShardedValue, local_array

Values = Sequence[Any]


def collective_axes(equation: JaxprEqn) -> tuple[Any, ...]:
    """Return the axes over which an equation communicates."""
    axes = equation.params.get("axes", equation.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, tuple | list) else (axes,)


def collective(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values | None:
    """Run a user's collective: over a partitioned axis it sees one device with the global array."""
    axes = collective_axes(equation)
    mesh_axes = tuple(axis for axis in axes if isinstance(axis, str))
    if len(mesh_axes) == len(axes):
        return _over_mesh_axes(ctx, equation, values, mesh_axes)
    dims = tuple(axis for axis in axes if not isinstance(axis, str))
    values = [_over_vmap_dims(ctx, equation, v, dims) for v in values]
    return _over_mesh_axes(ctx, equation, values, mesh_axes) if mesh_axes else values


def _over_mesh_axes(
    ctx: PartitionContext, equation: JaxprEqn, values: Values, axes: tuple[str, ...]
) -> Values | None:
    """Return the outputs of a collective over these mesh axes."""
    name = equation.primitive.name
    other_axes = tuple(a for a in axes if a not in ctx.group.axes and lax.axis_size(a) > 1)
    if not any(axis in ctx.group.axes for axis in axes):
        if name == "axis_index":
            return ctx.bind(equation, values)
        keeps_split = _keeps_split(equation, values)
        params = {"axes": axes} if "axes" in equation.params else {}
        return _over_other_axes(ctx, equation, values, **params) if keeps_split else None
    if name in _REDUCTIONS:
        ctx.comms.append(_single_device_event(ctx, equation))
        values = [ctx.replicate(v) if isinstance(v, PartialValue) else v for v in values]
        return _over_other_axes(ctx, equation, values, axes=other_axes) if other_axes else values
    return None if other_axes else _on_one_device(ctx, equation, values)


def _over_vmap_dims(
    ctx: PartitionContext, equation: JaxprEqn, value: Any, dims: tuple[int, ...]
) -> Any:
    """Return the output of a collective over dimensions: those of a `vmap` with an axis name."""
    bind = lambda x: ctx.bind(equation, [x], axes=dims)[0]
    adds = equation.primitive.name == "psum"
    if isinstance(value, ShardedValue) and value.split.dim not in dims:
        dim = value.split.dim - sum(d < value.split.dim for d in dims)
        return ShardedValue(bind(value.x), value.split.with_dim(dim))
    if adds and isinstance(value, ShardedValue | PartialValue):
        return PartialValue(bind(value.x))
    return bind(ctx.replicate(value))


def _on_one_device(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values:
    """Return what a collective other than a sum gives on one device."""
    name = equation.primitive.name
    ctx.comms.append(_single_device_event(ctx, equation))
    if values and not any(isinstance(v, ShardedValue) for v in values):
        raise ValueError(
            f"{ctx.line}: lax.{name} over {', '.join(collective_axes(equation))} of what has no "
            "examples: the model sees all examples, as on one device, so each device would be "
            "given the same. If devices hold something of their own there, run that part on each "
            "device's own examples: hfjax.per_device(function)."
        )
    if name == "axis_index":
        return [jnp.zeros((), aval_of(equation.outvars[0]).dtype)]
    if name == "ppermute":
        return values
    if name == "all_gather":
        if equation.params["tiled"]:
            return values
        dim = equation.params["all_gather_dimension"]
        return [_expand_dims(ctx, v, dim) for v in values]
    if equation.params.get("tiled", False):
        return values
    raise ValueError(
        f"{ctx.line}: lax.{name} over {', '.join(collective_axes(equation))}: the model and the "
        "loss see the examples of all devices, as on one device, so there is nothing to send. "
        "Leave it out, or run that part on each device's own examples: hfjax.per_device(function)."
    )


_REDUCTIONS = ("psum", "pmax", "pmin", "pvary", "psum_invariant")
COLLECTIVES = (*_REDUCTIONS, "axis_index", "ppermute", "all_gather", "all_to_all", "reduce_scatter")


def _single_device_event(ctx: PartitionContext, equation: JaxprEqn) -> CommEvent:
    return CommEvent(ctx.line, equation.primitive.name, "alone", 0, ctx.times)


def _over_other_axes(
    ctx: PartitionContext, equation: JaxprEqn, values: Values, **params: Any
) -> Values:
    is_linear = equation.primitive.name in ("psum", "pvary", "psum_invariant")
    operands = [
        v
        if isinstance(v, ShardedValue) or (is_linear and isinstance(v, PartialValue))
        else ctx.replicate(v)
        for v in values
    ]
    outs = ctx.bind(equation, list(map(local_array, operands)), **params)

    def rewrap(x: Any, value: Any) -> Any:
        if isinstance(value, ShardedValue):
            adds_dim = (
                x.ndim > value.x.ndim and equation.params["all_gather_dimension"] <= value.split.dim
            )
            return ShardedValue(x, value.split.with_dim(value.split.dim + adds_dim))
        return PartialValue(x) if isinstance(value, PartialValue) else x

    return [rewrap(x, v) for x, v in zip(outs, operands, strict=True)]


def _keeps_split(equation: JaxprEqn, values: Values) -> bool:
    """Return whether a collective leaves the split dimension of its operands as it is."""
    p, names = equation.params, ("split_axis", "concat_axis", "all_gather_dimension")
    dims = [p[name] for name in (*names, "scatter_dimension") if name in p]
    sharded = [v for v in values if isinstance(v, ShardedValue)]
    if equation.primitive.name == "all_gather" and not p["tiled"]:
        return True  # along a new dimension
    return not sharded or (p.get("tiled", True) and all(v.split.dim not in dims for v in sharded))


def _expand_dims(ctx: PartitionContext, value: Any, dim: int) -> ShardedValue | jax.Array:
    if isinstance(value, ShardedValue):
        split = value.split
        return ShardedValue(
            jnp.expand_dims(value.x, dim), split.with_dim(split.dim + (dim <= split.dim))
        )
    return jnp.expand_dims(ctx.replicate(value), dim)


def callback(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values:
    """Call back with global arrays, and only once if the program uses no result."""
    operands = list(map(ctx.replicate, values))
    if equation.primitive.name == "pure_callback":
        return ctx.bind(equation, operands)
    if any(not isinstance(v, DropVar) for v in equation.outvars):
        raise ValueError(
            f"{ctx.line}: {equation.primitive.name} returns a value that the model uses. On "
            "several devices it would be called once on each, in any order. Use "
            "jax.pure_callback, or give the value with the batch."
        )
    zeros = lambda: [jnp.zeros(y.shape, y.dtype) for y in map(aval_of, equation.outvars)]
    call_back = lambda: list(ctx.bind(equation, operands))
    return lax.cond(ctx.group.axis_index == 0, call_back, zeros)


RULES: dict[str, Callable] = {
    **dict.fromkeys(COLLECTIVES, collective),
    **dict.fromkeys(("debug_callback", "debug_print", "pure_callback", "io_callback"), callback),
}
