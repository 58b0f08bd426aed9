"""DeepSpeed's five learning rate schedules, as functions of the number of updates done.

Its scheduler steps after the update, so update n (from 0) has the rate of iteration n - 1, and the
first update a separate one: the lowest, or the first.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.utils.paths import Index

Rate = Callable[[Any], Any]
Params = dict[str, Any]


def schedule(kind: str, params: Params, lr: float) -> Rate:
    """Return a schedule by its type; `lr` is the optimizer's."""
    return KINDS[kind](params, lr)


def _warmup(params: Params) -> tuple[int, Rate]:
    """Return the number of warmup iterations, and the progress at iteration i, up to 1."""
    length = max(2, int(params["warmup_num_steps"]))
    log = params["warmup_type"] == "log"
    progress = lambda i: jnp.log(i + 1.0) / math.log(length) if log else i / length
    return length, progress


def _with_first_rate(first: float, rest: Rate) -> Rate:
    """Return a rate that is `first` at update 0, and then follows `rest` from iteration 0 on."""
    return lambda n: jnp.where(n < 1, first, rest(jnp.maximum(n - 1.0, 0.0)))


def _warmup_lr(params: Params, lr: float) -> Rate:
    """Return WarmupLR, or WarmupDecayLR, which decays to zero at `total_num_steps`."""
    least, num_steps = params["warmup_min_lr"], params.get("total_num_steps")
    most = params["warmup_max_lr"] if params["warmup_max_lr"] is not None else lr
    length, up = _warmup(params)

    def rate_at(i: jax.Array) -> jax.Array:
        down = (
            1.0
            if num_steps is None
            else jnp.maximum(0.0, (num_steps - i) / max(1.0, num_steps - length))
        )
        return least + (most - least) * jnp.where(i < length, up(i), down)

    return _with_first_rate(least, rate_at)


def _warmup_cosine(params: Params, lr: float) -> Rate:
    least, end = params["warmup_min_ratio"], params["cos_min_ratio"]
    length, up = _warmup(params)
    left = max(1, params["total_num_steps"] - length)

    def rate_at(i: jax.Array) -> jax.Array:
        progress = jnp.minimum(1.0, (i - length + 1) / left)
        down = end + (1 - end) * (1 + jnp.cos(math.pi * progress)) / 2
        return lr * jnp.where(i < length, least + up(i) * (1 - least), jnp.maximum(0.0, down))

    return _with_first_rate(0.0, rate_at)


def _one_cycle(params: Params, lr: float) -> Rate:
    least, most, first = (params[f"cycle_{x}"] for x in ("min_lr", "max_lr", "first_step_size"))
    second, first_stairs = params["cycle_second_step_size"], params["cycle_first_stair_count"]
    second = first if second is None else second
    second_stairs = params["cycle_second_stair_count"]
    second_stairs = first_stairs if second_stairs is None else second_stairs
    cycle_length, size, decay_rate = (
        int(first + second),
        params["decay_step_size"],
        params["decay_lr_rate"],
    )

    def rate_at(n: Index) -> jax.Array:
        phase = n % cycle_length
        up, down = (
            _fraction(phase, first, first_stairs),
            _fraction(cycle_length - phase, max(second, 1), second_stairs),
        )
        cycle = least + (most - least) * jnp.where(phase <= first, up, down)
        after = (
            least / (1 + decay_rate * (n - cycle_length) / size) if size and decay_rate else least
        )
        return jnp.where(n <= cycle_length, cycle, after)

    return rate_at


def _fraction(n: Index, length: int, stairs: int) -> Any:
    """Return the fraction n / length, rounded down to one of `stairs` stairs if there are any."""
    return _stair_index(n, int(stairs), int(length)) / stairs if stairs else n / length


def _range_test(params: Params, lr: float) -> Rate:
    least, size, rate = (params[f"lr_range_test_{x}"] for x in ("min_lr", "step_size", "step_rate"))
    num_stairs = lambda n: jnp.asarray(n, jnp.int32) // int(size)
    stairs = params["lr_range_test_staircase"]
    return lambda n: least * (1 + rate * (num_stairs(n) if stairs else n / size))


def _stair_index(n: Index, stairs: int, length: int) -> jax.Array:
    """Return floor(n * stairs / length) by long division, n from 0 to length, below 2**30.

    The product may have more than 32 bits. A quotient of floats would be too small where XLA
    multiplies by the reciprocal instead, as it does in a program.

    >>> int(_stair_index(94_715, 50_000, 100_000))
    47357
    """
    updates = jnp.asarray(n, jnp.uint32)
    quotient = rest = jnp.zeros_like(updates)
    for bit in f"{stairs:b}":  # invariant: updates * (bits so far) = quotient * length + rest
        rest = 2 * rest + updates * int(bit)
        quotient, rest = 2 * quotient + rest // length, rest % length
    return quotient


KINDS = {
    "WarmupLR": _warmup_lr,
    "WarmupDecayLR": _warmup_lr,
    "WarmupCosineLR": _warmup_cosine,
    "OneCycle": _one_cycle,
    "LRRangeTest": _range_test,
}
