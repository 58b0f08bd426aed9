"""The loss scale of float16: where it goes, and DeepSpeed's rules of how it changes."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hfjax.base.mean import EXHAUSTED, OVERFLOW, SCALE, SKIPPED
from hfjax.parallel.precision.dtypes import LossScale
from hfjax.plan.layout import Scale


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["scale"],
    meta_fields=["rows", "length", "weighed"],
)
@dataclass
class Seed:
    """The cotangent of the loss: the loss scale, divided by the entries of a place.

    A place is all devices that share the same rows. Its entries are the rows that go to it in a
    step, times their length if the loss says how much it weighs (`hfjax.Mean`).
    """

    scale: jax.Array
    rows: int = 1
    length: int = 1
    weighed: bool = False

    def of(self, batch: Any) -> "Seed":
        """Return the seed of a place that is given these rows in a step."""
        arrays = jax.tree.leaves(batch)
        whole = (x for x in arrays if x.ndim > 1 and not jnp.issubdtype(x.dtype, jnp.inexact))
        return Seed(self.scale, arrays[0].shape[0], max((x.shape[1] for x in whole), default=1))

    @property
    def entries(self) -> int:
        """By how many entries the scale is divided."""
        return self.rows * (self.length if self.weighed else 1)

    def __call__(self, total: jax.Array) -> jax.Array:
        """Return the total, its cotangent multiplied by the seed."""
        wide = total.astype(jnp.promote_types(total.dtype, "float32"))
        return _times_backward(wide, self.scale / self.entries)


@jax.custom_vjp
def _times_backward(total: jax.Array, seed: jax.Array) -> jax.Array:
    return total


_times_backward.defvjp(
    lambda total, seed: (total, seed),
    lambda seed, slope: ((slope * seed).astype(slope.dtype), jnp.zeros_like(seed)),
)


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
