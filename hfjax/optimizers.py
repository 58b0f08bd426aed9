"""Optimizers put together from any of optax: by path of parameters, and with their average."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hfjax.paths import flatten, matches, nest


def by_path(
    optimizers: Mapping[str, optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that treats a parameter as the first pattern says that its path matches.

    `*` stands for anything. Parameter groups: of weight decay, of learning rates, of anything.

    >>> decayed, plain = optax.adamw(1e-3, weight_decay=0.1), optax.adamw(1e-3, weight_decay=0.0)
    >>> optimizer = by_path({"*/bias": plain, "*norm*": plain, "*": decayed})
    """
    patterns = list(optimizers)

    def labels(params: Any) -> Any:
        paths = flatten(params)
        found = matches(patterns, paths)
        if without := [path for path in paths if path not in found]:
            raise ValueError(
                f"by_path: {without[0]} (and {len(without) - 1} more) matches none of {patterns}. "
                'Add a last pattern "*".'
            )
        if idle := [pattern for pattern in patterns if pattern not in found.values()]:
            raise ValueError(
                f"by_path: {idle[0]!r} never counts, since patterns before it match the same "
                f"paths: {patterns}. The first that matches counts: put it before them."
            )
        return nest(found)

    return optax.partition({**optimizers}, labels)


def matching(*patterns: str) -> Callable[[Any], Any]:
    """Return a mask for optax: which parameters have a path that one of the patterns matches.

    >>> optimizer = optax.adamw(1e-3, weight_decay=0.1, mask=matching("*/kernel"))
    """

    def mask(params: Any) -> Any:
        paths = flatten(params)
        found = matches(patterns, paths)
        return nest({path: path in found for path in paths})

    return mask


def scaled(
    optimizer: optax.GradientTransformation, factors: Mapping[str, float]
) -> optax.GradientTransformation:
    """Return the optimizer with other learning rates for some paths, as factors.

    >>> optimizer = scaled(optax.adamw(1e-3), {"tokens": 0.1, "layers/*": 0.5})
    """
    for pattern, factor in factors.items():
        if not isinstance(factor, int | float) or not 0 <= factor < math.inf:
            raise ValueError(f"scaled: {pattern}={factor!r}; a finite factor of at least 0.")
    if not factors:
        return optimizer

    def update(updates: Any, state: Any, params: Any = None) -> tuple:
        flat = flatten(updates)
        found = matches(list(factors), flat)
        moves = lambda path, x: path in found and hasattr(x, "dtype")  # not of a frozen one
        scale = lambda path, x: x * factors[found[path]] if moves(path, x) else x
        return nest({path: scale(path, x) for path, x in flat.items()}), state

    init = lambda params: optax.EmptyState()
    return optax.chain(optimizer, optax.GradientTransformation(init, update))


def without(
    optimizer: optax.GradientTransformation, frozen: Collection[str]
) -> optax.GradientTransformation:
    """Return an optimizer that neither moves the parameters of these paths nor keeps moments."""
    whole = optimizer.optimizer if isinstance(optimizer, Without) else optimizer
    label = lambda path: "frozen" if path in frozen else "trained"
    labels = lambda params: nest({path: label(path) for path in flatten(params)})
    made = Without(*optax.partition({"trained": whole, "frozen": optax.set_to_zero()}, labels))
    made.optimizer = whole
    return made


class Without(optax.GradientTransformationExtraArgs):
    """An optimizer without some parameters, which knows the one that has them all."""

    optimizer: Any


class Averaged(NamedTuple):
    """What an averaging optimizer keeps."""

    optimizer: Any
    average: Any  # of the parameters, in float32 or wider


def ema(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Return the optimizer, which also keeps an exponential moving average of the parameters.

    It starts from the first parameters, lies where moments lie, and is saved with them. A step
    that is skipped leaves it alone. `averaged(state)` is the state to evaluate. In a chain put it
    outermost: the average is of what this optimizer alone makes of the parameters.
    """
    if not isinstance(decay, float) or not 0 < decay < 1:
        raise ValueError(f"ema: decay={decay!r}; a number between 0 and 1, for instance 0.999.")
    inner = optax.with_extra_args_support(optimizer)
    wide = lambda x: x.astype(jnp.promote_types(x.dtype, jnp.float32))

    def init(params: Any) -> Averaged:
        copies = jax.tree.map(lambda x: jnp.array(wide(x), copy=True), params)
        return Averaged(inner.init(params), copies)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple:
        updates, kept = inner.update(updates, state.optimizer, params, **extra)
        new = optax.apply_updates(params, updates)
        mix = lambda old, x: decay * old + (1 - decay) * wide(x)
        return updates, Averaged(kept, jax.tree.map(mix, state.average, new))

    return optax.GradientTransformationExtraArgs(init, update)


def averaged(state: Any) -> Any:
    """Return the state with the average of its parameters in their place: to evaluate, to export.

    The layout's optimizer is `hfjax.ema(…)`, or has one in it.
    """
    if not hasattr(state, "optimizer"):
        raise ValueError(f"averaged(state): a hfjax.State is expected, found {state!r}.")
    is_average = lambda x: isinstance(x, Averaged)
    found = [x for x in jax.tree.leaves(state.optimizer, is_leaf=is_average) if is_average(x)]
    if not found:
        raise ValueError(
            "averaged(state): its optimizer keeps no average. Train with hfjax.ema(optimizer, "
            "decay=0.999)."
        )
    average: dict[str, Any] = {}
    for kept in found:  # of a frozen parameter, or one of another group, there is none
        mine = {path: x for path, x in flatten(kept.average).items() if hasattr(x, "astype")}
        if twice := mine.keys() & average.keys():
            raise ValueError(f"averaged(state): two averages are kept of {min(twice)}.")
        average |= mine
    params = flatten(state.params)
    params |= {path: x.astype(params[path].dtype) for path, x in average.items()}
    return replace(state, params=nest(params))
