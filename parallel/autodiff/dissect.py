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
import numpy as np
from jax.extend.core import Literal, Var

from hfjax.parallel.activation_offload import Tensor
from hfjax.parallel.autodiff.program import (
    Piece,
    Residuals,
    body_of,
    bytes_of,
    needed,
    piece,
    tensors_of,
    variables,
)

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
    flat_x, form_x = jax.tree.flatten(x)
    flat_slots, form_slots = jax.tree.flatten(slots)
    flat_known, form_known = jax.tree.flatten(known)
    passes: dict[str, Any] = {}

    def forward(*arrays):
        known = form_known.unflatten(arrays[: len(flat_known)])
        x = form_x.unflatten(arrays[len(flat_known) :])
        y, pullback = jax.vjp(lambda slots, x: layer(known, slots, x), slots, x)
        kept, passes["pullback"] = jax.tree.flatten(pullback)
        _check_same(x, y)
        return *jax.tree.leaves(y), *kept

    whole = piece(forward, *flat_known, *flat_x)
    y, kept = whole.outputs[: len(flat_x)], whole.outputs[len(flat_x) :]
    residuals = Residuals(whole, kept, len(flat_known))
    ahead = whole.part([*y, *residuals.stashed])

    def backward(*arrays):
        known, arrays = arrays[: len(flat_known)], arrays[len(flat_known) :]
        stash, dy = arrays[: len(residuals.stashed)], arrays[len(residuals.stashed) :]
        pullback = jax.tree.unflatten(passes["pullback"], residuals.all(known, stash))
        gradients, dx = pullback(cotangents(form_x.unflatten(dy)))
        return *jax.tree.leaves(gradients), *jax.tree.leaves(arrays_of(dx, x))

    stashed = [v.aval for v in residuals.stashed]
    behind = piece(backward, *flat_known, *stashed, *(v.aval for v in y))
    halves = _Halves(behind, len(flat_known), len(stashed), len(flat_slots))
    late = halves.late if split else []
    early = [i for i in range(len(stashed)) if i not in late]

    def join(stash, late_values):
        values: list[Any] = [None] * len(stashed)
        for i, value in (*zip(early, stash, strict=True), *zip(late, late_values, strict=True)):
            values[i] = value
        return values

    def run_forward(known, x):
        out = ahead(*jax.tree.leaves(known), *jax.tree.leaves(x))
        kept = out[len(flat_x) :]
        return (
            form_x.unflatten(out[: len(flat_x)]),
            [kept[i] for i in early],
            [kept[i] for i in late],
        )

    def run_backward(known, stash, late_values, dy):
        given = (*jax.tree.leaves(known), *join(stash, late_values), *jax.tree.leaves(dy))
        out = behind(*given)
        return form_x.unflatten(out[len(flat_slots) :]), form_slots.unflatten(
            out[: len(flat_slots)]
        )

    def run_input(known, stash, late_values, dy):
        given = (*jax.tree.leaves(known), *join(stash, late_values), *jax.tree.leaves(dy))
        out = halves.input(*given)
        return form_x.unflatten(out[: len(flat_x)]), out[len(flat_x) :]

    def run_weight(known, late_values, cross):
        return form_slots.unflatten(halves.weight(*jax.tree.leaves(known), *late_values, *cross))

    return Dissected(
        forward=run_forward,
        backward=run_backward,
        input_backward=run_input,
        weight_backward=run_weight,
        stash=[stashed[i] for i in early],
        late=[stashed[i] for i in late],
        cross=[v.aval for v in halves.cross],
        tensors=tensors_of(whole, [residuals.stashed[i] for i in (*early, *late)]),
    )


class _Halves:
    """A backward pass in two: what the input's gradient needs, and the rest."""

    def __init__(self, behind: Piece, n_known: int, n_stash: int, n_slots: int):
        known, rest = behind.inputs[:n_known], behind.inputs[n_known:]
        stash, dy = rest[:n_stash], rest[n_stash:]
        gradients, dx = behind.outputs[:n_slots], behind.outputs[n_slots:]
        first = needed(behind.equations, dx)
        second = needed(behind.equations, behind.outputs) - first
        second -= _better_early(behind.equations, second)
        self.cross, second = self._cut(behind, first, second, gradients, set(dy))
        used = {v for i in second for v in variables(behind.equations[i].invars)}
        used |= set(variables(gradients))
        self.cross += [v for v in dy if v in used]
        self.late = [i for i, v in enumerate(stash) if v in used]
        self.input = behind.part([*dx, *self.cross])
        inputs = [*known, *(stash[i] for i in self.late), *self.cross]
        equations = [behind.equations[i] for i in sorted(second)]
        self.weight = Piece(equations, inputs, gradients, behind.constants)

    @staticmethod
    def _cut(behind: Piece, first: set[int], second: set[int], gradients: Any, dy: set[Var]):
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

    def __init__(self, equations: Sequence[Any], makes: dict[Var, int], dy: set[Var]):
        self.all, self.makes, self.dy = equations, makes, dy
        self.seen: dict[Var, frozenset[int] | None] = {}

    def equations(self, v: Any) -> frozenset[int] | None:
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


def cotangents(dy: Any) -> Any:
    """Return gradients as a pullback takes them: those of whole numbers and masks are none."""
    inexact = lambda a: jnp.issubdtype(a.dtype, jnp.inexact)
    return jax.tree.map(lambda a: a if inexact(a) else np.zeros(a.shape, jax.dtypes.float0), dy)


def arrays_of(gradients: Any, like: Any) -> Any:
    """Return gradients as arrays like these: zeros where a pullback gave none."""
    none = lambda g: g.dtype == jax.dtypes.float0
    zeros = lambda g, a: jnp.zeros(a.shape, a.dtype) if none(g) else g
    return jax.tree.map(zeros, gradients, like)


def _check_same(x: Any, y: Any) -> None:
    shape = lambda tree: jax.tree.map(lambda a: (jnp.shape(a), jnp.result_type(a)), tree)
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
