"""Programs as data: the equations of a function, some of them, and the residuals of a pullback.

`jax.vjp` decides which residuals a backward pass needs; `Residuals` reads its program. Residuals
that depend on the input must be saved; those that follow from parameters and random keys alone
(casts, gathers, masks) are recomputed. Each one that is saved has a description (`Tensor`): the
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
# Calls whose body is inlined, so that dataflow is seen through them.
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
    """One tensor that is saved for a backward pass: the operation that made it, and its names."""

    operation: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    names: frozenset[str] = frozenset()


@dataclass(frozen=True)
class FlatProgram:
    """Some equations of a program with inputs and outputs of their own."""

    equations: Sequence[Any]
    inputs: Sequence[Var]
    outputs: Sequence[Any]
    constants: dict[Var, Any]

    def __call__(self, *values: Any) -> list[Any]:
        env = {**self.constants, **dict(zip(self.inputs, values, strict=True))}
        return _eval_equations(self.equations, env, self.outputs)

    def subprogram(
        self, targets: Sequence[Any], inputs: Sequence[Var] | None = None
    ) -> "FlatProgram":
        """Return the program that computes only these targets."""
        equations = [self.equations[i] for i in sorted(needed_equations(self.equations, targets))]
        inputs = self.inputs if inputs is None else inputs
        return FlatProgram(equations, inputs, list(targets), self.constants)

    def function(self, inputs: Sequence[Var], targets: Sequence[Any], out_tree: Any) -> Callable:
        """Return a function of trees that computes these targets, its result of this structure."""
        program = self.subprogram(targets, inputs)
        return lambda *args: out_tree.unflatten(program(*jax.tree.leaves(args)))

    @property
    def read_vars(self) -> set[Var]:
        """The variables that its equations read, and its outputs."""
        operands = (equation.invars for equation in self.equations)
        return {v for values in (*operands, self.outputs) for v in variables(values)}


def trace_flat(
    function: Callable, *arguments: Any, override: Callable | None = None
) -> FlatProgram:
    """Return the program of a function of trees, with calls inlined.

    Its inputs and outputs are the leaves of the function's arguments and results.
    `override(equation, values)` may run in place of an equation, by default `inline_call`.
    """
    closed_jaxpr = jax.make_jaxpr(function)(*arguments)
    run = lambda *values: eval_jaxpr(
        closed_jaxpr.jaxpr, closed_jaxpr.consts, values, override or inline_call
    )
    flat = jax.make_jaxpr(run)(*jax.tree.leaves(arguments))
    constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    return FlatProgram(flat.jaxpr.eqns, flat.jaxpr.invars, flat.jaxpr.outvars, constants)


def eval_jaxpr(jaxpr: Jaxpr, constants: Sequence, values: Sequence, override: Callable) -> list:
    """Return the outputs of a program for these values."""
    env = dict(zip(jaxpr.constvars, constants, strict=True))
    env |= zip(jaxpr.invars, values, strict=True)
    return _eval_equations(jaxpr.eqns, env, jaxpr.outvars, override)


def inline_call(
    equation: JaxprEqn, values: Sequence, override: Callable | None = None
) -> list | None:
    """Return the outputs of the body of a call; None: it is no call."""
    body = body_of(equation) if equation.primitive.name in CALLS else None
    fits = body is not None and len(body[0].invars) == len(values)
    return eval_jaxpr(*body, values, override or inline_call) if body and fits else None


def _eval_equations(
    equations: Sequence, env: dict, outputs: Sequence, override: Any = None
) -> list:
    read = lambda v: v.val if isinstance(v, Literal) else env[v]
    for equation in equations:
        values = [read(v) for v in equation.invars]
        results = override and override(equation, values)
        results = bind(equation, values) if results is None else results
        env.update(zip(equation.outvars, results, strict=True))
    return [read(v) for v in outputs]


def bind(equation: JaxprEqn, values: Sequence[Any]) -> Sequence[Any]:
    """Return the outputs of an equation for these values."""
    parameters = equation.primitive.get_bind_params(equation.params)
    functions: Iterable[Any] = ()
    if isinstance(parameters, tuple):  # (functions, parameters) before jax 0.11
        functions, parameters = parameters
    with equation.ctx.manager:
        results = equation.primitive.bind(*functions, *values, **parameters)
    return results if equation.primitive.multiple_results else [results]


def body_of(equation: JaxprEqn) -> tuple[Any, Sequence[Any]] | None:
    """Return the program of a call, loop or branch with its constants; None if it has none."""
    candidates = (equation.params.get(name) for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"))
    return next((_with_constants(body) for body in candidates if body is not None), None)


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


def variables(values: Iterable[Any]) -> list[Var]:
    """Return those values that are variables of a program."""
    return [v for v in values if isinstance(v, Var)]


def split_by_trees(values: Sequence[Any], *trees: Any) -> list[list]:
    """Return for each tree a list of as many of the values, in order, as it has leaves."""
    rest = iter(values)
    return [list(islice(rest, len(jax.tree.leaves(tree)))) for tree in trees]


def bytes_of(avals: Iterable[Any]) -> int:
    """Return the total bytes of arrays of these shapes and dtypes."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in avals)


