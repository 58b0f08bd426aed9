"""A function whose backward pass finds part of what it needs in host memory.

The pullback of `jax.vjp` is a tree of arrays. Those that follow from weights alone (casts, gathers)
are made again; of the others some go to the host as soon as they are made, and come back when the
gradient of the function's result is there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import lax

from hfjax.parallel.activation_offload import Cut, Share, Tensor
from hfjax.parallel.autodiff.program import Residuals, piece, tensors_of
from hfjax.parallel.memory import to_device, to_host

Choose = Callable[[Sequence[Tensor]], Share]


def kept(function: Callable, choose: Choose, barrier: bool = True) -> Callable:
    """Return `function(known, weights, x) -> (y, aux)`, parts of what it keeps on the host.

    It is differentiated with respect to weights and x. `choose` is told the tensors that depend on
    x and are needed for the backward pass. Outside of loops a barrier keeps XLA from dropping the
    round trip and from merging what is made again with what it was made from.
    """

    @jax.custom_vjp
    def run(known, weights, x):
        return function(known, weights, x)

    def forward(known, weights, x):
        passes = _Passes(function, (known, weights, x), choose)
        out, stash = passes.forward()
        return out, _Waiting(passes.sent(stash, barrier), passes.constants, known, weights, passes)

    def backward(waiting, cotangents):
        held = waiting.stash, waiting.constants, waiting.known, waiting.weights
        dy = cotangents[0]
        if barrier:
            held, dy = lax.optimization_barrier((held, dy))
        gradients, dx = waiting.passes.backward(*held, dy)
        return None, gradients, dx

    run.defvjp(forward, backward)
    return run


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["stash", "constants", "known", "weights"],
    meta_fields=["passes"],
)
@dataclass
class _Waiting:
    """What waits for the backward pass."""

    stash: list[list]  # [whole] or [first part, rest] of each tensor
    constants: list
    known: Any
    weights: Any
    passes: "_Passes"


class _Passes:
    """The two passes of a function, traced for arguments like these."""

    def __init__(self, function: Callable, arguments: tuple, choose: Choose):
        self.arrays, self.form = jax.tree.flatten(arguments)
        self.pullback: Any = None
        self.out: Any = None
        count = len(self.arrays) - len(jax.tree.leaves(arguments[-1]))

        def whole(*arrays):
            known, weights, x = self.form.unflatten(arrays)
            run = lambda weights, x: function(known, weights, x)
            y, pullback, aux = jax.vjp(run, weights, x, has_aux=True)
            kept, self.pullback = jax.tree.flatten(pullback)
            out, self.out = jax.tree.flatten((y, aux))
            return *out, *kept

        program = piece(whole, *self.arrays)
        n_out = self.out.num_leaves
        self.outputs, kept = program.outputs[:n_out], program.outputs[n_out:]
        self.residuals = Residuals(program, kept, count)
        self.ahead = program.part([*self.outputs, *self.residuals.stashed])
        self.constants = list(program.constants.values())
        self.tensors = tensors_of(program, self.residuals.stashed)
        self.share = choose(self.tensors)

    def forward(self) -> tuple[Any, list]:
        """Return the results of the function, and what depends on x and is kept."""
        found = self.ahead(*self.arrays)
        return self.out.unflatten(found[: len(self.outputs)]), found[len(self.outputs) :]

    def sent(self, stash: list, barrier: bool) -> list[list]:
        """Return what is kept, parts of it on the host."""
        return [_sent(x, self.share.get(i), barrier) for i, x in enumerate(stash)]

    def backward(self, stash: list, constants: list, known: Any, weights: Any, dy: Any) -> Any:
        """Return the gradients of weights and x."""
        arrays = jax.tree.leaves((known, weights))
        values = [_fetched(parts, self.share.get(i)) for i, parts in enumerate(stash)]
        pullback = self.pullback.unflatten(self.residuals.all(arrays, values, constants))
        return pullback(dy)


def _sent(x: jax.Array, cut: Cut | None, barrier: bool) -> list:
    if cut is None:
        return [x]
    first, *rest = cut.split(x)
    host = to_host(first)
    return [lax.optimization_barrier(host) if barrier else host, *rest]


def _fetched(parts: list, cut: Cut | None) -> jax.Array:
    return to_device(parts[0]) if cut is None else cut.join(to_device(parts))
