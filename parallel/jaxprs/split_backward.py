"""The passes of one layer: forward, backward, and backward in two halves.

`jax.vjp` decides what a backward pass needs; here its program is read as data. A backward pass
saves only what depends on the layer's input: casts and gathers of parameters, and masks from random
keys, are recomputed. The equations that the input's gradient depends on are B, the rest is W;
values that pass from B to W are saved as well (zero bubble, arXiv:2401.10241).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from hfjax.parallel.jaxprs.primitives import (
    COLLECTIVES,
    CONTROL_FLOW,
    CUMULATIVE,
    INDEXING,
    KERNELS,
    MATMULS,
    RAGGED_MATMULS,
    VIEWS,
)
from hfjax.parallel.jaxprs.program import (
    FlatProgram,
    Residuals,
    split_by_trees,
    trace_flat,
)
from hfjax.parallel.jaxprs.saved_tensor import Tensor, bytes_of
from hfjax.parallel.jaxprs.stage_fns import to_arrays, to_cotangents
from hfjax.parallel.jaxprs.walk import body_of, needed_equations, variables

# Equations that W does not recompute if it can have their results from B.
_EXPENSIVE = frozenset("shard_map sort random_bits threefry2x32".split()).union(
    MATMULS, RAGGED_MATMULS, CONTROL_FLOW, KERNELS, INDEXING, CUMULATIVE, COLLECTIVES
)


@dataclass(frozen=True)
class SplitBackward:
    """A layer's passes as functions; what they pass on are lists (or dicts) of arrays.

    forward(known, x) -> (y, stash, w_residuals);
    backward(known, stash, w_residuals, dy) -> (dx, gradients); or in two halves:
    input_backward(known, stash, w_residuals, dy) -> (dx, b_to_w) and
    weight_backward(known, w_residuals, b_to_w) -> gradients.
    `stash` is kept until B, `w_residuals` until W.
    """

    forward: Callable
    backward: Callable
    input_backward: Callable
    weight_backward: Callable
    stash: Any  # shapes and dtypes
    w_residuals: Any
    b_to_w: Any
    tensors: Sequence[Tensor] = ()  # of stash, then of w_residuals, if known


def trace_passes(layer: Callable, known: Any, slots: Any, x: Any, split: bool) -> SplitBackward:
    """Return the passes of `layer(known, slots, x) -> y` (y like x).

    The gradients are those of `slots`, whose values the layer does not read.
    """

    def with_pullback(known, x) -> tuple[Any, Callable]:
        y, pullback = jax.vjp(lambda slots, x: layer(known, slots, x), slots, x)
        check_same_shapes(x, y)
        return y, pullback

    residuals = Residuals(with_pullback, known, x)

    def pull(known, stash: Sequence[Any], dy: Sequence[Any]) -> tuple:
        dy = to_cotangents(jax.tree.structure(x).unflatten(dy))
        gradients, dx = residuals.pullback(known, stash, residuals.constants)(dy)
        return to_arrays(dx, x), gradients

    backward_program = trace_flat(pull, known, residuals.stash, residuals.out)
    return _split_passes(residuals, backward_program, known, slots, x, split)


def _split_passes(
    residuals: Residuals, backward_program: FlatProgram, known: Any, slots: Any, x: Any, split: bool
) -> SplitBackward:
    """Return the passes from the program of a backward pass: (known, stash, dy) -> (dx, slots)."""
    known, stash, dy = split_by_trees(backward_program.inputs, known, residuals.stash, x)
    dx, gradients = split_by_trees(backward_program.outputs, x, slots)
    w_program, b_to_w = _weight_half(backward_program, dx, gradients, dy)
    w_reads = w_program.read_vars if split else ()
    w_ids = [i for i, v in enumerate(stash) if v in w_reads]
    b_ids = [i for i in range(len(stash)) if i not in w_ids]

    def forward(known, x) -> tuple[Any, list, list]:
        y, stash = residuals.forward(known, x)
        return y, [stash[i] for i in b_ids], [stash[i] for i in w_ids]

    b_inputs = [*known, *(stash[i] for i in (*b_ids, *w_ids)), *dy]
    w_inputs = [*known, *(stash[i] for i in w_ids), *b_to_w]
    structure = jax.tree.structure
    return SplitBackward(
        forward,
        backward=backward_program.function(b_inputs, [*dx, *gradients], structure((x, slots))),
        input_backward=backward_program.function(b_inputs, [*dx, *b_to_w], structure((x, b_to_w))),
        weight_backward=w_program.function(w_inputs, gradients, structure(slots)),
        stash=[residuals.stash[i] for i in b_ids],
        w_residuals=[residuals.stash[i] for i in w_ids],
        b_to_w=[v.aval for v in b_to_w],
        tensors=[residuals.tensors[i] for i in (*b_ids, *w_ids)],
    )


def _weight_half(
    backward_program: FlatProgram, dx: Sequence[Any], gradients: Sequence[Any], dy: Sequence[Var]
) -> tuple[FlatProgram, list[Var]]:
    """Return W, what the input's gradient does not need; and the values that pass from B to W."""
    w_equations = needed_equations(backward_program.equations, gradients) - needed_equations(
        backward_program.equations, dx
    )
    w_equations -= _cheaper_in_b(backward_program.equations, w_equations)
    b_to_w, numbers = _find_b_to_w(backward_program, w_equations, gradients, set(dy))
    equations = [backward_program.equations[i] for i in sorted(numbers)]
    w_program = FlatProgram(
        equations, backward_program.inputs, gradients, backward_program.constants
    )
    w_reads = w_program.read_vars
    return w_program, [*b_to_w, *(v for v in dy if v in w_reads)]


