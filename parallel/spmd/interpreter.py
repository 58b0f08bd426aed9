"""The interpreter: a table of rules, and the fallback where no rule knows an equation."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn

from hfjax.parallel.jaxprs.bind import (
    has_model_mesh,
    is_in_own_shard_map,
    over_single_devices,
    plain_number,
)
from hfjax.parallel.jaxprs.primitives import PLAIN_CALLS, POINTWISE, REMAT_CALLS
from hfjax.parallel.jaxprs.walk import interpret, name_of, needed_equations
from hfjax.parallel.spmd.partition_context import CommEvent, PartitionContext, trace_global
from hfjax.parallel.spmd.placements import (
    AxisGroup,
    LazyValue,
    PartialValue,
    ShardedValue,
    Split,
    Ungathered,
    is_distributed,
)
from hfjax.parallel.spmd.rule_calls import call_of, calls_in, check_calls
from hfjax.parallel.spmd.rules import indexing, random_bits, reductions, user_collectives, views
from hfjax.parallel.spmd.rules.control_flow import call, cond, remat, scan, while_loop
from hfjax.parallel.spmd.rules.custom_derivatives import custom_jvp, custom_vjp, linear_solve
from hfjax.parallel.spmd.rules.pointwise import barrier, pointwise

Values = Sequence[Any]

CALLS = (*PLAIN_CALLS, "composite")
# Rules of equations that hold programs: `Ungathered` parameters may enter.
PROGRAM_RULES: dict[str, Callable] = {
    **dict.fromkeys(CALLS, call),
    **dict.fromkeys(REMAT_CALLS, remat),
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    **dict.fromkeys(("custom_jvp_call", "custom_jvp_call_jaxpr"), custom_jvp),
    **dict.fromkeys(("custom_vjp_call", "custom_vjp_call_jaxpr", "linear_call"), custom_vjp),
    "custom_linear_solve": linear_solve,
}
# Rules that also apply where all operands are replicated.
REPLICATED_RULES: dict[str, Callable] = {
    "iota": views.iota,
    "broadcast_in_dim": views.apply_view,
    "random_bits": random_bits.random_bits,
    **user_collectives.RULES,
}
RULES: dict[str, Callable] = {
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(views.VIEWS, views.apply_view),
    "optimization_barrier": barrier,
    "concatenate": views.concatenate,
    "stack": views.stack,
    "unstack": views.unstack,
    "pad": views.pad,
    "split": views.split_array,
    **reductions.RULES,
    **indexing.RULES,
    **random_bits.RULES,
    **REPLICATED_RULES,
    **PROGRAM_RULES,
}


def eval_partitioned(
    ctx: PartitionContext, jaxpr: Jaxpr, constants: Values, values: Values
) -> list[Any]:
    """Return the outputs of a program for values of any placement."""
    env = dict(zip(jaxpr.constvars, constants, strict=True))
    env |= zip(jaxpr.invars, values, strict=True)

    def run(equation: JaxprEqn, values: Values) -> Sequence[Any]:
        with _source_context(ctx, equation):
            outs = eval_equation(ctx, equation, values)
        for value in outs:
            ctx.track_dim(value)
        return outs

    needed = sorted(needed_equations(jaxpr.eqns, jaxpr.outvars))
    equations = [jaxpr.eqns[i] for i in needed]
    constant = plain_number if any(map(has_model_mesh, equations)) else lambda number: number
    return interpret(equations, env, jaxpr.outvars, run, constant)


def _source_context(ctx: PartitionContext, equation: JaxprEqn) -> AbstractContextManager:
    """Return the context of an equation: errors and profiles show the user's line and names."""
    info = equation.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    source = (
        info if ctx.outer_source is None or source_info_util.summarize(info) else ctx.outer_source
    )
    return source_info_util.user_context(source.traceback, name_stack=names)


