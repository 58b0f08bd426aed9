"""The interpreter: one table of rules, and what is done where no rule knows an equation."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from hfjax.parallel.jaxprs.program import PLAIN_CALLS, needed
from hfjax.parallel.spmd.partition_context import Join, Scope, traced_whole
from hfjax.parallel.spmd.placements import Cut, Later, Made, Part, Side, Sum, is_value
from hfjax.parallel.spmd.rule_calls import call_of, calls_in, check_whole
from hfjax.parallel.spmd.rules import indexing, random_bits, reductions, user_collectives, views
from hfjax.parallel.spmd.rules.control_flow import call, cond, remat, scan, while_loop
from hfjax.parallel.spmd.rules.custom_derivatives import custom_jvp, custom_vjp, linear_solve
from hfjax.parallel.spmd.rules.pointwise import POINTWISE, barrier, pointwise

Values = Sequence[Any]

CALLS = (*PLAIN_CALLS, "composite")
# Rules of programs: a parameter that is not gathered yet may enter.
PROGRAMS: dict[str, Callable] = {
    **dict.fromkeys(CALLS, call),
    **dict.fromkeys(("checkpoint", "remat", "remat2"), remat),
    "scan": scan,
    "while": while_loop,
    "cond": cond,
    **dict.fromkeys(("custom_jvp_call", "custom_jvp_call_jaxpr"), custom_jvp),
    **dict.fromkeys(("custom_vjp_call", "custom_vjp_call_jaxpr", "linear_call"), custom_vjp),
    "custom_linear_solve": linear_solve,
}
# Rules that matter also where all that enters is the same on all devices.
MAKING: dict[str, Callable] = {
    "iota": views.iota,
    "broadcast_in_dim": views.moved,
    "random_bits": random_bits.random_bits,
    **user_collectives.RULES,
}
RULES: dict[str, Callable] = {
    **dict.fromkeys(POINTWISE, pointwise),
    **dict.fromkeys(views.MOVES, views.moved),
    "optimization_barrier": barrier,
    "concatenate": views.concatenate,
    "stack": views.stack,
    "unstack": views.unstack,
    "pad": views.pad,
    "split": views.split,
    **reductions.RULES,
    **indexing.RULES,
    **random_bits.RULES,
    **MAKING,
    **PROGRAMS,
}


def run(scope: Scope, jaxpr: Jaxpr, constants: Values, values: Values) -> list[Any]:
    """Return what a program makes of values, which may be parts as its inputs may."""
    env = dict(zip(jaxpr.constvars, constants, strict=True))
    env |= zip(jaxpr.invars, values, strict=True)
    read = lambda v: v.val if isinstance(v, Literal) else env[v]
    for number in sorted(needed(jaxpr.eqns, jaxpr.outvars)):
        equation = jaxpr.eqns[number]
        with _at(scope, equation):
            found = results(scope, equation, [read(v) for v in equation.invars])
        for value in found:
            scope.note(value)
        env.update(zip(equation.outvars, found, strict=True))
    return [read(v) for v in jaxpr.outvars]


def _at(scope: Scope, equation: JaxprEqn) -> AbstractContextManager:
    """Return the context of an equation: errors and profiles show the user's line and names."""
    info = equation.source_info
    names = source_info_util.current_name_stack() + info.name_stack
    where = info if scope.place is None or source_info_util.summarize(info) else scope.place
    return source_info_util.user_context(where.traceback, name_stack=names)


def results(scope: Scope, equation: JaxprEqn, values: Values) -> Sequence[Any]:
    """Return what an equation makes of values, by its rule or on the whole."""
    name = equation.primitive.name
    scope.equation, scope.known = equation, True
    rule = RULES.get(name)
    if name in CALLS and (kept := call_of(equation)):
        return list(kept(scope, equation, values))
    special = any(is_value(v) or isinstance(v, Made | Later) for v in values)
    plain = scope.side.size == 1 or (name not in MAKING and name not in PROGRAMS)
    if name not in PROGRAMS:
        check_whole(scope, equation)
    elif any(calls_in(equation)):
        plain = False
    if plain and not special:
        return scope.bind(equation, values)
    if name not in PROGRAMS:
        values = [scope.whole(v) if isinstance(v, Later) else v for v in values]
    found = rule(scope, equation, values) if rule else None
    return on_the_whole(scope, equation, values) if found is None else list(found)


def on_the_whole(scope: Scope, equation: JaxprEqn, values: Values) -> list[Any]:
    """Gather rows, run the equation whole on every device, and deal what comes of it again."""
    scope.equation, scope.known = equation, False
    cut = next((v.cut for v in values if isinstance(v, Part)), None)
    size = cut and next(scope.shape(v)[v.cut.dim] for v in values if isinstance(v, Part))
    given = list(map(scope.whole, values))
    if equation.primitive.name == "fft":
        given = list(map(_in_order, given))
    found = scope.bind(equation, given)
    scope.known = True
    return list(found) if cut is None else [_dealt(scope, x, cut, size) for x in found]


def _in_order(x: jax.Array) -> jax.Array:
    """Return an array that lies in memory in the order of its dimensions.

    XLA's CPU lays out what is gathered as it likes, and its fft takes no other order.
    """
    return lax.optimization_barrier(x.reshape(-1)).reshape(x.shape)


def _dealt(scope: Scope, x: Any, cut: Cut, size: Any) -> Any:
    fits = [d for d, n in enumerate(x.shape) if n == size]
    if not fits:
        return x
    at = cut if cut.dim in fits else Cut(fits[0])
    return Part(scope.side.cut(x, at), at) if scope.side.divides(x.shape, at) else x


def in_parts(
    side: Side, function: Callable, *arguments: Any, told: list[Join] | None = None
) -> Any:
    """Return what a function makes of whole arguments, run on what this device has of them.

    Args:
        side: The devices.
        function: Of trees of arrays; it is traced at the sizes of the whole.
        arguments: Trees of arrays (whole), `Part` and `Sum`.
        told: Is given what joins rows.

    Returns:
        A tree of arrays, `Part` and `Sum`.
    """
    leaves = jax.tree.leaves(arguments, is_leaf=is_value)
    traced, result = traced_whole(side, function, *whole_shapes(side, arguments))
    scope = scope_of(side, [] if told is None else told, leaves)
    found = run(scope, traced.jaxpr, traced.consts, leaves)
    return jax.tree.unflatten(jax.tree.structure(result), list(map(scope.settled, found)))


def scope_of(side: Side, told: list[Join], values: Values, **more: Any) -> Scope:
    """Return the scope of a program that is given these values."""
    scope = Scope(side, told, {}, run, **more)
    for value in values:
        scope.note(value)
    return scope


def whole_shapes(side: Side, tree: Any) -> Any:
    """Return the shapes of the whole of each value of a tree."""

    def whole(value: Any) -> jax.ShapeDtypeStruct:
        if isinstance(value, Part):
            shape = side.whole_shape(value.x.shape, value.cut)
            return jax.ShapeDtypeStruct(shape, value.x.dtype)
        x = value.x if isinstance(value, Sum) else value
        return jax.ShapeDtypeStruct(jnp.shape(x), x.dtype)

    return jax.tree.map(whole, tree, is_leaf=is_value)