def _find_b_to_w(
    backward_program: FlatProgram, w_equations: set[int], gradients: Sequence[Any], dy: set[Var]
) -> tuple[list[Var], set[int]]:
    """Return the values that pass from B to W, and W with what is cheaper to recompute."""
    producers = {v: i for i, e in enumerate(backward_program.equations) for v in e.outvars}
    recompute = _Recompute(backward_program.equations, producers, dy)
    targets = [v for i in w_equations for v in backward_program.equations[i].invars] + list(
        gradients
    )
    b_to_w, todo = [], list(dict.fromkeys(variables(targets)))
    w_and_recomputed = set(w_equations)
    for v in todo:  # grows
        if v not in producers or producers[v] in w_equations:
            continue
        cheap = recompute.equations(v)
        if cheap is not None:
            w_and_recomputed |= cheap
        elif backward_program.equations[producers[v]].primitive.name in VIEWS:
            w_and_recomputed.add(producers[v])
            new = variables(backward_program.equations[producers[v]].invars)
            todo += [u for u in new if u not in todo]
        else:
            b_to_w.append(v)
    return b_to_w, w_and_recomputed


def _cheaper_in_b(equations: Sequence[Any], w_equations: set[int]) -> set[int]:
    """Return the equations of W that B runs, since their results are smaller than their operands.

    For instance attention's p @ v, of which W needs only the result: else p would pass to W. Not so
    the matmuls that are the gradients of weights themselves.
    """
    w_outputs = {v for i in w_equations for v in equations[i].outvars}
    feeding, live_vars = set(), set()
    for i in sorted(w_equations, reverse=True):
        if any(v in live_vars for v in equations[i].outvars):
            feeding.add(i)
        if i in feeding or equations[i].primitive.name in _EXPENSIVE:
            live_vars.update(variables(equations[i].invars))
    b_equations = set()
    for i in sorted(feeding):
        operands = variables(equations[i].invars)
        smaller = bytes_of(v.aval for v in equations[i].outvars) < bytes_of(
            v.aval for v in operands
        )
        if smaller and not w_outputs.intersection(operands):
            b_equations.add(i)
            w_outputs.difference_update(equations[i].outvars)
    return b_equations


class _Recompute:
    """Which values elementwise operations alone make from what is known or stashed."""

    def __init__(self, equations: Sequence[Any], producers: dict[Var, int], dy: set[Var]) -> None:
        self.all_equations, self.producers, self.dy = equations, producers, dy
        self.cache: dict[Var, frozenset[int] | None] = {}

    def equations(self, v: Var | Literal) -> frozenset[int] | None:
        """Return the equations that recompute a value; None if that is expensive or needs dy."""
        if isinstance(v, Literal) or (v not in self.producers and v not in self.dy):
            return frozenset()
        if v in self.dy:
            return None
        if v not in self.cache:
            self.cache[v] = self._through_equation(self.producers[v])
        return self.cache[v]

    def _through_equation(self, i: int) -> frozenset[int] | None:
        equation = self.all_equations[i]
        if equation.primitive.name in _EXPENSIVE or body_of(equation) is not None:
            return None
        operand_sets = [self.equations(u) for u in equation.invars]
        if any(operand_set is None for operand_set in operand_sets):
            return None
        return frozenset([i]).union(
            *(operand_set for operand_set in operand_sets if operand_set is not None)
        )


def zeros_like(shapes: Any) -> Any:
    """Return zeros of these shapes and dtypes."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


def check_same_shapes(x: Any, y: Any) -> None:
    """Refuse a stacked layer whose output has other shapes or dtypes than its input."""
    shape = lambda tree: [(jnp.shape(a), jnp.result_type(a)) for a in jax.tree.leaves(tree)]
    if jax.tree.structure(x) != jax.tree.structure(y) or shape(x) != shape(y):
        size = lambda a: ",".join(map(str, jax.numpy.shape(a)))
        show = lambda tree: ", ".join(
            f"{jax.numpy.result_type(a)}[{size(a)}]" for a in jax.tree.leaves(tree)
        )
        raise ValueError(
            f"a layer is given {show(x)} and returns {show(y)}: stacked layers hand on what they "
            "are given. Make the shapes and dtypes equal (a cast at the end of the layer), or give "
            "a plain list of layers."
        )
