"""Programs as data: the equations of a function, parts of them, and the residuals of a pullback.

`jax.vjp` decides which residuals a backward pass needs; `Residuals` reads its program. Residuals
that depend on the input must be saved; those that follow from parameters and random keys alone
(casts, gathers, masks) are computed again. Each one that is saved has a description (`Tensor`): the
operation that made it, and its name.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.tree_util import treedef_tuple

PLAIN_CALLS = ("jit", "pjit", "closed_call", "core_call")
# Calls whose body is put in their place, so that dataflow is seen through them.
CALLS = (
    *PLAIN_CALLS,
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "custom_lin",
)


@dataclass(frozen=True)
class Tensor:
    """One tensor that is kept for a backward pass: `what` made it, and how it was named."""

    what: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Piece:
    """Some equations of a program with the inputs and outputs that they have by themselves."""

    equations: Sequence[Any]
    inputs: Sequence[Var]
    outputs: Sequence[Any]
    constants: dict[Var, Any]

    def __call__(self, *values: Any) -> list[Any]:
        known = {**self.constants, **dict(zip(self.inputs, values, strict=True))}
        return _run(self.equations, known, self.outputs)

    def part(self, targets: Sequence[Any], inputs: Sequence[Var] | None = None) -> "Piece":
        """Return what computes these targets."""
        equations = [self.equations[i] for i in sorted(needed(self.equations, targets))]
        inputs = self.inputs if inputs is None else inputs
        return Piece(equations, inputs, list(targets), self.constants)

    def function(self, inputs: Sequence[Var], targets: Sequence[Any], form: Any) -> Callable:
        """Return what computes these targets as a function of trees, its result of this form."""
        part = self.part(targets, inputs)
        return lambda *given: form.unflatten(part(*jax.tree.leaves(given)))

    @property
    def reads(self) -> set[Var]:
        """What its equations use, and its outputs."""
        used = (equation.invars for equation in self.equations)
        return {v for values in (*used, self.outputs) for v in variables(values)}


def piece(function: Callable, *arguments: Any, instead: Callable | None = None) -> Piece:
    """Return the program of a function of trees, with the bodies of calls in their place.

    Its inputs and outputs are the leaves of what the function is given and returns.
    `instead(equation, values)` may be run in place of an equation, by default `inlined`.
    """
    traced = jax.make_jaxpr(function)(*arguments)
    run = lambda *values: evaluated(traced.jaxpr, traced.consts, values, instead or inlined)
    flat = jax.make_jaxpr(run)(*jax.tree.leaves(arguments))
    constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    return Piece(flat.jaxpr.eqns, flat.jaxpr.invars, flat.jaxpr.outvars, constants)


def evaluated(jaxpr: Jaxpr, constants: Sequence, values: Sequence, instead: Callable) -> list:
    """Return what a program gives for these values."""
    known = dict(zip(jaxpr.constvars, constants, strict=True))
    known |= zip(jaxpr.invars, values, strict=True)
    return _run(jaxpr.eqns, known, jaxpr.outvars, instead)


def inlined(equation: JaxprEqn, values: Sequence, instead: Callable | None = None) -> list | None:
    """Return what the body of a call gives; None: it is no call."""
    body = body_of(equation) if equation.primitive.name in CALLS else None
    fits = body is not None and len(body[0].invars) == len(values)
    return evaluated(*body, values, instead or inlined) if body and fits else None


def _run(equations: Sequence, known: dict, outputs: Sequence, instead: Any = None) -> list:
    read = lambda v: v.val if isinstance(v, Literal) else known[v]
    for equation in equations:
        values = [read(v) for v in equation.invars]
        results = instead and instead(equation, values)
        results = bind(equation, values) if results is None else results
        known.update(zip(equation.outvars, results, strict=True))
    return [read(v) for v in outputs]


def bind(equation: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """Return what an equation gives for these values."""
    parameters = equation.primitive.get_bind_params(equation.params)
    functions: Iterable[Any] = ()
    if isinstance(parameters, tuple):  # (functions, parameters) before jax 0.11
        functions, parameters = parameters
    with equation.ctx.manager:
        results = equation.primitive.bind(*functions, *values, **parameters)
    return results if equation.primitive.multiple_results else [results]


def body_of(equation: JaxprEqn) -> tuple[Any, Sequence[Any]] | None:
    """Return the program of a call, loop or branch with its constants; None if it has none."""
    named = (equation.params.get(name) for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"))
    return next((_with_constants(body) for body in named if body is not None), None)


def bodies_of(equation: JaxprEqn) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield all programs that an equation holds, with their constants; of a kernel none."""
    if equation.primitive.name == "pallas_call":
        return
    for value in equation.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(body, "jaxpr", body), "eqns"):
                yield _with_constants(body)


def _with_constants(body: Any) -> tuple[Any, Sequence[Any]]:
    return (body.jaxpr, body.consts) if hasattr(body, "jaxpr") else (body, ())


def parts_of_scan(equation: JaxprEqn) -> tuple[int, int]:
    """Return how many inputs of a scan are constants, and how many are carried.

    Told from the shapes: what is sliced has a dimension more than in the body. (The parameters of
    the equation are others from one version of jax to the next.)
    """
    body = equation.params["jaxpr"].jaxpr
    more = lambda out, within: sum(
        o.aval.ndim > i.aval.ndim for o, i in zip(out, within, strict=True)
    )
    carried = len(equation.outvars) - more(equation.outvars, body.outvars)
    sliced = more(equation.invars, body.invars)
    return len(equation.invars) - carried - sliced, carried


