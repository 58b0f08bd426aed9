"""Branches around a layer: whether idle slots may skip it, and what stays outside of the branch.

All devices of a stage take the same branch, so collectives among them cannot deadlock in it. A
permute involves all stages: in a branch that one of them does not take, it waits for ever.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr
from jax.sharding import Mesh

from hfjax.parallel.jaxprs.primitives import ALL_GATHERS
from hfjax.parallel.jaxprs.program import FlatProgram, trace_flat
from hfjax.parallel.jaxprs.walk import dependent_vars, equations_in, variables
from hfjax.parallel.mesh import EXPERT_AXES, SEQUENCE_AXES, grid_axes, in_use


def layer_comm_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes in use, except tensor, over which layers send anything but parameters."""
    return (*grid_axes(mesh), *in_use(mesh, (*EXPERT_AXES, *SEQUENCE_AXES)))


def find_permute_axes(program: Jaxpr) -> list[str]:
    """Return the axes over which a program permutes, including in its branches and loops.

    >>> both = lambda x: lax.cond(x > 0, lambda x: lax.ppermute(x, "data", [(0, 0)]), abs, x)
    >>> find_permute_axes(jax.make_jaxpr(both, axis_env=[("data", 1)])(1.0).jaxpr)
    ['data']
    """
    permutes = [e for e, _ in equations_in(program) if e.primitive.name == "ppermute"]
    axes = [e.params["axis_name"] for e in permutes]
    return sorted({axis for one in axes for axis in ([one] if isinstance(one, str) else one)})


def check_permutes(permuted: list[str], source: str) -> None:
    """Refuse permutes in layers that stages skip."""
    if permuted:
        raise ValueError(
            f"{source}: a layer permutes over {', '.join(permuted)}, and a permute waits for the "
            "devices of all stages: those that skip the layer would let the others wait for ever. "
            "Use another collective in the layer (psum, all_gather, all_to_all), or a schedule "
            'that needs no branches (1f1b, interleaved, gpipe, zb, v) with branches="auto".'
        )


def cond_after_gathers(pred: jax.Array, run: Callable, skip: Callable, *operands: Any) -> Any:
    """Return what `lax.cond` does; all-gathers of `run` that need no operand run before it.

    XLA starts an all-gather early only where it does not have to move it out of a branch.
    """
    out_tree: list[Any] = []

    def run_and_record_out_tree(*operands):
        results = run(*operands)
        out_tree[:] = [jax.tree.structure(results)]
        return results

    program = trace_flat(run_and_record_out_tree, *operands)
    first, rest = _split_independent_gathers(program)
    gathered = [v for equation in first for v in equation.outvars]
    branch_program = FlatProgram(
        rest, [*program.inputs, *gathered], program.outputs, program.constants
    )
    flat = jax.tree.leaves(operands)
    values = program.subprogram(gathered)(*flat)
    run_flat = lambda *args: out_tree[0].unflatten(branch_program(*args))
    skip_flat = lambda *args: skip(
        *jax.tree.unflatten(jax.tree.structure(operands), args[: len(flat)])
    )
    return lax.cond(pred, run_flat, skip_flat, *flat, *values)


def _split_independent_gathers(program: FlatProgram) -> tuple[list[Any], list[Any]]:
    """Return the all-gathers of a program that need none of its inputs, and all other equations."""
    of_inputs = dependent_vars(program.inputs, program.equations)
    is_first = lambda e: (
        e.primitive.name in ALL_GATHERS and of_inputs.isdisjoint(variables(e.invars))
    )
    first = [e for e in program.equations if is_first(e)]
    return first, [e for e in program.equations if not is_first(e)]
