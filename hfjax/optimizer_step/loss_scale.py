"""The loss scale of float16, updated by DeepSpeed's rules."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.parallel.precision.dtypes import LossScale
from hfjax.sharding.state import Scale
from hfjax.utils.mean import EXHAUSTED, OVERFLOW, SCALE, SKIPPED


def initial_scale(settings: LossScale) -> Scale:
    """Return the scale of a new run."""
    to_int32 = lambda n: np.int32(n)
    value = np.float32(settings.initial)
    return Scale(value, to_int32(0), to_int32(-1), to_int32(settings.hysteresis), to_int32(0))


def clip_scale(settings: LossScale, scale: Scale) -> Scale:
    """Return the scale of a state clipped to the limits of these settings, or their fixed one."""
    minimum, maximum = settings.minimum, settings.maximum
    if settings.window is None:
        minimum = maximum = settings.initial
    return replace(scale, value=jnp.clip(scale.value, minimum, maximum).astype(jnp.float32))


class ScaleUpdate(NamedTuple):
    """The result of a step for its loss scale."""

    scale: Scale
    exhausted: jax.Array  # it overflowed at the minimum scale


def update_scale(settings: LossScale, scale: Scale, overflow: jax.Array) -> ScaleUpdate:
    """Return the scale after a step, given whether its gradient overflowed."""
    is_used_up = (scale.hysteresis == 1) | (settings.hysteresis == 1)
    exhausted = overflow & is_used_up & (scale.value <= settings.minimum)
    maximum = jnp.float32(settings.maximum)
    smaller = jnp.maximum(scale.value / 2, settings.minimum)
    remaining = jnp.where(is_used_up, scale.hysteresis, scale.hysteresis - 1)
    max_hysteresis = jnp.int32(settings.hysteresis)
    steps_since_overflow = scale.steps - scale.last - 1
    if settings.window is None:
        is_growing, smaller, exhausted = jnp.bool_(False), scale.value, jnp.bool_(False)
    else:
        is_growing = (steps_since_overflow > 0) & (steps_since_overflow % settings.window == 0)
    clean_hysteresis = (
        max_hysteresis
        if settings.consecutive
        else jnp.where(is_growing, max_hysteresis, scale.hysteresis)
    )
    clean_value = jnp.where(is_growing, jnp.minimum(scale.value * 2, maximum), scale.value)
    select = partial(jnp.where, overflow)
    after = Scale(
        value=select(jnp.where(is_used_up, smaller, scale.value), clean_value),
        steps=scale.steps + 1,
        last=select(scale.steps, scale.last),
        hysteresis=select(remaining, clean_hysteresis),
        skipped=scale.skipped + overflow,
    )
    return ScaleUpdate(
        jax.tree.map(lambda new, old: new.astype(old.dtype), after, scale), exhausted
    )


def after_step(
    settings: LossScale, scale: Scale, loss: jax.Array, finite: jax.Array
) -> tuple[Scale, dict[str, jax.Array]]:
    """Return the scale after a step, and its metrics.

    A loss that is not finite says nothing about the scale, which stays unchanged.
    """
    overflow = jnp.isfinite(loss) & ~finite
    after, exhausted = update_scale(settings, scale, overflow)
    after = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(loss), new, old), after, scale)
    metrics = {SCALE: scale.value, SKIPPED: after.skipped}
    return after, {**metrics, OVERFLOW: overflow, EXHAUSTED: exhausted}
