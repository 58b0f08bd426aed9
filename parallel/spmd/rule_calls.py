"""Calls that a program keeps by name while it is traced: they run by a rule of their own.

`own_rows` is one: a part of a model that runs on each device's own rows.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax.errors import TraceContextError
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir

from hfjax.parallel.jaxprs.program import bodies_of, body_of
from hfjax.parallel.spmd.partition_context import Scope, is_recording, recording, traced_whole
from hfjax.parallel.spmd.placements import (
    ROWS,
    Cut,
    Kind,
    Later,
    Made,
    Part,
    Side,
    Sum,
    held,
    is_value,
    kind_of,
    of_kind,
)

source_info_util.register_exclusion(__file__)  # the line of a named call is the user's

ROWS_SIDE = Side((), 1).name


class CallName(str):
    """The name of a call in a program; it holds the call, however often JAX reuses the program."""

    __slots__ = ("call",)
    call: "NamedCall"


def call_of(equation: JaxprEqn) -> "NamedCall | None":
    """Return the named call that an equation is, if it is one."""
    name = equation.params.get("name")
    return name.call if isinstance(name, CallName) else None


@dataclass(frozen=True)
class NamedCall:
    """A call that was recorded.

    Attributes:
        rule: (call, scope, its program, arguments) -> results: trees of values.
        function: What was called, of trees of arrays.
        again: The same, kept by name if it is called while another program is traced.
        arguments: Their form.
        results: The form of what it returned.
        program: What was traced.
        refuses: What it is, and what to do, where its program is not that of all rows.
        stands_in: Whether what was traced has the right shapes only, and cannot run.
    """

    rule: Callable
    function: Callable
    again: Callable
    arguments: Any
    results: Any
    program: ClosedJaxpr
    refuses: str = ""
    stands_in: bool = False

    def _another(self, equation: JaxprEqn) -> str:
        """Return what JAX has made of the call, if it is another: its derivative, or a `vmap`."""
        results = len(equation.outvars) == self.results.num_leaves
        if results and len(equation.invars) > self.arguments.num_leaves:
            return "an array that the function closes over (hand it in as an argument) is in"
        program = equation.params["jaxpr"]
        if results and (program is self.program or str(program) == str(self.program)):
            return ""
        pairs = zip(program.in_avals, self.program.in_avals, strict=False)
        more = {now.ndim - before.ndim for now, before in pairs}
        return VMAP if results and more in ({1}, {0, 1}) else GRAD

    def __call__(self, scope: Scope, equation: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
        """Return what the call makes of values."""
        body = body_of(equation)
        assert body is not None
        another = self._another(equation)
        if another and scope.side.size == 1 and not self.stands_in:
            return scope.run(scope, *body, values)
        if another and self.refuses:
            raise ValueError(f"{scope.line}: {another} {self.refuses}")
        if another:
            return scope.run(scope, *body, values)
        found = self.rule(self, scope, body, self.arguments.unflatten(values))
        return jax.tree.leaves(found, is_leaf=is_value)


VMAP = "jax.vmap is around"
GRAD = "the model differentiates, within its own program, with respect to something in"


def calls_in(equation: JaxprEqn) -> Iterator[NamedCall]:
    """Yield the named calls in the programs that an equation holds."""
    for jaxpr, _ in bodies_of(equation):
        for inside in jaxpr.eqns:
            if call := call_of(inside):
                yield call
            yield from calls_in(inside)


def check_whole(scope: Scope, equation: JaxprEqn) -> None:
    """Refuse to run a program as it is written where a call in it cannot be so."""
    for call in calls_in(equation):
        if call.stands_in or (call.refuses and scope.side.size > 1):
            name = equation.primitive.name
            raise ValueError(
                f"{scope.line}: {name}, which runs on all rows, is around {call.refuses}"
            )


# -- what is traced in the place of a call that cannot be traced with all rows ---------------------

_stand_in = Primitive("stand_in")  # it has shapes: whoever runs it has forgotten a rule
_stand_in.multiple_results = True
_stand_in.def_abstract_eval(lambda *_, results, **more: list(results))


def _standing_in(shapes: Callable, refuses: str) -> Callable:
    """Return what gives results like those of `shapes`, to a program that is never run."""
    line = source_info_util.summarize(source_info_util.current())

    def function(*arguments: Any) -> Any:
        found, form = jax.tree.flatten(jax.eval_shape(shapes, *arguments))
        results = tuple(ShapedArray(x.shape, x.dtype) for x in found)
        words = {"line": line, "refuses": refuses}
        leaves = jax.tree.leaves(arguments)
        return form.unflatten(_stand_in.bind(*leaves, results=results, **words))

    return function


def _refusing(why: str) -> Callable:
    def refuse(*_: Any, line: str, refuses: str, **more: Any) -> Any:
        raise ValueError(f"{line}: {why} {refuses}")

    return refuse


_stand_in.def_impl(_refusing("outside of a step there is"))
ad.primitive_jvps[_stand_in] = _refusing(GRAD)
batching.primitive_batchers[_stand_in] = _refusing(VMAP)
mlir.register_lowering(
    _stand_in, _refusing("a program is run as it is written (a fault of hfjax) with")
)


def named(
    rule: Callable, function: Callable, shapes: Callable | None = None, refuses: str = ""
) -> Callable:
    """Return a function of trees of arrays that is kept by name in the program being traced.

    `shapes` gives the shapes of what it returns, where it cannot be traced with all rows.
    """

    def run(*arguments: Any) -> Any:
        traced = function if shapes is None else _standing_in(shapes, refuses)
        leaves, form = jax.tree.flatten(arguments)
        results: Any = None

        def flat(*leaves: Any) -> list[Any]:
            nonlocal results
            found, results = jax.tree.flatten(traced(*form.unflatten(leaves)))
            return found

        flat.__name__ = name = CallName("named")
        jitted = jax.jit(flat)
        program, stands_in = jitted.trace(*leaves).jaxpr, shapes is not None
        found = jitted(*leaves)
        call = NamedCall(rule, function, again, form, results, program, refuses, stands_in)
        name.call = call
        return results.unflatten(found)

    def again(*arguments: Any) -> Any:
        return run(*arguments) if is_recording() else function(*arguments)

    return run


def own_rows(function: Callable) -> Callable:
    """Return the function run on each device's own rows, where devices have some each.

    What it returns with a row for each row it is given is split as they are. Whatever else it
    returns is averaged over the devices (of whole numbers the greatest is taken), so it depends on
    the mesh. Outside of a step it is the function itself.

    Args:
        function: Of trees of arrays; it closes over none.

    Example:
        >>> import hfjax, jax.numpy as jnp
        >>> centred = hfjax.own_rows(lambda x: x - x.mean(0, keepdims=True))
        >>> centred(jnp.array([[1.0], [3.0]])).tolist()
        [[-1.0], [1.0]]
    """

    return _kept(function, _on_own_rows, refuses=OWN_ROWS)


OWN_ROWS = (
    "hfjax.own_rows. Let own_rows be around: hfjax.own_rows(jax.vmap(function)), "
    "hfjax.own_rows(jax.grad(function))."
)
EXPERTS = (
    "a mixture of experts, whose tokens travel between devices. Call it on all tokens at once, and "
    "differentiate outside of the model."
)
WRITES = (
    "hfjax.own_rows(function): the function writes to a module that was made outside of it. Split "
    "the module, hand its state in and out (nnx.split, nnx.merge), or let BatchNorm normalise over "
    "each device's rows with hfjax.layout(…, sync_batch_norm=False)."
)


def row_by_row(function: Callable) -> Callable:
    """Return the same of a function that does not join rows: its derivative is that of all rows."""
    return _kept(function, _on_own_parts)


def like_tokens(function: Callable, travels: bool) -> Callable:
    """Return the same of a function of (arrays, groups of tokens, …) that returns such groups.

    Where tokens travel in it from the groups of each device, it cannot be traced with all rows.
    """
    if not travels:
        return _kept(function, _on_own_groups)
    return _kept(function, _on_own_groups, lambda arrays, x, *more: x, EXPERTS)


def _kept(
    function: Callable, rule: Callable, shapes: Callable | None = None, refuses: str = ""
) -> Callable:
    def alone(*arguments: Any) -> Any:  # what it calls runs on the same rows
        with recording(False):
            return function(*arguments)

    def run(*arguments: Any) -> Any:
        if not is_recording():
            return function(*arguments)
        try:
            return named(rule, alone, shapes, refuses)(*arguments)
        except TraceContextError as error:
            raise ValueError(WRITES) from error

    return run


def _on_own_parts(call: NamedCall, scope: Scope, body: tuple, arguments: tuple) -> list:
    """Run a function on what is here."""
    leaves, form = jax.tree.flatten(arguments, is_leaf=_is_leaf)
    found = call.again(*form.unflatten([held(v) for v in _settled(scope, leaves)]))
    jaxpr, _ = body
    pairs = zip(jax.tree.leaves(found), jaxpr.outvars, strict=True)
    return [_joined(scope, jnp.asarray(x), v.aval.shape) for x, v in pairs]


def _on_own_rows(call: NamedCall, scope: Scope, body: tuple, arguments: tuple) -> list:
    """Run a function on the rows that are here, of which it sees all positions."""
    if scope.side.name == ROWS_SIDE:
        return _on_own_parts(call, scope, body, arguments)
    leaves, form = jax.tree.flatten(arguments, is_leaf=_is_leaf)
    values = _settled(scope, leaves)
    kinds_in, kinds = list(map(kind_of, values)), list[Kind]()

    def function(*arrays: jax.Array) -> list[Any]:
        given = [of_kind(x, kind) for x, kind in zip(arrays, kinds_in, strict=True)]
        shapes = [jax.ShapeDtypeStruct(scope.shape(v), held(v).dtype) for v in given]
        flat = lambda *leaves: jax.tree.leaves(call.function(*form.unflatten(leaves)))
        traced, _ = traced_whole(scope.side, flat, *shapes)
        inner = scope.inside()
        found = inner.run(inner, traced.jaxpr, traced.consts, given)
        found = list(map(inner.settled, found))
        kinds[:] = map(kind_of, found)
        return list(map(held, found))

    found = own_rows(function)(*map(held, values))
    return [of_kind(x, kind) for x, kind in zip(found, kinds, strict=True)]


def _settled(scope: Scope, values: Sequence[Any]) -> list[Any]:
    """Return values as parts and arrays."""
    return [scope.whole(v) if isinstance(v, Sum) else scope.settled(v) for v in values]


def _on_own_groups(call: NamedCall, scope: Scope, body: tuple, arguments: tuple) -> list:
    """Run a function on the groups of tokens that are here, or on all where they do not divide."""
    arrays, *tokens = arguments
    leaves, form = jax.tree.flatten(tokens, is_leaf=_is_leaf)
    of_groups = isinstance(leaves[0], Part) and leaves[0].cut.dim == 0
    cut = leaves[0].cut if of_groups else ROWS
    fits = (scope.shape(v) and scope.side.divides(scope.shape(v), cut) for v in leaves)
    divides = scope.side.size > 1 and all(fits)
    here = [scope.part(v, cut) if divides else scope.whole(v) for v in leaves]
    whole = jax.tree.map(scope.whole, arrays, is_leaf=_is_leaf)
    found = call.again(whole, *form.unflatten(here))
    return [Part(x, cut) if divides else x for x in jax.tree.leaves(found)]


def _is_leaf(value: object) -> bool:
    return is_value(value) or isinstance(value, Made | Later)


def _joined(scope: Scope, x: jax.Array, whole: tuple[int, ...]) -> Part | jax.Array:
    """Return what devices have made of their rows as a value of the whole."""
    split = [d for d, (n, m) in enumerate(zip(x.shape, whole, strict=True)) if n != m]
    if split:
        return Part(x, Cut(split[0]))
    scope.tell("average", x)
    return scope.side.average(x)
