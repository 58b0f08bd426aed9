"""One layer taken apart: its forward pass, its backward pass, and that in two halves.

`jax.vjp` decides what a backward pass needs; here its program is read as data. What a backward
pass keeps is only what depends on the layer's input: casts and gathers of parameters, masks from
random keys are done again. The equations from which the input's gradient follows are B, the rest
is W; values that cross from B to W are kept as well (zero bubble, arXiv:2401.10241).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal, Var

from hfjax.parallel.jaxprs.program import (
    Piece,
    Residuals,
    Tensor,
    body_of,
    bytes_of,
    grouped,
    needed,
    piece,
    variables,
)
from hfjax.parallel.jaxprs.stage_fns import arrays_of, cotangents

# Equations that W does not do again when it could have their results from B.
_DEAR = (
    "dot_general",
    "conv_general_dilated",
    "scan",
    "while",
    "cond",
    "shard_map",
    "pallas_call",
    "custom_call",
    "ffi_call",
    "sort",
    "gather",
    "scatter",
    "scatter-add",
    "cumsum",
    "ragged_dot",
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "psum",
    "psum_invariant",
    "ppermute",
    "reduce_scatter",
    "random_bits",
    "threefry2x32",
)
_VIEWS = ("reshape", "transpose", "squeeze", "expand_dims", "copy")


@dataclass(frozen=True)
class Dissected:
    """A layer's passes as functions; what they hand on are lists (or dicts) of arrays.

    forward(known, x) -> (y, stash, late); backward(known, stash, late, dy) -> (dx, gradients);
    or in two halves: input_backward(known, stash, late, dy) -> (dx, cross) and
    weight_backward(known, late, cross) -> gradients. `stash` waits for B, `late` for W too.
    """

    forward: Callable
    backward: Callable
    input_backward: Callable
    weight_backward: Callable
    stash: Any  # shapes and dtypes
    late: Any
    cross: Any
    tensors: Sequence[Tensor] = ()  # what is in stash, then in late, if that is known


def dissect(layer: Callable, known: Any, slots: Any, x: Any, split: bool) -> Dissected:
    """Return the passes of `layer(known, slots, x) -> y` (y like x).

    The gradients are those of `slots`, whose values the layer does not read.
    """

    def with_pullback(known, x) -> tuple[Any, Callable]:
        y, pullback = jax.vjp(lambda slots, x: layer(known, slots, x), slots, x)
        check_same(x, y)
        return y, pullback

    ahead = Residuals(with_pullback, known, x)

    def pull(known, stash: Sequence[Any], dy: Sequence[Any]) -> tuple:
        dy = cotangents(jax.tree.structure(x).unflatten(dy))
        gradients, dx = ahead.pullback(known, stash, ahead.constants)(dy)
        return arrays_of(dx, x), gradients

    behind = piece(pull, known, ahead.stash, ahead.out)
    return _passes(ahead, behind, known, slots, x, split)


def _passes(
    ahead: Residuals, behind: Piece, known: Any, slots: Any, x: Any, split: bool
) -> Dissected:
    """Return the passes, of the program of a backward pass: (known, stash, dy) -> (dx, slots)."""
    known, stash, dy = grouped(behind.inputs, known, ahead.stash, x)
    dx, gradients = grouped(behind.outputs, x, slots)
    second, cross = _second_half(behind, dx, gradients, dy)
    used = second.reads if split else ()
    late = [i for i, v in enumerate(stash) if v in used]
    early = [i for i in range(len(stash)) if i not in late]

    def forward(known, x) -> tuple[Any, list, list]:
        y, stash = ahead.forward(known, x)
        return y, [stash[i] for i in early], [stash[i] for i in late]

    given = [*known, *(stash[i] for i in (*early, *late)), *dy]
    by_weights = [*known, *(stash[i] for i in late), *cross]
    form = jax.tree.structure
    return Dissected(
        forward,
        backward=behind.function(given, [*dx, *gradients], form((x, slots))),
        input_backward=behind.function(given, [*dx, *cross], form((x, cross))),
        weight_backward=second.function(by_weights, gradients, form(slots)),
        stash=[ahead.stash[i] for i in early],
        late=[ahead.stash[i] for i in late],
        cross=[v.aval for v in cross],
        tensors=[ahead.tensors[i] for i in (*early, *late)],
    )


def _second_half(
    behind: Piece, dx: Sequence[Any], gradients: Sequence[Any], dy: Sequence[Var]
) -> tuple[Piece, list[Var]]:
    """Return W, what of a backward pass the input's gradient does not need; what crosses to it."""
    second = needed(behind.equations, gradients) - needed(behind.equations, dx)
    second -= _better_early(behind.equations, second)
    cross, numbers = _crossing(behind, second, gradients, set(dy))
    equations = [behind.equations[i] for i in sorted(numbers)]
    second_half = Piece(equations, behind.inputs, gradients, behind.constants)
    used = second_half.reads
    return second_half, [*cross, *(v for v in dy if v in used)]


