"""Rules of functions that have a derivative of their own: it is a program, and run in parts too.

The rule is traced at the sizes of the whole. A `custom_vjp` is given cotangents: of a part its
part, of what is the same on all devices a sum, which a rule that is not linear completes. What it
returns for a value that is the same stays a sum: the gradients of devices are added later.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import JaxprEqn, jaxpr_as_fun

from hfjax.parallel.jaxprs.linearity import is_linear
from hfjax.parallel.jaxprs.program import bind, body_of
from hfjax.parallel.spmd.partition_context import Scope, aval_of, traced_whole
from hfjax.parallel.spmd.placements import (
    Cut,
    Kind,
    Later,
    Part,
    dual,
    held,
    is_value,
    kind_of,
    of_kind,
)
from hfjax.parallel.spmd.rule_calls import calls_in, check_whole
from hfjax.parallel.spmd.rules.control_flow import (
    Body,
    again,
    body_in,
    entering,
    found_without_devices,
)

Values = Sequence[Any]


def _given(scope: Scope, values: Values) -> list[Any]:
    return entering(scope, [scope.whole(v) if isinstance(v, Later) else v for v in values])


def _shapes(variables: Sequence[Any]) -> list[Any]:
    return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in variables]


def _is_real(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _coerced(scope: Scope, values: Values, kinds: Sequence[Kind]) -> list[Any]:
    return [jnp.asarray(scope.as_kind(v, k)) for v, k in zip(values, kinds, strict=True)]


def _kinds_of_results(
    scope: Scope, equation: JaxprEqn, arrays: Values, kinds: Sequence[Kind]
) -> list[Kind]:
    return found_without_devices(scope, _body(equation), arrays, kinds)[0]


def _body(equation: JaxprEqn) -> Body:
    """Return what runs the function: its program in parts, or, if it has none, the whole of it."""
    body = body_of(equation)
    if body is not None:
        return body_in(*body)
    return lambda scope, values: scope.bind(equation, list(map(scope.whole, values)))


def custom_jvp(scope: Scope, equation: JaxprEqn, values: Values) -> Values:
    """Run the function in parts, and the rule of its derivative, which is linear in tangents."""
    values = _given(scope, values)
    if not any(is_value(v) for v in values) and not any(calls_in(equation)):
        return bind(equation, values)
    kinds_in, arrays = list(map(kind_of, values)), list(map(held, values))
    kinds = _kinds_of_results(scope, equation, arrays, kinds_in)
    shapes = _shapes(equation.invars)

    @jax.custom_jvp
    def function(*arrays: Any) -> list[Any]:
        inner = scope.inside()
        return _coerced(inner, _body(equation)(inner, again(arrays, kinds_in)), kinds)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list, list]:
        moving = [i for i, dx in enumerate(tangents) if not isinstance(dx, SymbolicZero)]

        def whole(xs: Sequence[Any], dxs: Sequence[Any]) -> tuple[Sequence[Any], list]:
            def call(*some: jax.Array) -> Sequence[Any]:
                put = dict(zip(moving, some, strict=True))
                return bind(equation, [put.get(i, x) for i, x in enumerate(xs)])

            ys, dys = jax.jvp(call, [xs[i] for i in moving], dxs)
            return ys, [dy for y, dy in zip(ys, dys, strict=True) if _is_real(y)]

        traced, _ = traced_whole(scope.side, whole, shapes, [shapes[i] for i in moving])
        inner = scope.inside()
        inner.equation = equation
        changes = again([tangents[i] for i in moving], [kinds_in[i] for i in moving])
        given = [*again(primals, kinds_in), *changes]
        found = inner.run(inner, traced.jaxpr, traced.consts, given)
        ys = _coerced(inner, found[: len(kinds)], kinds)
        left = iter(found[len(kinds) :])
        as_kind = lambda k: jnp.asarray(inner.as_kind(next(left), k))
        none = lambda y: np.zeros(y.shape, jax.dtypes.float0)
        return ys, [as_kind(k) if _is_real(y) else none(y) for y, k in zip(ys, kinds, strict=True)]

    function.defjvp(rule, symbolic_zeros=True)
    return again(function(*arrays), kinds)


def custom_vjp(scope: Scope, equation: JaxprEqn, values: Values) -> Values:
    """Run the function in parts, its forward rule, and its backward rule on cotangents."""
    values = _given(scope, values)
    kinds_in, arrays = list(map(kind_of, values)), list(map(held, values))
    p = equation.params  # a linear call has no derivative by what it closes over
    fixed = p["num_callee_consts"] + p["num_res"] if "num_res" in p else 0
    real = [i for i, v in enumerate(equation.invars) if _is_real(v.aval) and i >= fixed]
    if (not real or scope.side.size == 1) and not any(calls_in(equation)):
        return bind(equation, list(map(scope.whole, values)))
    kinds = _kinds_of_results(scope, equation, arrays, kinds_in)
    shapes = _shapes(equation.invars)

    def whole(*xs: jax.Array) -> tuple:
        def call(*some: jax.Array) -> Sequence[Any]:
            put = dict(zip(real, some, strict=True))
            return bind(equation, [put.get(i, x) for i, x in enumerate(xs)])

        return jax.vjp(call, *(xs[i] for i in real))

    @jax.custom_vjp
    def function(*arrays: Any) -> list[Any]:
        inner = scope.inside()
        return _coerced(inner, _body(equation)(inner, again(arrays, kinds_in)), kinds)

    pullback: list[Any] = []  # its form, and the shapes of what it keeps

    def forward(*arrays: Any) -> tuple[list, list]:
        traced, (_, pulls) = traced_whole(scope.side, whole, *shapes)
        pullback[:] = jax.tree.structure(pulls), jax.tree.leaves(pulls)
        inner = scope.inside()
        inner.equation = equation
        found = inner.run(inner, traced.jaxpr, traced.consts, again(arrays, kinds_in))
        kept = entering(inner, found[len(kinds) :])
        as_values = [v if isinstance(v, Part) else jnp.asarray(v) for v in kept]
        return _coerced(inner, found[: len(kinds)], kinds), as_values

    def backward(kept: Sequence[Any], cotangents: Sequence[Any]) -> tuple:
        form, shapes_kept = pullback
        out = list(map(aval_of, equation.outvars))
        given = [i for i, y in enumerate(out) if _is_real(y)]

        def pull(kept: Sequence[Any], some: Sequence[Any]) -> Any:
            put = dict(zip(given, some, strict=True))
            zero = lambda y: np.zeros(y.shape, jax.dtypes.float0)
            dys = [put[i] if i in put else zero(y) for i, y in enumerate(out)]
            return jax.tree.unflatten(form, kept)(dys)

        dy_shapes = [jax.ShapeDtypeStruct(out[i].shape, out[i].dtype) for i in given]
        traced, _ = traced_whole(scope.side, pull, shapes_kept, dy_shapes)
        inner = scope.inside()
        inner.equation = equation
        of_dys = [False] * len(shapes_kept) + [True] * len(dy_shapes)
        if not fixed and not is_linear(traced.jaxpr, of_dys):
            inner.tell("rule", jnp.zeros(()))
        dys = [of_kind(cotangents[i], dual(kinds[i])) for i in given]
        found = inner.run(inner, traced.jaxpr, traced.consts, [*kept, *dys])
        duals = [dual(kinds_in[i]) for i in real]
        put = dict(zip(real, _coerced(inner, found, duals), strict=True))
        return tuple(put.get(i) for i in range(len(kinds_in)))

    function.defvjp(forward, backward)
    return again(function(*arrays), kinds)


def linear_solve(scope: Scope, equation: JaxprEqn, values: Values) -> Values:
    """Solve linear equations: those of each part by themselves, if its programs join nothing."""
    check_whole(scope, equation)
    lengths, programs = equation.params["const_lengths"], equation.params["jaxprs"]
    values, used = _given(scope, values), [i for i in range(4) if programs[i] is not None]
    # One that iterates is not linear in the cotangent: of what is whole it would be given a share.
    iterates = scope.side.size > 1 and any(_iterates(programs[i].jaxpr) for i in used)
    if not iterates and not any(is_value(v) for v in values):
        return bind(equation, values)
    sizes = [lengths.matvec, lengths.vecmat, lengths.solve, lengths.transpose_solve]
    ends = np.cumsum(sizes).tolist()
    held_by = [values[end - size : end] for end, size in zip(ends, sizes, strict=True)]
    sides = values[ends[-1] :]

    def body(which: int) -> Body:
        program = programs[which]
        given = held_by[which]
        return lambda inner, b: inner.run(inner, program.jaxpr, program.consts, [*given, *b])

    def tried(kinds: Sequence[Kind]) -> list[Any]:
        arrays = [jnp.asarray(scope.as_kind(v, k)) for v, k in zip(sides, kinds, strict=True)]
        return [found_without_devices(scope, body(i), arrays, kinds) for i in used]

    kinds = list(map(kind_of, sides))
    if iterates:
        return _solved_whole(scope, programs, held_by, sides)
    if not all(isinstance(k, Cut) for k in kinds):  # what is given whole may be found in parts
        kinds = tried(kinds)[0][0][: len(kinds)]
    found = tried(kinds)
    alone = all(kinds_found == kinds and not told for kinds_found, told in found)
    if not alone or not all(isinstance(k, Cut) for k in kinds):
        return _solved_whole(scope, programs, held_by, sides)

    def run(which: int) -> Any:
        def solved(arrays: Sequence[Any]) -> list[Any]:
            inner = scope.inside()
            return _coerced(inner, body(which)(inner, again(arrays, kinds)), kinds)

        return solved

    arrays = [jnp.asarray(scope.as_kind(v, k)) for v, k in zip(sides, kinds, strict=True)]
    back = None if programs[3] is None else lambda _, b: run(3)(b)
    solution = lax.custom_linear_solve(run(0), arrays, lambda _, b: run(2)(b), back)
    return again(solution, kinds)


def _solved_whole(
    scope: Scope, programs: Sequence[Any], held_by: Sequence[Values], sides: Values
) -> Values:
    """Solve whole equations on every device; the cotangent that is solved for is complete.

    A solver that iterates is not linear in it, so that devices may not solve for shares.
    """
    whole, count = [list(map(scope.whole, given)) for given in held_by], len(sides)
    more = len(programs[2].out_avals) > count  # what a solver tells besides

    def run(which: int, arrays: Sequence[Any]) -> Any:
        found = jaxpr_as_fun(programs[which])(*whole[which], *arrays)
        return (found[:count], found[count:]) if which > 1 and more else found

    def back(_: Any, cotangents: Sequence[Any]) -> Any:
        found = run(3, list(map(scope.side.total, cotangents)))
        solution, *told = found if more else (found,)
        shares = list(map(scope.side.shared, solution))
        return (shares, *told) if more else shares

    arrays = [jnp.asarray(scope.whole(v)) for v in sides]
    ways = (lambda _, b: run(2, b)), None if programs[3] is None else back
    return jax.tree.leaves(lax.custom_linear_solve(partial(run, 0), arrays, *ways, has_aux=more))


def _iterates(jaxpr: Any) -> bool:
    """Return whether a program has loops, as solvers by iterations have."""
    inside = (body_of(equation) for equation in jaxpr.eqns)
    loops = any(equation.primitive.name in ("while", "scan") for equation in jaxpr.eqns)
    return loops or any(_iterates(body[0]) for body in inside if body)
