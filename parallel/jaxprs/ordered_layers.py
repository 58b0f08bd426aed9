"""Layers that follow one another in no loop: when their parameters are gathered, and reduced.

Left alone, XLA merges what a backward pass gathers and computes again with what it was made from,
gathers far ahead, and puts parameters of two layers into one message. So barriers, which cost
nothing, tie a layer to what enters its neighbours:

- the next layer's gather begins when this layer has its own parameters, and what enters it;
- so does, in the backward pass, that of the layer before;
- a layer's gradients are reduced after those of the layer behind it, and before the layer that is
  two before it begins its backward pass.

So gathers and reductions run beside the layer next to theirs, no more than two layers' parameters
and gradients are whole at once, and what a layer computes again is not there before it is needed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.jaxprs.program import Residuals


@dataclass(frozen=True)
class Turn:
    """One layer, as functions.

    Attributes:
        apply: (whole, still, variables, x) -> (y, aux): the layer, with parameters that are trained
            and those that are frozen.
        gather: Makes a stored parameter whole.
        reduce: What is added to the gradients, of the cotangents of the trained ones.
        again: Whether the layer computes again what it does not keep.
    """

    apply: Callable
    gather: Callable
    reduce: Callable
    again: bool


def in_turn(turns: Sequence[Turn]) -> Callable:
    """Return `run(stored, slots, variables, x) -> (y, [aux])`; the first three for each layer.

    `stored` are pairs, of trained and of frozen parameters. It is differentiated with respect to
    slots, which take what `reduce` makes, and to x.
    """
    count = len(turns)

    @jax.custom_vjp
    def run(
        stored: Sequence[tuple], slots: Sequence[Any], variables: Sequence[Any], x
    ) -> tuple[Any, list]:
        stored, told = list(stored), []
        for i, turn in enumerate(turns):
            x, whole = _enter(x, _whole(turn, stored[i]), stored, i + 1)
            x, aux = turn.apply(*whole, variables[i], x)
            told.append(aux)
        return x, told

    def forward(
        stored: Sequence[tuple], slots: Sequence[Any], variables: Sequence[Any], x
    ) -> tuple[tuple, tuple]:
        stored, told, kept = list(stored), [], []
        programs: dict[Callable, Residuals] = {}  # of equal layers one
        for i, turn in enumerate(turns):
            x, whole = _enter(x, _whole(turn, stored[i]), stored, i + 1)
            known = whole, variables[i]
            if turn.apply not in programs:
                programs[turn.apply] = Residuals(_with_pullback(turn.apply), known, x)
            program = programs[turn.apply]
            (x, aux), stash = program.forward(known, x)
            told.append(aux)
            kept.append((stash, program.constants))
        return (x, told), (_Programs(programs), stored, variables, kept)

    def backward(residuals: tuple, cotangents: tuple) -> tuple:
        programs, stored, variables, kept = residuals
        dy, stored = cotangents[0], list(stored)
        dy, stored[-1] = _tied(dy, stored[-1])
        gradients: list[Any] = [None] * count
        for i in reversed(range(count)):
            turn, (stash, constants) = turns[i], kept[i]
            program = programs.of[turn.apply]
            if i + 2 < count:
                dy, gradients[i + 2] = _tied(dy, gradients[i + 2])
            own = _whole(turn, stored[i], program.reads), (stash if turn.again else None)
            dy, (whole, waited) = _enter(dy, own, stored, i - 1)
            stash = waited if turn.again else stash
            found, dy = program.pullback((whole, variables[i]), stash, constants)(dy)
            if i + 1 < count:
                found, gradients[i + 1] = _tied(found, gradients[i + 1])
            gradients[i] = turn.reduce(found)
        return None, gradients, None, dy

    run.defvjp(forward, backward)
    return run


def _whole(turn: Turn, stored: tuple, wanted: Sequence[bool] = ()) -> tuple:
    """Return whole parameters; of those that nobody wants something that nobody reads."""
    pairs = zip_longest(chain(*stored), wanted[: sum(map(len, stored))], fillvalue=True)
    whole = iter([turn.gather(p) if want else jnp.zeros(()) for p, want in pairs])
    return tuple([next(whole) for _ in part] for part in stored)


def _enter(x: Any, own: Any, stored: list, other: int) -> tuple[Any, Any]:
    """Return what enters a layer and its own; what the other one stores is read no earlier."""
    if not 0 <= other < len(stored):
        x, own = _tied(x, own)
    else:
        x, own, stored[other] = _tied(x, own, stored[other])
    return x, own


def _tied(*trees: Any) -> Sequence[Any]:
    """Return the trees: nothing reads one before all are there. (Integers have no cotangents.)"""
    leaves, form = jax.tree.flatten(trees)
    real = [i for i, x in enumerate(leaves) if x.dtype != jax.dtypes.float0]
    for i, x in zip(real, lax.optimization_barrier([leaves[i] for i in real]), strict=True):
        leaves[i] = x
    return form.unflatten(leaves)


def _with_pullback(apply: Callable) -> Callable:
    """Return (known, x) -> ((y, aux), pullback); the pullback gives gradients of parameters and x.

    What is known are the whole parameters, trained and frozen, and the variables.
    """

    def run(known: tuple, x) -> tuple[tuple, Callable]:
        (whole, still), variables = known
        of = lambda whole, x: apply(whole, still, variables, x)
        y, pullback, aux = jax.vjp(of, whole, x, has_aux=True)
        return (y, aux), pullback

    return run


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Programs:
    """The programs of layers, handed from the forward pass to the backward pass: no arrays."""

    of: dict[Callable, Residuals]