def _crossing(
    behind: Piece, second: set[int], gradients: Sequence[Any], dy: set[Var]
) -> tuple[list[Var], set[int]]:
    """Return the values that cross, and the second half with what is cheaper to redo."""
    makes = {v: i for i, e in enumerate(behind.equations) for v in e.outvars}
    redo = _Redo(behind.equations, makes, dy)
    wanted = [v for i in second for v in behind.equations[i].invars] + list(gradients)
    cross, todo = [], list(dict.fromkeys(variables(wanted)))
    again = set(second)
    for v in todo:  # grows
        if v not in makes or makes[v] in second:
            continue
        cheap = redo.equations(v)
        if cheap is not None:
            again |= cheap
        elif behind.equations[makes[v]].primitive.name in _VIEWS:
            again.add(makes[v])
            new = variables(behind.equations[makes[v]].invars)
            todo += [u for u in new if u not in todo]
        else:
            cross.append(v)
    return cross, again


def _better_early(equations: Sequence[Any], second: set[int]) -> set[int]:
    """Return the equations of W that B does, since their results are smaller than what they eat.

    For instance attention's p @ v, of which W needs only the result: else p would cross. Not so
    the products that are the gradients of weights themselves.
    """
    made_late = {v for i in second for v in equations[i].outvars}
    feeds, wanted = set(), set()
    for i in sorted(second, reverse=True):
        if any(v in wanted for v in equations[i].outvars):
            feeds.add(i)
        if i in feeds or equations[i].primitive.name in _DEAR:
            wanted.update(variables(equations[i].invars))
    early = set()
    for i in sorted(feeds):
        eaten = variables(equations[i].invars)
        smaller = bytes_of(v.aval for v in equations[i].outvars) < bytes_of(v.aval for v in eaten)
        if smaller and not made_late.intersection(eaten):
            early.add(i)
            made_late.difference_update(equations[i].outvars)
    return early


class _Redo:
    """Which values elementwise work alone makes from what is known or stashed."""

    def __init__(self, equations: Sequence[Any], makes: dict[Var, int], dy: set[Var]) -> None:
        self.all, self.makes, self.dy = equations, makes, dy
        self.seen: dict[Var, frozenset[int] | None] = {}

    def equations(self, v: Var | Literal) -> frozenset[int] | None:
        """Return the equations that make a value again; None if that is dear or needs dy."""
        if isinstance(v, Literal) or (v not in self.makes and v not in self.dy):
            return frozenset()
        if v in self.dy:
            return None
        if v not in self.seen:
            self.seen[v] = self._from(self.makes[v])
        return self.seen[v]

    def _from(self, i: int) -> frozenset[int] | None:
        equation = self.all[i]
        if equation.primitive.name in _DEAR or body_of(equation) is not None:
            return None
        parts = [self.equations(u) for u in equation.invars]
        if any(part is None for part in parts):
            return None
        return frozenset([i]).union(*(part for part in parts if part is not None))


def zeros_like(shapes: Any) -> Any:
    """Return zeros of these shapes and dtypes."""
    return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)


def check_same(x: Any, y: Any) -> None:
    """Refuse a stacked layer that hands on something else than it is given."""
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
