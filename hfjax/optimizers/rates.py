"""Learning rates: functions of the number of updates done, as optax takes them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hfjax.utils.keywords import is_int, is_real, strict_keywords
from hfjax.utils.paths import Index

LearningRate = Callable[[Any], Any]
DECAYS = ("cosine", "linear", "constant")
WARMUP_TYPES = ("linear", "log")
MAX_FLOAT32 = float(jnp.finfo(jnp.float32).max)


@strict_keywords
def lr_schedule(
    peak: float,
    *,
    type: str = "cosine",
    warmup_steps: int = 0,
    stable_steps: int = 0,
    steps: int | None = None,
    final_fraction: float = 0.0,
    warmup_type: str = "linear",
) -> LearningRate:
    """Return a learning-rate schedule: warm-up to `peak`, a stable phase, then decay.

    With `warmup_type="log"` it is DeepSpeed's WarmupLR (`type="constant"`), WarmupDecayLR or
    WarmupCosineLR (docs/optimizers.md), with `stable_steps` warm-up, stable, decay (WSD).

    Args:
        peak: The highest learning rate, above 0.
        type: Shape of the decay: cosine, linear or constant.
        warmup_steps: Updates of the warm-up; 0: none.
        stable_steps: Updates at the peak before the decay.
        steps: Updates in total, after which the decay ends and the rate stays. Needed unless
            `type` is "constant".
        final_fraction: The final rate, as a fraction of the peak from 0 to 1; "constant"
            ignores it.
        warmup_type: Shape of the warm-up: linear (the first rate is peak / warmup_steps), or log
            (the first two are zero: a warm-up of one update is one of two).

    Returns:
        A function of the number of updates done, as optax takes it.

    Example:
        >>> import hfjax
        >>> lr_schedule = hfjax.lr_schedule(1.0, warmup_steps=2, steps=6)
        >>> [round(float(lr_schedule(n)), 3) for n in range(7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    _check_numbers(peak, warmup_steps, stable_steps, final_fraction)
    if warmup_steps and warmup_type == "log":
        warmup_steps = max(warmup_steps, 2)
    decay_start = warmup_steps + stable_steps
    _check_schedule(decay_start, steps, type, warmup_type)
    length = 1 if steps is None else max(steps - decay_start, 1)
    schedules = {"cosine": optax.cosine_decay_schedule(peak, length, final_fraction)}
    schedules["linear"] = optax.linear_schedule(peak, final_fraction * peak, length)
    decay_schedule = schedules.get(type, optax.constant_schedule(peak))

    def learning_rate(count: Index) -> jax.Array:
        """The first update of a linear warm-up already moves: its rate is peak / warmup_steps."""
        fraction = jnp.minimum((count + 1) / max(warmup_steps, 1), 1.0)
        if warmup_steps and warmup_type == "log":
            fraction = jnp.minimum(jnp.log(jnp.maximum(count, 1.0)) / math.log(warmup_steps), 1.0)
        warming_up = count < warmup_steps
        return jnp.where(
            warming_up, peak * fraction, decay_schedule(jnp.maximum(count - decay_start, 0))
        )

    return learning_rate


def _check_numbers(
    peak: float, warmup_steps: int, stable_steps: int, final_fraction: float
) -> None:
    if not is_real(peak, 0, MAX_FLOAT32) or not peak > 0:
        raise ValueError(f"lr_schedule: peak={peak!r}; a positive learning rate is expected.")
    if not (_is_count(warmup_steps) and _is_count(stable_steps) and is_real(final_fraction, 0, 1)):
        raise ValueError(
            f"lr_schedule: warmup_steps={warmup_steps!r}, stable_steps={stable_steps!r}, "
            f"final_fraction={final_fraction!r}; steps are whole numbers from 0 on, and the "
            "fraction of the peak lies between 0 and 1."
        )


def _is_count(x: object) -> bool:
    """Return whether it is a count of updates: 100, and also 1e2."""
    return is_int(x, 0) or (isinstance(x, float) and x >= 0 and x.is_integer())


def _check_schedule(decay_start: int, steps: int | None, type: str, warmup_type: str) -> None:
    if type not in DECAYS or warmup_type not in WARMUP_TYPES:
        raise ValueError(
            f"lr_schedule: type={type!r}, warmup_type={warmup_type!r}; type is one of "
            f"{', '.join(DECAYS)}, warmup_type one of {', '.join(WARMUP_TYPES)}."
        )
    if type != "constant" and not is_int(steps, math.floor(decay_start) + 1):
        raise ValueError(
            f"lr_schedule: steps={steps!r} leave nothing to decay after warmup_steps + "
            f'stable_steps = {decay_start}. Give more steps, or type="constant".'
        )
