"""Programs as data: the equations of a function, some of them, and the residuals of a pullback.

`jax.vjp` decides which residuals a backward pass needs; `Residuals` reads its program. Residuals
that depend on the input must be saved; those that follow from parameters and random keys alone
(casts, gathers, masks) are recomputed. Each one that is saved has a description (`Tensor`): the
operation that made it, and its name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import jax
from jax.extend.core import Literal, Var
from jax.tree_util import treedef_tuple

from hfjax.parallel.jaxprs.bind import bind, inline_calls
from hfjax.parallel.jaxprs.primitives import ANNOTATIONS, CASTS, VIEWS
from hfjax.parallel.jaxprs.saved_tensor import Tensor, bytes_of
from hfjax.parallel.jaxprs.walk import (
    dependent_vars,
    interpret,
    interpret_jaxpr,
    name_of,
    needed_equations,
    params_of,
    variables,
)


@dataclass(frozen=True)
class FlatProgram:
    """Some equations of a program with inputs and outputs of their own."""

    equations: Sequence[Any]
    inputs: Sequence[Var]
    outputs: Sequence[Any]
    constants: dict[Var, Any]

    def __call__(self, *values: Any) -> list[Any]:
        env = {**self.constants, **dict(zip(self.inputs, values, strict=True))}
        return interpret(self.equations, env, self.outputs, bind)

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
    function: Callable, *arguments: Any, run: Callable[..., Sequence] = inline_calls
) -> FlatProgram:
    """Return the program of a function of trees, with calls inlined.

    Its inputs and outputs are the leaves of the function's arguments and results.
    `run(equation, values)` runs an equation.
    """
    closed_jaxpr = jax.make_jaxpr(function)(*arguments)
    evaluate = lambda *values: interpret_jaxpr(closed_jaxpr.jaxpr, closed_jaxpr.consts, values, run)
    flat = jax.make_jaxpr(evaluate)(*jax.tree.leaves(arguments))
    constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
    return FlatProgram(flat.jaxpr.eqns, flat.jaxpr.invars, flat.jaxpr.outvars, constants)


def split_by_trees(values: Sequence[Any], *trees: Any) -> list[list]:
    """Return for each tree a list of as many of the values, in order, as it has leaves."""
    rest = iter(values)
    return [list(islice(rest, len(jax.tree.leaves(tree)))) for tree in trees]


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
            dependent_vars(x, program.equations),
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


def _describe_residuals(program: FlatProgram, residual_vars: Iterable[Var]) -> list[Tensor]:
    """Return a description of each of these variables of a program."""
    producers = {v: e for e in program.equations for v in e.outvars}
    names = _names(program)
    return [_describe_residual(v, producers, names) for v in residual_vars]


def _describe_residual(v: Var, producers: Mapping, names: Mapping[Var, set[str]]) -> Tensor:
    source, all_names = v, set(names.get(v, ()))
    unchanged = VIEWS | CASTS | ANNOTATIONS  # the equation that made it is further back
    while source in producers and name_of(producers[source]) in unchanged:
        source = producers[source].invars[0]
        all_names |= names.get(source, set())
    operation = name_of(producers[source]) if source in producers else "input"
    aval: Any = v.aval
    return Tensor(operation, aval.shape, str(aval.dtype), bytes_of([aval]), frozenset(all_names))


def _names(program: FlatProgram) -> dict[Var, set[str]]:
    """Return the names that tensors were given by `checkpoint_name`, before and after it."""
    names: dict[Var, set[str]] = {}
    for equation in program.equations:
        if name_of(equation) == "name":
            for v in (*equation.invars, *equation.outvars):
                if isinstance(v, Var):
                    names.setdefault(v, set()).add(params_of(equation)["name"])
    return names


def describe_packed(avals: Iterable[Any]) -> list[Tensor]:
    """Return a description of arrays into which several tensors are packed."""
    return [Tensor("packed", a.shape, str(a.dtype), bytes_of([a])) for a in avals]
