"""Optimizers put together from any of optax: by path of parameters, and with their average."""

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
    if not factors:
        return optimizer

    def update(updates: Any, state: Any, params: Any = None) -> tuple:
        flat = flatten(updates)
        found = matches(list(factors), flat)
        scale = lambda path, x: x * factors[found[path]] if path in found else x
        return nest({path: scale(path, x) for path, x in flat.items()}), state

    init = lambda params: optax.EmptyState()
    return optax.chain(optimizer, optax.GradientTransformation(init, update))


def without(
    optimizer: optax.GradientTransformation, frozen: Collection[str]
) -> optax.GradientTransformation:
    """Return an optimizer that neither moves the parameters of these paths nor keeps moments."""
    if not frozen:
        return optimizer
    label = lambda path: "frozen" if path in frozen else "trained"
    labels = lambda params: nest({path: label(path) for path in flatten(params)})
    return optax.partition({"trained": optimizer, "frozen": optax.set_to_zero()}, labels)


class Averaged(NamedTuple):
    """What an averaging optimizer keeps."""

    optimizer: Any
    average: Any  # of the parameters, in float32 or wider


def ema(optimizer: optax.GradientTransformation, decay: float) -> optax.GradientTransformation:
    """Return the optimizer, which also keeps an exponential moving average of the parameters.

    It starts from the first parameters, lies where moments lie, and is saved with them. A step
    that is skipped leaves it alone. `averaged(state)` is the state to evaluate.
    """
    if not 0 < decay < 1:
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
    is_average = lambda x: isinstance(x, Averaged)
    found = [x for x in jax.tree.leaves(state.optimizer, is_leaf=is_average) if is_average(x)]
    if not found:
        raise ValueError(
            "averaged(state): its optimizer keeps no average. Train with hfjax.ema(optimizer, "
            "decay=0.999)."
        )
    average = flatten(found[0].average)
    params = {
        path: average[path].astype(x.dtype) if _there(average.get(path)) else x
        for path, x in flatten(state.params).items()
    }
    return replace(state, params=nest(params))


def _there(x: Any) -> bool:
    """Return whether an array is kept of a parameter: of a frozen one there is none."""
    return hasattr(x, "astype")