def eval_equation(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Sequence[Any]:
    """Return the outputs of an equation, by its rule or by the fallback."""
    name = name_of(equation)
    ctx.equation, ctx.has_rule = equation, True
    rule = RULES.get(name)
    if name in CALLS and (rule_call := call_of(equation)):
        return list(rule_call(ctx, equation, values))
    if name == "shard_map" and has_model_mesh(equation):
        return list(call(ctx, equation, values))  # over axes of size 1: its body
    if is_in_own_shard_map(equation):
        return list(over_single_devices(equation, values))
    has_distributed = any(
        is_distributed(v) or isinstance(v, LazyValue | Ungathered) for v in values
    )
    is_program = name in PROGRAM_RULES
    if ctx.group.size == 1:
        runs_as_written = not (is_program and has_model_mesh(equation))
    else:
        runs_as_written = not is_program and name not in REPLICATED_RULES
    if not is_program:
        check_calls(ctx, equation)
    elif any(calls_in(equation)):
        runs_as_written = False
    if runs_as_written and not has_distributed:
        return ctx.bind(equation, values)
    if not is_program:
        values = [ctx.replicate(v) if isinstance(v, Ungathered) else v for v in values]
    outs = rule(ctx, equation, values) if rule else None
    return fall_back_to_replicated(ctx, equation, values) if outs is None else list(outs)


def fall_back_to_replicated(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> list[Any]:
    """All-gather the operands, run the equation on every device, and slice its outputs again."""
    ctx.equation, ctx.has_rule = equation, False
    split = next((v.split for v in values if isinstance(v, ShardedValue)), None)
    size = split and next(ctx.shape(v)[v.split.dim] for v in values if isinstance(v, ShardedValue))
    operands = list(map(ctx.replicate, values))
    if equation.primitive.name == "fft":
        operands = list(map(_as_row_major, operands))
    outs = ctx.bind(equation, operands)
    ctx.has_rule = True
    return list(outs) if split is None else [_slice_output(ctx, x, split, size) for x in outs]


def _as_row_major(x: jax.Array) -> jax.Array:
    """Return an array that is laid out in memory in the order of its dimensions.

    XLA's CPU backend chooses the layout of gathered arrays, and its fft accepts only this one.
    """
    return lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)


def _slice_output(ctx: PartitionContext, x: Any, split: Split, size: Any) -> Any:
    dims = [d for d, n in enumerate(x.shape) if n == size]
    if not dims:
        return x
    target = split if split.dim in dims else Split(dims[0])
    return (
        ShardedValue(ctx.group.slice_local(x, target), target)
        if ctx.group.divides(x.shape, target)
        else x
    )


def run_partitioned(
    group: AxisGroup, function: Callable, *arguments: Any, comms: list[CommEvent] | None = None
) -> Any:
    """Return the outputs of a function of global arrays, run on what this device holds of them.

    Args:
        group: The devices.
        function: Of trees of arrays; it is traced at global shapes.
        arguments: Trees of arrays (replicated), `ShardedValue` and `PartialValue`.
        comms: A list to which each `CommEvent` is added.

    Returns:
        A tree of arrays, `ShardedValue` and `PartialValue`.
    """
    leaves = jax.tree.leaves(arguments, is_leaf=is_distributed)
    program, out_shapes = trace_global(group, function, *global_shapes(group, arguments))
    ctx = make_context(group, [] if comms is None else comms, leaves)
    outs = eval_partitioned(ctx, program.jaxpr, program.consts, leaves)
    return jax.tree.unflatten(jax.tree.structure(out_shapes), list(map(ctx.materialize, outs)))


def make_context(
    group: AxisGroup, comms: list[CommEvent], values: Values, **fields: Any
) -> PartitionContext:
    """Return the context of a program with these inputs."""
    ctx = PartitionContext(group, comms, {}, eval_partitioned, **fields)
    for value in values:
        ctx.track_dim(value)
    return ctx


def global_shapes(group: AxisGroup, tree: Any) -> Any:
    """Return the global shape and dtype of each value of a tree."""

    def global_shape(value: Any) -> jax.ShapeDtypeStruct:
        if isinstance(value, ShardedValue):
            shape = group.global_shape(value.x.shape, value.split)
            return jax.ShapeDtypeStruct(shape, value.x.dtype)
        x = value.x if isinstance(value, PartialValue) else value
        return jax.ShapeDtypeStruct(jnp.shape(x), x.dtype)

    return jax.tree.map(global_shape, tree, is_leaf=is_distributed)