class Residuals:
    """A function and its pullback as data: a residual is known, recomputed from that, or stashed.

    `function(known, x) -> (out, pullback)` is traced once, for arguments like these.

    Attributes:
        forward: (known, x) -> (out, stash): stash is the list of residuals that depend on x.
        out: Shapes and dtypes of the arrays of `out`.
        stash: Those of the stashed residuals.
        tensors: A description of each of these.
        constants: What the program closes over.
        reads_known: Which leaves of `known` the pullback reads.
    """

    def __init__(self, function: Callable, known: Any, x: Any) -> None:
        out_trees: list[Any] = []

        def call_recording_trees(known, x) -> tuple:
            results = function(known, x)
            out_trees[:] = map(jax.tree.structure, results)
            return results

        program = trace_flat(call_recording_trees, known, x)
        self._known_vars, x = split_by_trees(program.inputs, known, x)
        out, self._pullback_tree = out_trees
        outputs, self._residuals = (
            program.outputs[: out.num_leaves],
            program.outputs[out.num_leaves :],
        )
        residual_vars, dependents = (
            dict.fromkeys(variables(self._residuals)),
            _dependents(x, program.equations),
        )
        available = dependents.union(self._known_vars, program.constants)
        self._recompute = program.subprogram(
            [v for v in residual_vars if v not in available], self._known_vars
        )
        self._stash_vars = [v for v in residual_vars if v in dependents]
        used_vars = self._recompute.read_vars.union(residual_vars)
        self.reads_known = [v in used_vars for v in self._known_vars]
        out_tree = treedef_tuple((out, jax.tree.structure(self._stash_vars)))
        self.forward = program.function(program.inputs, [*outputs, *self._stash_vars], out_tree)
        self.out, self.stash = ([v.aval for v in values] for values in (outputs, self._stash_vars))
        self.tensors = _describe_residuals(program, self._stash_vars)
        self.constants = list(program.constants.values())

    def pullback(self, known: Any, stash: Sequence[Any], constants: Sequence[Any]) -> Callable:
        """Return the pullback; in another trace its constants are other tracers."""
        known_leaves = jax.tree.leaves(known)
        constant_values = dict(zip(self._recompute.constants, constants, strict=True))
        values = constant_values | dict(zip(self._known_vars, known_leaves, strict=True))
        values |= zip(self._stash_vars, stash, strict=True)
        recomputed = replace(self._recompute, constants=constant_values)(*known_leaves)
        values |= zip(self._recompute.outputs, recomputed, strict=True)
        read = lambda v: v.val if isinstance(v, Literal) else values[v]
        return self._pullback_tree.unflatten([read(v) for v in self._residuals])


def _dependents(inputs: Iterable[Var], equations: Iterable[Any]) -> set[Var]:
    """Return these inputs, and all variables that depend on them."""
    dependents = set(inputs)
    for equation in equations:
        if not dependents.isdisjoint(variables(equation.invars)):
            dependents.update(equation.outvars)
    return dependents


# What passes on a tensor in another form: the equation that made it is further back.
_PASS_THROUGH = (
    *("reshape", "transpose", "squeeze", "expand_dims", "copy", "convert_element_type", "name"),
    *("sharding_constraint", "reduce_precision", "optimization_barrier"),
)


def _describe_residuals(program: FlatProgram, residual_vars: Iterable[Var]) -> list[Tensor]:
    """Return a description of each of these variables of a program."""
    producers = {v: e for e in program.equations for v in e.outvars}
    names = _names(program)
    return [_describe_residual(v, producers, names) for v in residual_vars]


def _describe_residual(v: Var, producers: Mapping, names: Mapping[Var, set[str]]) -> Tensor:
    source, all_names = v, set(names.get(v, ()))
    while source in producers and producers[source].primitive.name in _PASS_THROUGH:
        source = producers[source].invars[0]
        all_names |= names.get(source, set())
    operation = producers[source].primitive.name if source in producers else "input"
    aval: Any = v.aval
    return Tensor(operation, aval.shape, str(aval.dtype), bytes_of([aval]), frozenset(all_names))


def _names(program: FlatProgram) -> dict[Var, set[str]]:
    """Return the names that tensors were given by `checkpoint_name`, before and after it."""
    names: dict[Var, set[str]] = {}
    for equation in program.equations:
        if equation.primitive.name == "name":
            for v in (*equation.invars, *equation.outvars):
                if isinstance(v, Var):
                    names.setdefault(v, set()).add(equation.params["name"])
    return names


def describe_packed(avals: Iterable[Any]) -> list[Tensor]:
    """Return a description of arrays into which several tensors are packed."""
    return [Tensor("packed", a.shape, str(a.dtype), bytes_of([a])) for a in avals]
