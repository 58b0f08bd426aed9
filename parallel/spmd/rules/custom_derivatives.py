"""Rules of functions with a custom derivative: its rule is a program, and is partitioned too.

The rule is traced at global shapes. A `custom_vjp` receives cotangents: of a sharded value its
shard, of a replicated one a partial sum, which a rule that is not linear all-reduces. What it
returns for a replicated value stays a partial sum: the gradients of devices are added later.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn

from hfjax.parallel.jaxprs.bind import bind, has_model_mesh
from hfjax.parallel.jaxprs.linearity import is_linear
from hfjax.parallel.jaxprs.model_mesh import mesh_context
from hfjax.parallel.jaxprs.walk import body_of, equations_in, interpret_jaxpr
from hfjax.parallel.spmd.partition_context import (
    CommEvent,
    PartitionContext,
    aval_of,
    trace_global,
)
from hfjax.parallel.spmd.placements import (
    Placement,
    ShardedValue,
    Split,
    Ungathered,
    cotangent_placement,
    from_local,
    is_distributed,
    local_array,
    placement_of,
)
from hfjax.parallel.spmd.rule_calls import calls_in, check_calls
from hfjax.parallel.spmd.rules.control_flow import (
    Body,
    infer_placements,
    make_body,
    prepare_operands,
    values_from_local,
)

Values = Sequence[Any]


def _as_sharded_or_full(ctx: PartitionContext, values: Values) -> list[Any]:
    return prepare_operands(
        ctx, [ctx.replicate(v) if isinstance(v, Ungathered) else v for v in values]
    )


def _shapes(variables: Sequence[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _coerce(ctx: PartitionContext, values: Values, placements: Sequence[Placement]) -> list[Any]:
    return [jnp.asarray(ctx.redistribute(v, k)) for v, k in zip(values, placements, strict=True)]


def _output_placements(
    ctx: PartitionContext, equation: JaxprEqn, arrays: Values, placements: Sequence[Placement]
) -> list[Placement]:
    return infer_placements(ctx, _body_or_bind(equation), arrays, placements)[0]


def _body_or_bind(equation: JaxprEqn) -> Body:
    """Return what runs the function: its program partitioned or, if it has none, replicated."""
    body = body_of(equation)
    if body is not None:
        return make_body(*body)
    return lambda ctx, values: ctx.bind(equation, list(map(ctx.replicate, values)))


def _on_local_arrays(
    ctx: PartitionContext,
    run: Body,
    in_placements: Sequence[Placement],
    out_placements: Sequence[Placement],
    comms: list[CommEvent] | None = None,
) -> Callable:
    """Return the function of local arrays that runs a program on values in these placements."""

    def function(*arrays: Any) -> list[Any]:
        inner = ctx.child(comms=comms)
        outs = run(inner, values_from_local(arrays, in_placements))
        return _coerce(inner, outs, out_placements)

    return function


def _function_of(equation: JaxprEqn, numbers: Sequence[int], operands: Values) -> Callable:
    """Return an equation as a function of the operands of these numbers, the others as given."""

    def call(*xs: jax.Array) -> Sequence[Any]:
        by_number = dict(zip(numbers, xs, strict=True))
        return bind(equation, [by_number.get(i, x) for i, x in enumerate(operands)])

    return call


def custom_jvp(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values:
    """Partition the function, and the rule of its derivative, which is linear in tangents."""
    values = _as_sharded_or_full(ctx, values)
    runs_as_written = not any(calls_in(equation)) and not has_model_mesh(equation)
    if runs_as_written and not any(is_distributed(v) for v in values):
        return bind(equation, values)
    in_placements, arrays = list(map(placement_of, values)), list(map(local_array, values))
    out_placements = _output_placements(ctx, equation, arrays, in_placements)
    shapes = _shapes(equation.invars)

    run = _body_or_bind(equation)
    own_comms: list[CommEvent] = []  # of the function; its rule records its own in their place
    local = _on_local_arrays(ctx, run, in_placements, out_placements, own_comms)
    function = jax.custom_jvp(local)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list, list]:
        own_comms.clear()
        active = [i for i, dx in enumerate(tangents) if not isinstance(dx, SymbolicZero)]

        def jvp_global(xs: Sequence[Any], dxs: Sequence[Any]) -> tuple[Sequence[Any], list]:
            ys, dys = jax.jvp(_function_of(equation, active, xs), [xs[i] for i in active], dxs)
            return ys, [dy for y, dy in zip(ys, dys, strict=True) if _is_real(y)]

        with mesh_context(equation.ctx.cur_abstract_mesh):
            program, _ = trace_global(ctx.group, jvp_global, shapes, [shapes[i] for i in active])
        inner = ctx.child()
        inner.equation = equation
        tangent_values = values_from_local(
            [tangents[i] for i in active], [in_placements[i] for i in active]
        )
        operands = [*values_from_local(primals, in_placements), *tangent_values]
        outs = inner.run(inner, program.jaxpr, program.consts, operands)
        ys = _coerce(inner, outs[: len(out_placements)], out_placements)
        dy_outs = iter(outs[len(out_placements) :])
        next_tangent = lambda k: jnp.asarray(inner.redistribute(next(dy_outs), k))
        zero_tangent = lambda y: np.zeros(y.shape, jax.dtypes.float0)
        return ys, [
            next_tangent(k) if _is_real(y) else zero_tangent(y)
            for y, k in zip(ys, out_placements, strict=True)
        ]

    function.defjvp(rule, symbolic_zeros=True)
    outs = function(*arrays)
    ctx.comms.extend(own_comms)
    return values_from_local(outs, out_placements)


def custom_vjp(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values:
    """Partition the function, its forward rule, and its backward rule on cotangents."""
    values = _as_sharded_or_full(ctx, values)
    in_placements, arrays = list(map(placement_of, values)), list(map(local_array, values))
    p = equation.params  # a linear call is not differentiated by what it closes over
    num_constants = p["num_callee_consts"] + p["num_res"] if "num_res" in p else 0
    real = [i for i, v in enumerate(equation.invars) if _is_real(v.aval) and i >= num_constants]
    runs_as_written = not any(calls_in(equation)) and not has_model_mesh(equation)
    if runs_as_written and (not real or ctx.group.size == 1):
        return bind(equation, list(map(ctx.replicate, values)))
    out_placements = _output_placements(ctx, equation, arrays, in_placements)
    shapes = _shapes(equation.invars)

    def outputs_and_pullback(*xs: jax.Array) -> tuple:
        return jax.vjp(_function_of(equation, real, xs), *(xs[i] for i in real))

    run = _body_or_bind(equation)
    own_comms: list[CommEvent] = []  # of the function; its rule records its own in their place
    local = _on_local_arrays(ctx, run, in_placements, out_placements, own_comms)
    function = jax.custom_vjp(local)
    pullback: list[Any] = []  # its structure, and the shapes of its residuals

    def forward(*arrays: Any) -> tuple[list, list]:
        own_comms.clear()
        with mesh_context(equation.ctx.cur_abstract_mesh):
            program, (_, pullback_shapes) = trace_global(ctx.group, outputs_and_pullback, *shapes)
        pullback[:] = jax.tree.structure(pullback_shapes), jax.tree.leaves(pullback_shapes)
        inner = ctx.child()
        inner.equation = equation
        outs = inner.run(
            inner, program.jaxpr, program.consts, values_from_local(arrays, in_placements)
        )
        residuals = prepare_operands(inner, outs[len(out_placements) :])
        as_values = [v if isinstance(v, ShardedValue) else jnp.asarray(v) for v in residuals]
        return _coerce(inner, outs[: len(out_placements)], out_placements), as_values

    def backward(residuals: Sequence[Any], cotangents: Sequence[Any]) -> tuple:
        pullback_tree, residual_shapes = pullback
        out_avals = list(map(aval_of, equation.outvars))
        real_outs = [i for i, y in enumerate(out_avals) if _is_real(y)]

        def pull(residuals: Sequence[Any], real_dys: Sequence[Any]) -> Any:
            by_index = dict(zip(real_outs, real_dys, strict=True))
            zero = lambda y: np.zeros(y.shape, jax.dtypes.float0)
            dys = [by_index[i] if i in by_index else zero(y) for i, y in enumerate(out_avals)]
            return jax.tree.unflatten(pullback_tree, residuals)(dys)

        dy_shapes = [
            jax.ShapeDtypeStruct(out_avals[i].shape, out_avals[i].dtype) for i in real_outs
        ]
        with mesh_context(equation.ctx.cur_abstract_mesh):
            program, _ = trace_global(ctx.group, pull, residual_shapes, dy_shapes)
        inner = ctx.child()
        inner.equation = equation
        is_cotangent = [False] * len(residual_shapes) + [True] * len(dy_shapes)
        if not num_constants and not is_linear(program.jaxpr, is_cotangent):
            inner.record("rule", jnp.zeros(()))
        dys = [from_local(cotangents[i], cotangent_placement(out_placements[i])) for i in real_outs]
        outs = inner.run(inner, program.jaxpr, program.consts, [*residuals, *dys])
        cotangent_placements = [cotangent_placement(in_placements[i]) for i in real]
        gradients = dict(zip(real, _coerce(inner, outs, cotangent_placements), strict=True))
        return tuple(gradients.get(i) for i in range(len(in_placements)))

    function.defvjp(forward, backward)
    outs = function(*arrays)
    ctx.comms.extend(own_comms)
    return values_from_local(outs, out_placements)


def linear_solve(ctx: PartitionContext, equation: JaxprEqn, values: Values) -> Values:
    """Solve linear equations: those of each shard locally, if the solver does not communicate."""
    check_calls(ctx, equation)
    lengths, jaxprs = equation.params["const_lengths"], equation.params["jaxprs"]
    values, solver_ids = (
        _as_sharded_or_full(ctx, values),
        [i for i in range(4) if jaxprs[i] is not None],
    )
    # An iterative solver is not linear in the cotangent, which is partial for replicated values.
    has_loop = ctx.group.size > 1 and any(_has_loop(jaxprs[i].jaxpr) for i in solver_ids)
    if not has_loop and not any(is_distributed(v) for v in values):
        return bind(equation, values)
    sizes = [lengths.matvec, lengths.vecmat, lengths.solve, lengths.transpose_solve]
    ends = np.cumsum(sizes).tolist()
    captured = [values[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    rhs = values[ends[-1] :]

    def make_runner(solver_id: int) -> Body:
        program = jaxprs[solver_id]
        consts = captured[solver_id]
        return lambda inner, b: inner.run(inner, program.jaxpr, program.consts, [*consts, *b])

    def infer(placements: Sequence[Placement]) -> list[Any]:
        arrays = [jnp.asarray(ctx.redistribute(v, k)) for v, k in zip(rhs, placements, strict=True)]
        return [infer_placements(ctx, make_runner(i), arrays, placements) for i in solver_ids]

    placements = list(map(placement_of, rhs))
    if has_loop:
        return _solve_replicated(ctx, jaxprs, captured, rhs)
    if not all(
        isinstance(k, Split) for k in placements
    ):  # a replicated operand may have a sharded solution
        placements = infer(placements)[0][0][: len(placements)]
    inferred = infer(placements)
    is_independent = all(
        out_placements == placements and not comms for out_placements, comms in inferred
    )
    if not is_independent or not all(isinstance(k, Split) for k in placements):
        return _solve_replicated(ctx, jaxprs, captured, rhs)

    def make_solver(solver_id: int) -> Any:
        solve = _on_local_arrays(ctx, make_runner(solver_id), placements, placements)
        return lambda arrays: solve(*arrays)

    arrays = [jnp.asarray(ctx.redistribute(v, k)) for v, k in zip(rhs, placements, strict=True)]
    transpose_solve = None if jaxprs[3] is None else lambda _, b: make_solver(3)(b)
    solution = lax.custom_linear_solve(
        make_solver(0), arrays, lambda _, b: make_solver(2)(b), transpose_solve
    )
    return values_from_local(solution, placements)


def _solve_replicated(
    ctx: PartitionContext, jaxprs: Sequence[Any], captured: Sequence[Values], rhs: Values
) -> Values:
    """Solve the global equations on every device; the cotangent is all-reduced before.

    An iterative solver is not linear in it, so that devices may not solve for partial sums.
    """
    full_consts, count = [list(map(ctx.replicate, consts)) for consts in captured], len(rhs)
    has_aux = len(jaxprs[2].out_avals) > count  # the auxiliary output of a solver

    def run(solver_id: int, arrays: Sequence[Any]) -> Any:
        program, operands = jaxprs[solver_id], (*full_consts[solver_id], *arrays)
        outs = interpret_jaxpr(program.jaxpr, program.consts, operands, bind)
        return (outs[:count], outs[count:]) if solver_id > 1 and has_aux else outs

    def transpose_solve(_: Any, cotangents: Sequence[Any]) -> Any:
        outs = run(3, list(map(ctx.group.all_reduce, cotangents)))
        solution, *aux = outs if has_aux else (outs,)
        partials = list(map(ctx.group.as_partial, solution))
        return (partials, *aux) if has_aux else partials

    arrays = [jnp.asarray(ctx.replicate(v)) for v in rhs]
    solvers = (lambda _, b: run(2, b)), None if jaxprs[3] is None else transpose_solve
    return jax.tree.leaves(
        lax.custom_linear_solve(partial(run, 0), arrays, *solvers, has_aux=has_aux)
    )


def _has_loop(jaxpr: Any) -> bool:
    """Return whether a program has loops, as iterative solvers have."""
    return any(e.primitive.name in ("while", "scan") for e, _ in equations_in(jaxpr))
