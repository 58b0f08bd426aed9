"""The loss scale of float16: DeepSpeed's rules of how it changes."""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.parallel.precision.dtypes import LossScale
from hfjax.sharding.layout import Scale
from hfjax.utils.mean import EXHAUSTED, OVERFLOW, SCALE, SKIPPED


def fresh(settings: LossScale) -> Scale:
    """Return the scale of a run that begins."""
    whole = lambda n: np.int32(n)
    begin = np.float32(settings.initial)
    return Scale(begin, whole(0), whole(-1), whole(settings.hysteresis), whole(0))


def within(settings: LossScale, scale: Scale) -> Scale:
    """Return the scale of a state as these settings have it: one that is fixed, or its limits."""
    least, most = settings.minimum, settings.maximum
    if settings.window is None:
        least = most = settings.initial
    return replace(scale, value=jnp.clip(scale.value, least, most).astype(jnp.float32))


class Judged(NamedTuple):
    """What a step was, as far as its scale is concerned."""

    after: Scale
    exhausted: jax.Array  # it overflowed at the least scale


def judged(settings: LossScale, scale: Scale, overflow: jax.Array) -> Judged:
    """Return the scale after a step, by whether its gradient overflowed."""
    used_up = (scale.hysteresis == 1) | (settings.hysteresis == 1)
    exhausted = overflow & used_up & (scale.value <= settings.minimum)
    most = jnp.float32(settings.maximum)
    lower = jnp.maximum(scale.value / 2, settings.minimum)
    left = jnp.where(used_up, scale.hysteresis, scale.hysteresis - 1)
    full = jnp.int32(settings.hysteresis)
    stable = scale.steps - scale.last - 1
    if settings.window is None:
        grows, lower, exhausted = jnp.bool_(False), scale.value, jnp.bool_(False)
    else:
        grows = (stable > 0) & (stable % settings.window == 0)
    refilled = full if settings.consecutive else jnp.where(grows, full, scale.hysteresis)
    clean = jnp.where(grows, jnp.minimum(scale.value * 2, most), scale.value)
    choose = partial(jnp.where, overflow)
    after = Scale(
        value=choose(jnp.where(used_up, lower, scale.value), clean),
        steps=scale.steps + 1,
        last=choose(scale.steps, scale.last),
        hysteresis=choose(left, refilled),
        skipped=scale.skipped + overflow,
    )
    return Judged(jax.tree.map(lambda new, old: new.astype(old.dtype), after, scale), exhausted)


def after_step(
    settings: LossScale, scale: Scale, loss: jax.Array, finite: jax.Array
) -> tuple[Scale, dict[str, jax.Array]]:
    """Return the scale after a step, and its metrics.

    A loss that is not finite says nothing of the scale, which stays as it is.
    """
    overflow = jnp.isfinite(loss) & ~finite
    after, exhausted = judged(settings, scale, overflow)
    after = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(loss), new, old), after, scale)
    metrics = {SCALE: scale.value, SKIPPED: after.skipped}
    return after, {**metrics, OVERFLOW: overflow, EXHAUSTED: exhausted}
