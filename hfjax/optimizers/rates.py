"""Learning rates: functions of the number of updates done, as optax takes them."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hfjax.utils.keywords import is_int, is_real
from hfjax.utils.paths import Index

Rate = Callable[[Any], Any]
DECAYS = ("cosine", "linear", "constant")
SHAPES = ("linear", "log")
MAX_FLOAT32 = float(jnp.finfo(jnp.float32).max)


def lr_schedule(
    peak: float,
    *,
    warmup: int = 0,
    steps: int | None = None,
    end: float = 0.0,
    decay: str = "cosine",
    hold: int = 0,
    shape: str = "linear",
) -> Rate:
    """Return a learning-rate schedule: warm-up to `peak`, hold, then decay to `end` * peak.

    With `shape="log"` it is DeepSpeed's WarmupLR (`decay="constant"`), WarmupDecayLR or
    WarmupCosineLR (docs/optimizers.md), with `hold` warm-up, stable, decay (WSD).

    Args:
        peak: The highest learning rate, above 0.
        warmup: Updates of the warm-up; 0: none.
        steps: Updates in total, after which the decay ends and the rate stays. Needed unless
            `decay` is "constant".
        end: The final rate, as a fraction of the peak from 0 to 1; "constant" ignores it.
        decay: Shape of the decay: cosine, linear or constant.
        hold: Updates at the peak before the decay.
        shape: Shape of the warm-up: linear (the first rate is peak / warmup), or log (the first two
            are zero: a warm-up of one update is one of two).

    Returns:
        A function of the number of updates done, as optax takes it.

    Example:
        >>> import hfjax
        >>> lr_schedule = hfjax.lr_schedule(1.0, warmup=2, steps=6)
        >>> [round(float(lr_schedule(n)), 3) for n in range(7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    _check_numbers(peak, warmup, end, hold)
    warmup = max(warmup, 2) if warmup and shape == "log" else warmup
    _check_schedule(warmup + hold, steps, decay, shape)
    decay_start = warmup + hold
    length = 1 if steps is None else max(steps - decay_start, 1)
    schedules = {"cosine": optax.cosine_decay_schedule(peak, length, end)}
    schedules["linear"] = optax.linear_schedule(peak, end * peak, length)
    decay_schedule = schedules.get(decay, optax.constant_schedule(peak))

    def learning_rate(count: Index) -> jax.Array:
        """The first update of a linear warm-up already moves: its rate is peak / warmup."""
        fraction = jnp.minimum((count + 1) / max(warmup, 1), 1.0)
        if warmup and shape == "log":
            fraction = jnp.minimum(jnp.log(jnp.maximum(count, 1.0)) / math.log(warmup), 1.0)
        return jnp.where(
            count < warmup, peak * fraction, decay_schedule(jnp.maximum(count - decay_start, 0))
        )

    return learning_rate


def _check_numbers(peak: float, warmup: int, end: float, hold: int) -> None:
    if not is_real(peak, 0, MAX_FLOAT32) or not peak > 0:
        raise ValueError(
            f"rate: peak={peak!r}, warmup={warmup!r}, end={end!r}, hold={hold!r}; numbers are "
            "expected, peak a positive learning rate."
        )
    if not (_is_count(warmup) and _is_count(hold) and is_real(end, 0, 1)):
        raise ValueError(
            f"rate: warmup={warmup!r}, hold={hold!r}, end={end!r}; numbers of updates, and a "
            "fraction of the peak between 0 and 1, are expected; updates are whole numbers."
        )


def _is_count(x: object) -> bool:
    """Return whether it is a count of updates: 100, and also 1e2."""
    return is_int(x, 0) or (isinstance(x, float) and x >= 0 and x.is_integer())


def _check_schedule(decay_start: int, steps: int | None, decay: str, shape: str) -> None:
    if decay not in DECAYS or shape not in SHAPES:
        raise ValueError(
            f"rate: decay={decay!r}, shape={shape!r}; decay is one of {', '.join(DECAYS)}, shape "
            f"one of {', '.join(SHAPES)}."
        )
    if decay != "constant" and not is_int(steps, math.floor(decay_start) + 1):
        raise ValueError(
            f"rate: steps={steps!r} leave nothing to decay after warmup + hold = {decay_start}. "
            'Give more steps, or decay="constant".'
        )
