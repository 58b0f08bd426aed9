"""Unrolled layers: when their parameters are gathered, and their gradients reduced.

Left alone, XLA merges what a backward pass gathers and recomputes with the originals, gathers far
ahead, and puts parameters of two layers into one message. So barriers, which cost nothing, tie a
layer to the inputs of its neighbours:

- the next layer's gather starts when this layer has its own parameters, and its input;
- so does, in the backward pass, that of the previous layer;
- a layer's gradients are reduced after those of the next layer, and before the layer that is two
  before it starts its backward pass.

So gathers and reductions overlap with the neighbouring layer, at most two layers' parameters and
gradients are unsharded at a time, and nothing is recomputed before it is needed.
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
class OrderedLayer:
    """One layer, as functions.

    Attributes:
        apply: (trained, frozen, variables, x) -> (y, aux): the layer, with full parameters.
        unshard: Stored parameter -> full parameter.
        reduce: Cotangents of the trained parameters -> what is added to the gradients.
        recompute: Whether the layer recomputes what it does not save.
    """

    apply: Callable
    unshard: Callable
    reduce: Callable
    recompute: bool


def ordered_layers(layers: Sequence[OrderedLayer]) -> Callable:
    """Return `run(params, slots, variables, x) -> (y, [aux])`; the first three for each layer.

    `params` are pairs, of trained and of frozen parameters. It is differentiated with respect to
    `slots`, whose gradients are what `reduce` returns, and to x.
    """
    count = len(layers)

    @jax.custom_vjp
    def run(
        params: Sequence[tuple], slots: Sequence[Any], variables: Sequence[Any], x
    ) -> tuple[Any, list]:
        params, aux_list = list(params), []
        for i, layer in enumerate(layers):
            x, full_params = _tie_layer(x, _unshard_params(layer, params[i]), params, i + 1)
            x, aux = layer.apply(*full_params, variables[i], x)
            aux_list.append(aux)
        return x, aux_list

    def forward(
        params: Sequence[tuple], slots: Sequence[Any], variables: Sequence[Any], x
    ) -> tuple[tuple, tuple]:
        params, aux_list, stashes = list(params), [], []
        layer_residuals: dict[Callable, Residuals] = {}  # one for equal layers
        for i, layer in enumerate(layers):
            x, full_params = _tie_layer(x, _unshard_params(layer, params[i]), params, i + 1)
            known = full_params, variables[i]
            if layer.apply not in layer_residuals:
                layer_residuals[layer.apply] = Residuals(_with_pullback(layer.apply), known, x)
            residuals = layer_residuals[layer.apply]
            (x, aux), stash = residuals.forward(known, x)
            aux_list.append(aux)
            stashes.append((stash, residuals.constants))
        return (x, aux_list), (_Programs(layer_residuals), params, variables, stashes)

    def backward(residuals: tuple, cotangents: tuple) -> tuple:
        layer_residuals, params, variables, stashes = residuals
        dy, params = cotangents[0], list(params)
        dy, params[-1] = _tie(dy, params[-1])
        gradients: list[Any] = [None] * count
        for i in reversed(range(count)):
            layer, (stash, constants) = layers[i], stashes[i]
            layer_program = layer_residuals.by_apply[layer.apply]
            if i + 2 < count:
                dy, gradients[i + 2] = _tie(dy, gradients[i + 2])
            own_arrays = (
                _unshard_params(layer, params[i], layer_program.reads_known),
                (stash if layer.recompute else None),
            )
            dy, (full_params, tied_stash) = _tie_layer(dy, own_arrays, params, i - 1)
            stash = tied_stash if layer.recompute else stash
            grads, dy = layer_program.pullback((full_params, variables[i]), stash, constants)(dy)
            if i + 1 < count:
                grads, gradients[i + 1] = _tie(grads, gradients[i + 1])
            gradients[i] = layer.reduce(grads)
        return None, gradients, None, dy

    run.defvjp(forward, backward)
    return run


def _unshard_params(layer: OrderedLayer, params: tuple, read_mask: Sequence[bool] = ()) -> tuple:
    """Return full parameters; for those that are not read, a placeholder."""
    pairs = zip_longest(chain(*params), read_mask[: sum(map(len, params))], fillvalue=True)
    full_params = iter([layer.unshard(p) if is_read else jnp.zeros(()) for p, is_read in pairs])
    return tuple([next(full_params) for _ in group] for group in params)


def _tie_layer(x: Any, own_arrays: Any, params: list, other: int) -> tuple[Any, Any]:
    """Return a layer's input and own arrays; what the other one stores is read no earlier."""
    if not 0 <= other < len(params):
        x, own_arrays = _tie(x, own_arrays)
    else:
        x, own_arrays, params[other] = _tie(x, own_arrays, params[other])
    return x, own_arrays


def _tie(*trees: Any) -> Sequence[Any]:
    """Return the trees: none is read before all are ready. (Integers have no cotangents.)"""
    leaves, treedef = jax.tree.flatten(trees)
    float_ids = [i for i, x in enumerate(leaves) if x.dtype != jax.dtypes.float0]
    for i, x in zip(
        float_ids, lax.optimization_barrier([leaves[i] for i in float_ids]), strict=True
    ):
        leaves[i] = x
    return treedef.unflatten(leaves)


def _with_pullback(apply: Callable) -> Callable:
    """Return (known, x) -> ((y, aux), pullback); the pullback gives gradients of parameters and x.

    `known` are the full parameters, trained and frozen, and the variables.
    """

    def run(known: tuple, x) -> tuple[tuple, Callable]:
        (trained, frozen), variables = known
        apply_trained = lambda trained, x: apply(trained, frozen, variables, x)
        y, pullback, aux = jax.vjp(apply_trained, trained, x, has_aux=True)
        return (y, aux), pullback

    return run


@jax.tree_util.register_static
@dataclass(frozen=True, eq=False)
class _Programs:
    """The programs of layers, passed from the forward to the backward pass: no arrays."""

    by_apply: dict[Callable, Residuals]
