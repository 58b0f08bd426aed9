"""Branches over a layer: whether idle slots may skip it, and what of it stays outside.

All devices of a stage take the same branch, so what they send each other in it waits for nobody. A
permute is of all stages: in a branch that one of them does not take it waits for ever.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr
from jax.sharding import Mesh

from hfjax.parallel.jaxprs.program import Piece, bodies_of, piece, variables
from hfjax.parallel.mesh import EXPERT_AXES, SEQUENCE_AXES, in_use, sides

GATHERS = ("all_gather", "all_gather_invariant")


def own_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes in use over which layers send what is no parameter, but for tensor."""
    return (*sides(mesh), *in_use(mesh, (*EXPERT_AXES, *SEQUENCE_AXES)))


def permuted_axes(program: Jaxpr) -> list[str]:
    """Return the axes over which a program permutes, be it in a branch or loop of its own.

    >>> both = lambda x: lax.cond(x > 0, lambda x: lax.ppermute(x, "data", [(0, 0)]), abs, x)
    >>> permuted_axes(jax.make_jaxpr(both, axis_env=[("data", 1)])(1.0).jaxpr)
    ['data']
    """
    found: set[str] = set()
    for equation in program.eqns:
        if equation.primitive.name == "ppermute":
            axes = equation.params["axis_name"]
            found.update([axes] if isinstance(axes, str) else axes)
        found.update(axis for body, _ in bodies_of(equation) for axis in permuted_axes(body))
    return sorted(found)


def check_permutes(permuted: list[str], written: str) -> None:
    """Refuse permutes in layers that stages skip."""
    if permuted:
        raise ValueError(
            f"{written}: a layer permutes over {', '.join(permuted)}, and a permute waits for the "
            "devices of all stages: those that skip the layer would let the others wait for ever. "
            "Use another collective in the layer (psum, all_gather, all_to_all), or a schedule "
            'that needs no branches (1f1b, interleaved, gpipe, zb, v) with branches="auto".'
        )


def after_gathers(there: jax.Array, run: Callable, skip: Callable, *operands: Any) -> Any:
    """Return what `lax.cond` does; what `run` gathers and needs no operand for, is gathered before.

    XLA starts a gather early only where it does not have to move it out of a branch.
    """
    form: list[Any] = []

    def told(*operands):
        results = run(*operands)
        form[:] = [jax.tree.structure(results)]
        return results

    program = piece(told, *operands)
    first, rest = _apart(program)
    gathered = [v for equation in first for v in equation.outvars]
    left = Piece(rest, [*program.inputs, *gathered], program.outputs, program.constants)
    flat = jax.tree.leaves(operands)
    values = program.part(gathered)(*flat)
    work = lambda *given: form[0].unflatten(left(*given))
    rest_of = lambda *given: skip(
        *jax.tree.unflatten(jax.tree.structure(operands), given[: len(flat)])
    )
    return lax.cond(there, work, rest_of, *flat, *values)


def _apart(program: Piece) -> tuple[list[Any], list[Any]]:
    """Return the gathers of a program that need no input of it, and all other equations."""
    depends, first, rest = set(program.inputs), [], []
    for equation in program.equations:
        alone = depends.isdisjoint(variables(equation.invars))
        if not alone:
            depends.update(equation.outvars)
        (first if alone and equation.primitive.name in GATHERS else rest).append(equation)
    return first, rest
