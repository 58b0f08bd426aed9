"""A model's layers without a loop, each gathered while the layer before it runs.

jaxprs/layer_barriers.py ties them to one another; here are the layer's functions and parameters.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import lax

from hfjax.parallel.compiler_options import GPU
from hfjax.parallel.engine.layer_remat import LayerOptions
from hfjax.parallel.engine.reduce_gradients import reduce_gradient
from hfjax.parallel.engine.unshard import ShardedParam, is_sharded_param
from hfjax.parallel.jaxprs.layer_barriers import OrderedLayer, ordered_layers

MAX_UNROLLED = 40  # unrolled layers: 32 take up to 2.6 times as long to compile, 80 five times


def unroll(options: LayerOptions, count: int) -> int | bool:
    """Return how many of `count` layers a loop iteration has: True (all) if measured better.

    A loop copies each layer's parameters out of their stack and its residuals into another: GPT-2
    takes 50 % longer with it on an H100, and 10 % on a CPU. Outside of a loop XLA:CPU merges what
    is recomputed with the original. For GPUs layers are tied: benchmarks/results/ahead_of_time.md
    has the numbers.
    """
    if options.execution.unroll is not None:
        return options.execution.unroll
    if options.policy() is not None:
        few = options.platform in GPU and options.only_batch_axes and count <= MAX_UNROLLED
        return (few and _recomputes(options)) or 1
    as_is = options.remat.group == 1 and options.execution.offload is None
    return (options.platform in ("cpu", *GPU) and as_is) or 1


def describe_unroll(options: LayerOptions, count: int, listed: bool = False) -> str:
    """Return how `count` layers of a layer-stack model run, and why, in words.

    Those of a list (`listed`) are never in a loop.
    """
    factor = unroll(options, 1 if listed else count)
    if factor is True and _recomputes(options):
        return "in no loop, tied to their neighbours"
    if factor is True or listed:
        return "in no loop"
    reasons = {
        f"unroll={factor}": options.execution.unroll is not None,
        "as measured on CPUs": options.platform == "cpu",
        "the host keeps a part": options.execution.offload is not None,
        "remat is of several": options.remat.unit > 1,
        "the mesh has axes that are not of examples": not options.only_batch_axes,
        f"more than {MAX_UNROLLED}": count > MAX_UNROLLED,
        "not measured": True,
    }
    return f"in a loop ({next(why for why, holds in reasons.items() if holds)})"


def is_unrolled(options: LayerOptions, count: int = 1) -> bool:
    """Return whether layers are tied: they recompute something, and are in no loop."""
    return unroll(options, count) is True and _recomputes(options)


def _recomputes(options: LayerOptions) -> bool:
    """Return whether layers gather or compute again, each by itself, without offload."""
    keeps_unsharded = options.gathers and not options.execution.reshard_after_forward
    per_layer = options.remat.unit == 1 and options.execution.offload is None
    return options.policy() is not None and per_layer and not keeps_unsharded


class UnrolledLayer:
    """One layer, or several equal ones: `layer(parameters, variables, x) -> (x, written)`.

    `parameters` is the tree of `ShardedParam`s that all of them have.
    """

    def __init__(self, layer: Callable, parameters: Any, options: LayerOptions) -> None:
        leaves, self._treedef = jax.tree.flatten(parameters, is_leaf=is_sharded_param)
        self._trainable = [p.slot is not None for p in leaves]
        self._dtypes = [p.slot.dtype for p in leaves if p.slot is not None]
        self._plans = [p.comm_plan for p in leaves if p.slot is not None]
        policy = options.remat.policy(0, False, False, options.trace.names)

        def apply(
            trainable: Sequence[jax.Array], frozen: Sequence[jax.Array], variables, x
        ) -> tuple:
            ours, others = iter(trainable), iter(frozen)
            merged = [next(ours if is_trainable else others) for is_trainable in self._trainable]
            variables_copy = jax.tree.map(
                lambda x: x, variables
            )  # Variables that may change in this trace
            return layer(self._treedef.unflatten(merged), variables_copy, x)

        if policy is not None:
            apply = jax.checkpoint(apply, policy=policy, prevent_cse=False)
        self.ordered_layer = OrderedLayer(
            apply, ShardedParam.unshard, self._reduce, recompute=policy is not None
        )

    def split_frozen(self, parameters: Any) -> tuple[list[ShardedParam], list[ShardedParam]]:
        """Return a layer's parameters, trained and frozen, without slots."""
        leaves = self._treedef.flatten_up_to(parameters)
        pairs = list(zip(leaves, self._trainable, strict=True))
        pick = lambda trainable: [
            replace(p, slot=None) for p, is_trainable in pairs if is_trainable == trainable
        ]
        return pick(True), pick(False)

    def slots(self, parameters: Any) -> list[jax.Array]:
        """Return the gradient slots of a layer, or of stacked ones."""
        leaves = self._treedef.flatten_up_to(parameters)
        return [
            p.slot for p, is_trainable in zip(leaves, self._trainable, strict=True) if is_trainable
        ]

    def _reduce(self, cotangents: Sequence[Any]) -> list[jax.Array]:
        triples = zip(self._plans, cotangents, self._dtypes, strict=True)
        return [reduce_gradient(*triple) for triple in triples]


def run_unrolled(layers: Sequence[UnrolledLayer], parameters: Sequence[Any], *args: Any) -> Any:
    """Return x after layers, and what each wrote; `args` are slots and variables of each, x."""
    params = [layer.split_frozen(its) for layer, its in zip(layers, parameters, strict=True)]
    return ordered_layers([layer.ordered_layer for layer in layers])(params, *args)


def unstack(stacks: Any) -> list[Any]:
    """Return the layers of stacked arrays; cotangents are concatenated, not added up."""
    leaves, treedef = jax.tree.flatten(stacks)
    per_layer = [[a[0] for a in lax.split(x, (1,) * len(x))] for x in leaves]
    return [treedef.unflatten(layer) for layer in zip(*per_layer, strict=True)]
