"""Programs as data: the equations of a function, parts of them, and the residuals of a pullback.

`jax.vjp` decides which residuals a backward pass needs; this module reads its program. Residuals
that depend on the input must be saved; those that follow from parameters and random keys alone
(casts, gathers, masks) are computed again. `tensors_of` names each residual and the operation that
made it.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal, Var

from hfjax.parallel.activation_offload import Tensor

# Calls whose body is put in their place, so that dataflow is seen through them.
_CALLS = (
    "pjit",
    "jit",
    "closed_call",
    "core_call",
    "remat2",
    "checkpoint",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "custom_lin",
)


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


def piece(function: Callable, *arrays: Any) -> Piece:
    """Return the program of a function of flat arrays, with the bodies of calls in their place."""
    traced = jax.make_jaxpr(function)(*arrays)
    run = lambda *values: _inline(traced.jaxpr, traced.consts, values)
    flat = jax.make_jaxpr(run)(*arrays)
    constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    return Piece(flat.jaxpr.eqns, flat.jaxpr.invars, flat.jaxpr.outvars, constants)


def _inline(jaxpr: Any, constants: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    known = dict(zip(jaxpr.constvars, constants, strict=True))
    known |= zip(jaxpr.invars, values, strict=True)
    return _run(jaxpr.eqns, known, jaxpr.outvars, inline=True)


def _run(equations: Sequence[Any], known: dict, outputs: Sequence[Any], inline: bool = False):
    read = lambda v: v.val if isinstance(v, Literal) else known[v]
    for equation in equations:
        values = [read(v) for v in equation.invars]
        body = body_of(equation) if inline and equation.primitive.name in _CALLS else None
        fits = body is not None and len(body[0].invars) == len(values)
        results = _inline(*body, values) if body and fits else bind(equation, values)
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
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if (body := equation.params.get(name)) is not None:
            closed = hasattr(body, "jaxpr")
            return (body.jaxpr, body.consts) if closed else (body, ())
    return None


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
        if equation.effects or any(v in wanted for v in equation.outvars):
            chosen.add(i)
            wanted.update(variables(equation.invars))
    return chosen


def variables(values: Iterable[Any]) -> list[Var]:
    """Return those values that are variables of a program."""
    return [v for v in values if isinstance(v, Var)]


def bytes_of(avals: Iterable[Any]) -> int:
    """Return how many bytes arrays of these shapes and dtypes take."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)


class Residuals:
    """What a pullback keeps: known, a literal, made from what is known, or stashed."""

    def __init__(self, whole: Piece, kept: Sequence[Any], n_known: int):
        self.kept, self.known = kept, list(whole.inputs[:n_known])
        depends = set(whole.inputs[n_known:])
        for equation in whole.equations:
            if any(v in depends for v in variables(equation.invars)):
                depends.update(equation.outvars)
        self.stashed = list(dict.fromkeys(v for v in variables(kept) if v in depends))
        at_hand = depends.union(self.known, whole.constants)
        remade = [v for v in variables(kept) if v not in at_hand]
        self.remade = list(dict.fromkeys(remade))
        self.remake = whole.part(self.remade, self.known)

    def all(self, known: Sequence[Any], stash: Sequence[Any], constants: Any = None) -> list[Any]:
        """Return every residual, from what is known and what was stashed.

        `constants` stand for those that the program closes over, which may be of another trace.
        """
        remake = self.remake
        if constants is not None:
            held = dict(zip(remake.constants, constants, strict=True))
            remake = replace(remake, constants=held)
        values = dict(zip(self.known, known, strict=True)) | remake.constants
        values |= zip(self.stashed, stash, strict=True)
        values |= zip(self.remade, remake(*known), strict=True)
        return [v.val if isinstance(v, Literal) else values[v] for v in self.kept]


# What hands a tensor on in another form: the one that made it is further back.
_SAME = (
    "reshape",
    "transpose",
    "squeeze",
    "expand_dims",
    "copy",
    "convert_element_type",
    "name",
    "sharding_constraint",
    "reduce_precision",
    "optimization_barrier",
)


def tensors_of(program: Piece, kept: Iterable[Var]) -> list[Tensor]:
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