def needed(equations: Sequence[Any], targets: Iterable[Any]) -> set[int]:
    """Return the numbers of the equations that the targets follow from, or that have effects."""
    wanted, chosen = set(variables(targets)), set()
    for i in reversed(range(len(equations))):
        equation = equations[i]
        if _acts(equation) or any(v in wanted for v in equation.outvars):
            chosen.add(i)
            wanted.update(variables(equation.invars))
    return chosen


def _acts(equation: JaxprEqn) -> bool:
    """Return whether an equation does something beside its results, as a callback does.

    That a collective names an axis is an effect to JAX, and no reason to run it in vain.
    """
    return any(type(effect).__name__ != "NamedAxisEffect" for effect in equation.effects)


def variables(values: Iterable[Any]) -> list[Var]:
    """Return those values that are variables of a program."""
    return [v for v in values if isinstance(v, Var)]


def grouped(values: Sequence[Any], *trees: Any) -> list[list]:
    """Return as many of the values as each tree has leaves, one after the other."""
    left = iter(values)
    return [list(islice(left, len(jax.tree.leaves(tree)))) for tree in trees]


def bytes_of(avals: Iterable[Any]) -> int:
    """Return how many bytes arrays of these shapes and dtypes take."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)


class Residuals:
    """A function and its pullback as data: a residual is known, made from that, or stashed.

    `function(known, x) -> (out, pullback)` is traced once, for arguments like these.

    Attributes:
        forward: (known, x) -> (out, stash): stash is the list of what depends on x.
        out: Shapes and dtypes of the arrays of `out`.
        stash: Those of what is stashed.
        tensors: A description of each.
        constants: What the program closes over.
        reads: Which leaves of `known` the pullback reads.
    """

    def __init__(self, function: Callable, known: Any, x: Any) -> None:
        forms: list[Any] = []

        def whole(known, x) -> tuple:
            results = function(known, x)
            forms[:] = map(jax.tree.structure, results)
            return results

        program = piece(whole, known, x)
        self._known, x = grouped(program.inputs, known, x)
        out, self._pullback = forms
        outputs, self._kept = program.outputs[: out.num_leaves], program.outputs[out.num_leaves :]
        kept, depends = dict.fromkeys(variables(self._kept)), _following(x, program.equations)
        at_hand = depends.union(self._known, program.constants)
        self._remake = program.part([v for v in kept if v not in at_hand], self._known)
        self._stashed = [v for v in kept if v in depends]
        read = self._remake.reads.union(kept)
        self.reads = [v in read for v in self._known]
        form = treedef_tuple((out, jax.tree.structure(self._stashed)))
        self.forward = program.function(program.inputs, [*outputs, *self._stashed], form)
        self.out, self.stash = ([v.aval for v in values] for values in (outputs, self._stashed))
        self.tensors = _tensors(program, self._stashed)
        self.constants = list(program.constants.values())

    def pullback(self, known: Any, stash: Sequence[Any], constants: Sequence[Any]) -> Callable:
        """Return the pullback; in another trace its constants are other tracers."""
        given = jax.tree.leaves(known)
        held = dict(zip(self._remake.constants, constants, strict=True))
        values = held | dict(zip(self._known, given, strict=True))
        values |= zip(self._stashed, stash, strict=True)
        remade = replace(self._remake, constants=held)(*given)
        values |= zip(self._remake.outputs, remade, strict=True)
        read = lambda v: v.val if isinstance(v, Literal) else values[v]
        return self._pullback.unflatten([read(v) for v in self._kept])


def _following(inputs: Iterable[Var], equations: Iterable[Any]) -> set[Var]:
    """Return these inputs, and all that depends on them."""
    depends = set(inputs)
    for equation in equations:
        if not depends.isdisjoint(variables(equation.invars)):
            depends.update(equation.outvars)
    return depends


# What hands a tensor on in another form: the one that made it is further back.
_SAME = (
    *("reshape", "transpose", "squeeze", "expand_dims", "copy", "convert_element_type", "name"),
    *("sharding_constraint", "reduce_precision", "optimization_barrier"),
)


def _tensors(program: Piece, kept: Iterable[Var]) -> list[Tensor]:
    """Return a description of each of these variables of a program."""
    makes = {v: e for e in program.equations for v in e.outvars}
    names = _names(program)
    return [_tensor(v, makes, names) for v in kept]


def _tensor(v: Var, makes: Mapping, names: Mapping[Var, set[str]]) -> Tensor:
    back, named = v, set(names.get(v, ()))
    while back in makes and makes[back].primitive.name in _SAME:
        back = makes[back].invars[0]
        named |= names.get(back, set())
    what = makes[back].primitive.name if back in makes else "input"
    aval: Any = v.aval
    return Tensor(what, aval.shape, str(aval.dtype), bytes_of([aval]), frozenset(named))


def _names(program: Piece) -> dict[Var, set[str]]:
    """Return the names that tensors were given by `checkpoint_name`, before and after it."""
    names: dict[Var, set[str]] = {}
    for equation in program.equations:
        if equation.primitive.name == "name":
            for v in (*equation.invars, *equation.outvars):
                if isinstance(v, Var):
                    names.setdefault(v, set()).add(equation.params["name"])
    return names


def packed(avals: Iterable[Any]) -> list[Tensor]:
    """Return a description of arrays into which several tensors are packed."""
    return [Tensor("packed", a.shape, str(a.dtype), bytes_of([a])) for a in avals]
