"""Walks over programs: their equations, those of the bodies that they hold, and their values.

`equations_in` yields the equations, and how often each runs. `interpret` gives every variable a
value: an array, or whatever a reader knows of it (`bind`, jaxprs/bind.py, runs one).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from hfjax.parallel.jaxprs.model_mesh import mesh_context
from hfjax.parallel.jaxprs.primitives import CALLS, HI_CLASSES, HI_PRIMITIVE

Body = tuple[Jaxpr, Sequence[Any]]  # a program, and its constants


def name_of(equation: JaxprEqn) -> str:
    """Return the name of what an equation does, as `primitives` lists it."""
    operation = hi_primitive_of(equation)
    if operation is None:
        return equation.primitive.name
    return HI_CLASSES.get(type(operation).__name__, "custom_vjp_call")


def params_of(equation: JaxprEqn) -> Mapping[str, Any]:
    """Return the parameters of what an equation does."""
    operation = hi_primitive_of(equation)
    return equation.params if operation is None else operation.params


def hi_primitive_of(equation: JaxprEqn) -> Any:
    """Return the object (a HiPrim of jax.experimental.hijax) that an equation calls, if any."""
    return equation.params["_prim"] if equation.primitive.name == HI_PRIMITIVE else None


def equations_in(jaxpr: Jaxpr, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yield the equations of a program and of all bodies in it, each with how often it runs.

    A scan runs its body so often; of other loops, and of each branch, one run counts.

    >>> import jax
    >>> loop = lambda x: jax.lax.scan(lambda x, _: (jax.lax.sin(x), None), x, length=3)[0]
    >>> [(e.primitive.name, n) for e, n in equations_in(jax.make_jaxpr(loop)(1.0).jaxpr)]
    [('scan', 1), ('sin', 3)]
    """
    for equation in jaxpr.eqns:
        yield equation, times
        is_scan = equation.primitive.name == "scan"
        for body, _ in bodies_of(equation):
            yield from equations_in(body, times * equation.params["length"] if is_scan else times)


def interpret(
    equations: Iterable[JaxprEqn],
    known: dict[Var, Any],
    outputs: Sequence[Any],
    run: Callable[[JaxprEqn, list], Sequence[Any]],
    constant: Callable[[Any], Any] = lambda number: number,
) -> list:
    """Return the values of the outputs of equations; all values are added to `known`, the inputs'.

    `run(equation, values)` returns the values of its outputs, `constant` that of a number in it.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x, y: jax.lax.sin(x) * y + 1)(1.0, 1.0).jaxpr
    >>> depth = lambda equation, depths: [1 + max(depths)]
    >>> interpret(jaxpr.eqns, dict.fromkeys(jaxpr.invars, 0), jaxpr.outvars, depth, lambda _: 0)
    [3]
    """
    read = lambda v: constant(v.val) if isinstance(v, Literal) else known[v]
    for equation in equations:
        results = run(equation, list(map(read, equation.invars)))
        known.update(zip(equation.outvars, results, strict=True))
    return list(map(read, outputs))


def interpret_jaxpr(
    jaxpr: Jaxpr, constants: Sequence, values: Sequence, run: Callable, **kwargs: Any
) -> list:
    """Return the values of the outputs of a program, as `interpret` does."""
    inputs = zip((*jaxpr.constvars, *jaxpr.invars), (*constants, *values), strict=True)
    return interpret(jaxpr.eqns, dict(inputs), jaxpr.outvars, run, **kwargs)


def body_of(equation: JaxprEqn) -> Body | None:
    """Return the program of a call, loop or branch with its constants; None if it has none."""
    if (operation := hi_primitive_of(equation)) is not None:
        return _expand(equation, operation)
    candidates = (equation.params.get(name) for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"))
    return next((with_constants(body) for body in candidates if body is not None), None)


def _expand(equation: JaxprEqn, operation: Any) -> Body:
    """Return the program of an object, traced as the equation was."""
    run = lambda *leaves: jax.tree.leaves(operation.expand(*operation.in_tree.unflatten(leaves)))
    with equation.ctx.manager, mesh_context(equation.ctx.cur_abstract_mesh):
        return with_constants(jax.make_jaxpr(run)(*operation.in_avals_flat))


def called_body(equation: JaxprEqn) -> Body | None:
    """Return the program of a call whose operands are its inputs; None of any other equation."""
    body = body_of(equation) if name_of(equation) in CALLS else None
    return body if body and len(body[0].invars) == len(equation.invars) else None


def bodies_of(equation: JaxprEqn) -> Iterator[Body]:
    """Yield all programs that an equation holds, with their constants; of a kernel none."""
    if equation.primitive.name == "pallas_call":
        return
    if (operation := hi_primitive_of(equation)) is not None:
        yield _expand(equation, operation)
        return
    for value in equation.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(body, "jaxpr", body), "eqns"):
                yield with_constants(body)


def with_constants(body: Any) -> Body:
    """Return a program with its constants; an open one has none."""
    return (body.jaxpr, body.consts) if hasattr(body, "jaxpr") else (body, ())


def match_operands(body: Jaxpr, operands: Sequence[Any], missing: Any) -> list[Any]:
    """Return the operands that enter a body, from the last on: a branch takes no index.

    >>> import jax
    >>> match_operands(jax.make_jaxpr(jax.lax.sin)(1.0).jaxpr, ["index", "x"], None)
    ['x']
    """
    known = operands[max(len(operands) - len(body.invars), 0) :]
    return [missing] * (len(body.invars) - len(known)) + list(known)


def scan_counts(equation: JaxprEqn) -> tuple[int, int]:
    """Return how many inputs of a scan are constants, and how many are carried.

    Read from the shapes: what is sliced has a dimension more than in the body. (The parameters of
    the equation differ between versions of jax.)
    """
    body = equation.params["jaxpr"].jaxpr
    count_sliced = lambda out, inner: sum(
        o.aval.ndim > i.aval.ndim for o, i in zip(out, inner, strict=True)
    )
    num_carried = len(equation.outvars) - count_sliced(equation.outvars, body.outvars)
    num_sliced = count_sliced(equation.invars, body.invars)
    return len(equation.invars) - num_carried - num_sliced, num_carried


def needed_equations(equations: Sequence[Any], targets: Iterable[Any]) -> set[int]:
    """Return the numbers of the equations that the targets depend on, or that have effects."""
    live_vars, numbers = set(variables(targets)), set()
    for i in reversed(range(len(equations))):
        equation = equations[i]
        if _has_effects(equation) or any(v in live_vars for v in equation.outvars):
            numbers.add(i)
            live_vars.update(variables(equation.invars))
    return numbers


def _has_effects(equation: JaxprEqn) -> bool:
    """Return whether an equation does something besides its results, as a callback does.

    That a collective names an axis is an effect to JAX, and no reason to run it in vain.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


def dependent_vars(inputs: Iterable[Var], equations: Iterable[Any]) -> set[Var]:
    """Return these inputs, and all variables that depend on them."""
    found = set(inputs)
    for equation in equations:
        if not found.isdisjoint(variables(equation.invars)):
            found.update(equation.outvars)
    return found


def variables(values: Iterable[Any]) -> list[Var]:
    """Return those values that are variables of a program."""
    return [v for v in values if isinstance(v, Var)]
