"""Rules of equations that hold programs: calls, rematerialised functions, loops, branches.

What enters a program inside is an array by its kind; inside it is a value again. What a loop
carries has one kind: the first that what the body returns can have again, found without devices.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import DropVar, Jaxpr, JaxprEqn, Literal

from hfjax.parallel.jaxprs.program import PLAIN_CALLS, bodies_of, body_of, needed, parts_of_scan
from hfjax.parallel.spmd.partition_context import Join, Scope, aval_of
from hfjax.parallel.spmd.placements import (
    SAME,
    SUM,
    Cut,
    Kind,
    Later,
    Made,
    Part,
    Sum,
    held,
    kept_kinds,
    kind_of,
    of_kind,
)
from hfjax.parallel.spmd.rule_calls import call_of

Values = Sequence[Any]
Body = Callable[[Scope, Values], Values]


def call(scope: Scope, equation: JaxprEqn, values: Values) -> Values:
    """Run the body in the place of the call."""
    before, scope.place = scope.place, scope.where
    found = scope.run(scope, *_body(equation), values)
    scope.place = before
    return found


def _body(equation: JaxprEqn) -> tuple[Any, Sequence[Any]]:
    body = body_of(equation)
    assert body is not None
    return body


def body_in(jaxpr: Jaxpr, constants: Sequence[Any]) -> Body:
    """Return (scope, values) -> values of a program."""
    return lambda scope, values: scope.run(scope, jaxpr, constants, values)


def entering(scope: Scope, values: Values) -> list[Any]:
    """Return values as they may enter a program inside: sums complete, what is to be made made."""
    done = (scope.whole(v) if isinstance(v, Sum) else scope.made(v) for v in values)
    return list(done)


def again(arrays: Sequence[Any], kinds: Sequence[Kind]) -> list[Any]:
    """Return values of these kinds."""
    return [of_kind(x, kind) for x, kind in zip(arrays, kinds, strict=True)]


def found_without_devices(
    scope: Scope, body: Body, arrays: Sequence[Any], kinds: Sequence[Kind], more: Any = ()
) -> tuple[list[Kind], list[Join]]:
    """Return the kinds of what a program returns, and what joins rows in it.

    `body(scope, values, *more)` is given values of these kinds, and trees of arrays besides.
    """
    told: list[Join] = []
    found: list[Kind] = []

    def run(arrays: Sequence[Any], more: Any) -> list[Any]:
        inner = scope.inside(told=told)
        values = list(map(inner.settled, body(inner, again(arrays, kinds), *more)))
        found[:] = map(kind_of, values)
        return list(map(held, values))

    jax.eval_shape(run, list(arrays), more)
    return found, told


def joined_kinds(many: Sequence[Sequence[Kind]]) -> list[Kind]:
    """Return the kinds that hold for what each of some programs returns."""
    return [_either(set(kinds)) for kinds in zip(*many, strict=True)]


def _either(kinds: set[Kind]) -> Kind:
    cuts = [kind for kind in kinds if isinstance(kind, Cut)]
    if cuts:
        return cuts[0] if len(cuts) == 1 else SAME
    return SUM if SUM in kinds else SAME


def remat(scope: Scope, equation: JaxprEqn, values: Values) -> Values:
    """Run inside, by the policy that is given: what is gathered there is gathered again."""
    values = [v if isinstance(v, Later) else entering(scope, [v])[0] for v in values]
    is_later = [isinstance(v, Later) for v in values]
    kinds_in = [None if late else kind_of(v) for v, late in zip(values, is_later, strict=True)]
    kinds: list[Kind] = []
    body, constants = _body(equation)

    def run(*arrays: Any) -> list[Any]:
        inner = scope.inside()
        given = [
            scope.later(x) if kind is None else of_kind(x, kind)
            for x, kind in zip(arrays, kinds_in, strict=True)
        ]
        found = [inner.made(v) for v in inner.run(inner, body, constants, given)]
        found = [inner.whole(v) if isinstance(v, Later) else v for v in found]
        kinds[:] = map(kind_of, found)
        return list(map(held, found))

    options = {name: equation.params[name] for name in ("policy", "prevent_cse")}
    arrays = [v.stored if isinstance(v, Later) else held(v) for v in values]
    return again(jax.checkpoint(run, **options)(*arrays), kinds)


def scan(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Run a loop: over rows, if sums are carried at most, each device its own; else all on all."""
    n_consts, n_carry = parts_of_scan(equation)
    jaxpr, constants = _body(equation)
    consts = entering(
        scope, [scope.whole(v) if isinstance(v, Later) else v for v in values[:n_consts]]
    )
    first, sliced = values[n_consts : n_consts + n_carry], list(values[n_consts + n_carry :])
    first = [scope.whole(v) if isinstance(v, Later) else v for v in first]
    if any(isinstance(v, Part) and v.cut.dim == 0 for v in sliced):
        mapped = _over_rows(scope, equation, consts, first, sliced)
        if mapped is not None:
            return mapped
        scope.known = False  # it is gathered as for any program that no rule runs in parts
        sliced = [_whole_rows(scope, v) for v in sliced]
        scope.known = True
    scope.watch([v for v in sliced if isinstance(v, Later)])
    sliced = [_sliced(scope, v) for v in sliced]
    kinds_of_consts = list(map(kind_of, consts))
    of_slices = [
        v if isinstance(v, Later) else k.moved(k.dim - 1) if isinstance(k := kind_of(v), Cut) else k
        for v in sliced
    ]
    arrays_of_consts = list(map(held, consts))

    def body(inner: Scope, carry: Values, slices: Sequence[Any]) -> Values:
        here = [
            inner.later(x) if isinstance(k, Later) else of_kind(x, k)
            for x, k in zip(slices, of_slices, strict=True)
        ]
        given = [*again(arrays_of_consts, kinds_of_consts), *carry, *here]
        return inner.run(inner, jaxpr, constants, given)

    one = lambda x: jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), x)
    arrays = [v.stored if isinstance(v, Later) else held(v) for v in sliced]
    slices = list(map(one, arrays))
    run = lambda inner, carry, slices: body(inner, carry, slices)[:n_carry]
    kinds = _carried(scope, run, first, slices)
    of_rows: list[Kind] = []

    def step(carry: list, slices: list) -> tuple[list, list]:
        inner = scope.inside(times=equation.params["length"])
        out = body(inner, again(carry, kinds), slices)
        out = [inner.whole(v) if isinstance(v, Later) else v for v in out]
        new = [inner.as_kind(v, k) for v, k in zip(out[:n_carry], kinds, strict=True)]
        rows = [inner.made(v) for v in out[n_carry:]]
        of_rows[:] = map(kind_of, rows)
        return new, list(map(held, rows))

    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    start = [jnp.asarray(scope.as_kind(v, k)) for v, k in zip(first, kinds, strict=True)]
    last, rows = lax.scan(step, start, arrays, **options)
    outer = [k.moved(k.dim + 1) if isinstance(k, Cut) else k for k in of_rows]
    return [*again(last, kinds), *again(rows, outer)]


