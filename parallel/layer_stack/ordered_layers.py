"""A model's layers without a loop, each gathered beside the layer before it.

jaxprs/ordered_layers.py ties them to one another; here are the layer's functions and parameters.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from hfjax.parallel.compiler_options import GPU
from hfjax.parallel.engine.layer_remat import LayerOptions
from hfjax.parallel.engine.reduce_gradients import reduce_gradient
from hfjax.parallel.engine.unshard import Stored, is_stored
from hfjax.parallel.jaxprs.ordered_layers import Turn, in_turn

AT_MOST = 40  # layers in no loop: 32 take up to 2.6 times as long to compile, 80 five times


def unroll(run: LayerOptions, count: int) -> int | bool:
    """Return how many of `count` layers a turn of a loop has: all, where that is measured better.

    A loop copies each layer's parameters out of their stack and what it keeps into another: GPT-2
    takes 50 % longer with it on an H100, and 10 % on a CPU. Outside of a loop XLA:CPU merges what
    is made again with what it was made from. For GPUs layers are tied:
    benchmarks/results/ahead_of_time.md has the numbers.
    """
    if run.execution.unroll is not None:
        return run.execution.unroll
    if run.policy() is not None:
        few = run.platform in GPU and run.only_rows and count <= AT_MOST
        return (few and _makes_again(run)) or 1
    as_is = run.remat.group == 1 and run.execution.offload is None
    return (run.platform in ("cpu", *GPU) and as_is) or 1


def told(run: LayerOptions, count: int, listed: bool = False) -> str:
    """Return how `count` layers of a model in three parts run, and why, in words.

    Those of a list (`listed`) are never in a loop.
    """
    turns = unroll(run, 1 if listed else count)
    if turns is True and _makes_again(run):
        return "in no loop, tied to their neighbours"
    if turns is True or listed:
        return "in no loop"
    reasons = {
        f"unroll={turns}": run.execution.unroll is not None,
        "as measured on CPUs": run.platform == "cpu",
        "the host keeps a part": run.execution.offload is not None,
        "remat is of several": run.remat.unit > 1,
        "the mesh has axes that are not of rows": not run.only_rows,
        f"more than {AT_MOST}": count > AT_MOST,
        "not measured": True,
    }
    return f"in a loop ({next(why for why, holds in reasons.items() if holds)})"


def goes_in_turn(run: LayerOptions, count: int = 1) -> bool:
    """Return whether layers are tied: they make something again, and are in no loop."""
    return unroll(run, count) is True and _makes_again(run)


def _makes_again(run: LayerOptions) -> bool:
    """Return whether layers gather or compute again, each by itself, and the host keeps nothing."""
    stays = run.gathers and not run.execution.reshard_after_forward
    alone = run.remat.unit == 1 and run.execution.offload is None
    return run.policy() is not None and alone and not stays


class InTurn:
    """One layer, or several equal ones: `layer(parameters, variables, x) -> (x, written)`.

    `parameters` is the tree of stored parameters that all of them have.
    """

    def __init__(self, layer: Callable, parameters: Any, run: LayerOptions) -> None:
        leaves, self._form = jax.tree.flatten(parameters, is_leaf=is_stored)
        self._trained = [p.slot is not None for p in leaves]
        self._dtypes = [p.slot.dtype for p in leaves if p.slot is not None]
        self._moves = [p.movement for p in leaves if p.slot is not None]
        policy = run.remat.policy(0, False, False, run.traced.names)

        def apply(whole: Sequence[jax.Array], still: Sequence[jax.Array], variables, x) -> tuple:
            ours, others = iter(whole), iter(still)
            both = [next(ours if trained else others) for trained in self._trained]
            here = jax.tree.map(lambda x: x, variables)  # Variables that may change in this trace
            return layer(self._form.unflatten(both), here, x)

        if policy is not None:
            apply = jax.checkpoint(apply, policy=policy, prevent_cse=False)
        self.turn = Turn(apply, Stored.fetch, self._reduced, again=policy is not None)

    def stored(self, parameters: Any) -> tuple[list[Stored], list[Stored]]:
        """Return a layer's parameters, trained and frozen, without slots."""
        leaves = self._form.flatten_up_to(parameters)
        pairs = list(zip(leaves, self._trained, strict=True))
        pick = lambda wanted: [replace(p, slot=None) for p, trained in pairs if trained == wanted]
        return pick(True), pick(False)

    def slots(self, parameters: Any) -> list[jax.Array]:
        """Return where the gradients of a layer, or of stacked ones, go."""
        leaves = self._form.flatten_up_to(parameters)
        return [p.slot for p, trained in zip(leaves, self._trained, strict=True) if trained]

    def _reduced(self, cotangents: Sequence[Any]) -> list[jax.Array]:
        triples = zip(self._moves, cotangents, self._dtypes, strict=True)
        return [reduce_gradient(*triple) for triple in triples]


def run_in_turn(turns: Sequence[InTurn], parameters: Sequence[Any], *given: Any) -> Any:
    """Return x after layers, and what each wrote; `given` are slots and variables of each, x."""
    stored = [one.stored(its) for one, its in zip(turns, parameters, strict=True)]
    return in_turn([one.turn for one in turns])(stored, *given)


def apart(stacks: Any) -> list[Any]:
    """Return the rows of stacked arrays; their cotangents are joined at once, not added up."""
    leaves, form = jax.tree.flatten(stacks)
    rows = [[a[0] for a in lax.split(x, (1,) * len(x))] for x in leaves]
    return [form.unflatten(row) for row in zip(*rows, strict=True)]