def _whole_rows(scope: Scope, value: Any) -> Any:
    split = isinstance(value, Part) and value.cut.dim == 0
    return scope.whole(value) if split else value


def _sliced(scope: Scope, value: Any) -> Any:
    """Return what a loop slices: a parameter to be gathered slice by slice, a part or the whole."""
    if isinstance(value, Later):
        return value if value.slices else scope.whole(value)
    if isinstance(value, Sum):
        return scope.whole(value)
    if isinstance(value, Made):
        cut = scope.cut_of(value.shape[1:])
        at = cut and cut.moved(cut.dim + 1)
        return scope.whole(value) if at is None else Part(scope.part(value, at), at)
    return value


def _over_rows(
    scope: Scope, equation: JaxprEqn, consts: Values, first: Values, sliced: Values
) -> Values | None:
    """Return what a loop over rows makes that carries sums at most: each device has its own turns.

    What is carried may be added to, and is then a sum that no turn sees; or it stays as it is.
    """
    cut = next(v.cut for v in sliced if isinstance(v, Part) and v.cut.dim == 0)
    split = any(isinstance(v, Part) for v in consts)
    if split or any(isinstance(v, Part) and v.cut != cut for v in sliced):
        return None
    jaxpr = equation.params["jaxpr"].jaxpr
    adds = _running_sums(jaxpr, jaxpr.invars[len(consts) : len(consts) + len(first)])
    if adds is None or _needs_others(jaxpr, scope.side.axes):
        return None
    here = [scope.part(scope.whole(v) if isinstance(v, Later) else v, cut) for v in sliced]
    length = equation.params["length"] // scope.side.size
    start = [scope.sum(v) if add else scope.whole(v) for v, add in zip(first, adds, strict=True)]
    found = scope.bind(equation, [*map(scope.whole, consts), *start, *here], length=length)
    last = [Sum(x) if add else x for x, add in zip(found, adds, strict=False)]
    return [*last, *(Part(x, cut) for x in found[len(first) :])]


# What a value of a program is, of a sum that the program is given: nothing, if it does not follow
# from one; the sum's number, if it is the sum and what was added to it; else it is mixed.
Mark = int | None
MIXED = -1


def _running_sums(jaxpr: Jaxpr, carried: Sequence[Any]) -> list[bool] | None:
    """Return which of what a loop carries are sums, if all others stay and no turn sees a sum."""
    stays = [v is out for v, out in zip(carried, jaxpr.outvars, strict=False)]
    marks = {v: i for i, v in enumerate(carried) if not stays[i]}
    whole = [v for v in marks if not jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    if any(v.aval.dtype.itemsize < 4 for v in whole):
        return None
    found = _marks(jaxpr, [marks.get(v) for v in jaxpr.invars])
    return [not stay for stay in stays] if _are_sums(found, stays) else None


def _are_sums(found: list[Mark], stays: list[bool]) -> bool:
    """Return whether each sum is itself again, and nothing else follows from one."""
    wanted = [None if stay else number for number, stay in enumerate(stays)]
    return found == [*wanted, *[None] * (len(found) - len(stays))]


def _marks(jaxpr: Jaxpr, marks: Sequence[Mark]) -> list[Mark]:
    """Return the marks of what a program returns, by those of what it is given."""
    known = {v: mark for v, mark in zip(jaxpr.invars, marks, strict=True) if mark is not None}
    read = lambda v: None if isinstance(v, Literal) else known.get(v)
    for equation in jaxpr.eqns:
        given = list(map(read, equation.invars))
        if given.count(None) == len(given):
            continue
        if needed([equation], []):  # it shows or does something
            return [MIXED] * len(jaxpr.outvars)
        rule = _KEEPS_SUMS.get(equation.primitive.name)
        found = rule(equation, given) if rule else None
        known.update(zip(equation.outvars, found or [MIXED] * len(equation.outvars), strict=True))
    return list(map(read, jaxpr.outvars))


def _added(equation: JaxprEqn, marks: list[Mark]) -> list[Mark] | None:
    a, b = marks
    return None if a is not None and b is not None else [b if a is None else a]


def _less(equation: JaxprEqn, marks: list[Mark]) -> list[Mark] | None:
    a, b = marks
    return [a] if b is None else None


def _of_same_dtype(equation: JaxprEqn, marks: list[Mark]) -> list[Mark] | None:
    (before,), (after,) = equation.invars, equation.outvars
    return marks if aval_of(before).dtype == aval_of(after).dtype else None


def _of_body(equation: JaxprEqn, marks: list[Mark]) -> list[Mark] | None:
    jaxpr, _ = _body(equation)
    return _marks(jaxpr, marks) if len(jaxpr.invars) == len(marks) else None


# Programs that run once, on what enters.
_CALLS = (*PLAIN_CALLS, "checkpoint", "remat", "remat2")
_KEEPS_SUMS: dict[str, Callable] = {
    "add": _added,
    "add_any": _added,
    "sub": _less,
    "convert_element_type": _of_same_dtype,  # of a number without a dtype of its own
    **dict.fromkeys(_CALLS, _of_body),
}


def _needs_others(jaxpr: Jaxpr, axes: Sequence[str]) -> bool:
    """Return whether a program has what a device may not run by itself.

    It is a collective over these axes, a callback that gives a value, or a call that stands in.
    """
    for equation in jaxpr.eqns:
        named = equation.params.get("axes", equation.params.get("axis_name", ()))
        named = named if isinstance(named, tuple | list) else (named,)
        if any(isinstance(n, str) and n in axes for n in named):
            return True
        used = any(not isinstance(v, DropVar) for v in equation.outvars)
        if equation.primitive.name == "io_callback" and used:
            return True
        if (call := call_of(equation)) is not None and call.stands_in:
            return True
        if any(_needs_others(inside, axes) for inside, _ in bodies_of(equation)):
            return True
    return False


def _carried(scope: Scope, body: Callable, first: Values, slices: Sequence[Any]) -> list[Kind]:
    """Return the kinds of what a loop carries: (scope, carry, slices) -> carry keeps them."""
    kinds = [SAME if isinstance(v, Sum) else kind_of(v) for v in first]

    def local(value: Any, kind: Kind) -> jax.ShapeDtypeStruct:
        shape, x = scope.shape(value), value if isinstance(value, Made) else held(value)
        return jax.ShapeDtypeStruct(
            scope.side.local(shape, kind) if isinstance(kind, Cut) else shape, x.dtype
        )

    def run(kinds: list[Kind]) -> list[Kind]:
        arrays = [local(v, k) for v, k in zip(first, kinds, strict=True)]
        return found_without_devices(scope, body, arrays, kinds, (list(slices),))[0]

    return kept_kinds(kinds, run)


def while_loop(scope: Scope, equation: JaxprEqn, values: Values) -> Values:
    """Run until the condition, of all rows, is false: on all devices at once."""
    p = equation.params
    n_cond, n_body = p["cond_nconsts"], p["body_nconsts"]
    values = [scope.whole(v) if isinstance(v, Later) else v for v in values]
    of_cond = entering(scope, values[:n_cond])
    of_body = entering(scope, values[n_cond : n_cond + n_body])
    first = values[n_cond + n_body :]
    go = body_in(p["cond_jaxpr"].jaxpr, p["cond_jaxpr"].consts)
    do = body_in(p["body_jaxpr"].jaxpr, p["body_jaxpr"].consts)
    for_each = bool(p["cond_jaxpr"].out_avals[0].shape)  # a loop for each entry, as vmap makes it

    def body(inner: Scope, carry: Values, _: Any) -> Values:
        out = do(inner, [*of_body, *carry])
        on = inner.settled(go(inner, [*of_cond, *carry])[0]) if for_each else None
        return [_beside(inner, v, on.cut) for v in out] if isinstance(on, Part) else out

    kinds = _carried(scope, body, first, [])
    start = [jnp.asarray(scope.as_kind(v, k)) for v, k in zip(first, kinds, strict=True)]
    both = lambda inner, values: [*go(inner, [*of_cond, *values]), *do(inner, [*of_body, *values])]
    _, told = found_without_devices(scope, both, start, kinds)
    alone = not told and all(isinstance(kind, Cut) for kind in kinds)  # each device on its own
    if for_each and not alone:
        scope.tell("greatest", jnp.zeros((), "int32"))

    def condition(arrays: list) -> Any:
        inner = scope.inside()
        (found,) = go(inner, [*of_cond, *again(arrays, kinds)])
        if for_each:
            here = held(inner.settled(found)).any()
            return here if alone or not isinstance(found, Part) else scope.side.greatest(here)
        found = inner.whole(found)
        return scope.side.agreed(found) if told else found

    def step(arrays: list) -> list:
        inner = scope.inside()
        values = again(arrays, kinds)
        out = do(inner, [*of_body, *values])
        new = [inner.as_kind(v, k) for v, k in zip(out, kinds, strict=True)]
        if not for_each:
            return new
        (on,) = go(inner, [*of_cond, *values])
        return [_where(inner, on, x, y, k) for x, y, k in zip(new, arrays, kinds, strict=True)]

    return again(lax.while_loop(condition, step, start), kinds)


def _beside(scope: Scope, value: Any, cut: Cut) -> Part:
    """Return what a loop for each entry carries as what it asks of each entry is split."""
    return value if isinstance(value, Part) else Part(scope.part(value, cut), cut)


def _where(scope: Scope, on: Any, new: Any, old: Any, kind: Kind) -> jax.Array:
    """Return what goes on where a loop does, of leading dimensions."""
    split = isinstance(kind, Cut) and kind.dim < len(scope.shape(on))
    here = scope.as_kind(on, kind if split else SAME)
    return jnp.where(here.reshape(*here.shape, *[1] * (new.ndim - here.ndim)), new, old)


def cond(scope: Scope, equation: JaxprEqn, values: Values) -> Values:
    """Take one branch, on all devices the same: by what all rows say."""
    index, *given = (scope.whole(v) if isinstance(v, Later) else v for v in values)
    given, index = entering(scope, given), scope.whole(index)
    kinds_in, arrays = list(map(kind_of, given)), list(map(held, given))
    bodies = [body_in(b.jaxpr, b.consts) for b in equation.params["branches"]]
    tried = [found_without_devices(scope, body, arrays, kinds_in) for body in bodies]
    kinds = joined_kinds([found for found, _ in tried])
    if any(told for _, told in tried):
        index = scope.side.agreed(index)

    def branch(body: Body) -> Callable:
        def run(*arrays: Any) -> list[Any]:
            inner = scope.inside()
            found = body(inner, again(arrays, kinds_in))
            return [jnp.asarray(inner.as_kind(v, k)) for v, k in zip(found, kinds, strict=True)]

        return run

    return again(lax.switch(index, list(map(branch, bodies)), *arrays), kinds)
