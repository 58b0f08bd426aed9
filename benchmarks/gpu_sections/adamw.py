"""adamw_shard beside jitted optax: one pass over parameter, moments and gradient, in place."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.gpu_sections.cases import Case, Goal, run_cases, there, tunings
from benchmarks.gpu_sections.rows import Reporter

KERNEL = "adamw_shard"
SIZES = {"124M elements": 124_475_904, "1e9 elements": 10**9}
TINY = {"3000 elements": 3000}
SCALE, RATE, B1, B2, EPS, DECAY, STEP = 0.5, 0.1, 0.9, 0.95, 1e-8, 0.1, 3
MOVED, FLOPS = 30, 20  # bytes and operations of an element: 16 bytes read, 14 written
TUNINGS = ({"vectors": 1}, {"vectors": 4}, {"vectors": 8})


def run(reporter: Reporter) -> None:
    """Measure every size."""
    run_cases(reporter, KERNEL, cases)


def cases(smoke: bool) -> Iterator[Case]:
    """Yield a case for each size."""
    module = there(KERNEL, KERNEL, "reference", "AdamW", "Tuning", "numbers")
    settings = module.AdamW(b1=B1, b2=B2, eps=EPS, weight_decay=DECAY, cast=jnp.bfloat16)
    updated = partial(_ours, module, settings)
    candidates: dict[str, Callable] = {"reference": partial(updated, module.reference)}
    if not smoke:
        found = tunings(module.Tuning(), *TUNINGS)
        make = lambda tuning: partial(updated, partial(module.adamw_shard, tuning=tuning))
        candidates = {name: make(tuning) for name, tuning in found.items()}
    for name, size in (TINY if smoke else SIZES).items():
        yield Case(
            KERNEL,
            name,
            operands=partial(_operands, size),
            candidates=candidates,
            rivals={"optax": _optax},
            oracle=_optax,
            flops=FLOPS * size,
            bytes=MOVED * size,
            shape={"N": size},
            allowed=1e-4,
            kept=3,
            rotate=False,
            goals=(Goal("of_ceiling", 0.85),),
        )


def _operands(size: int, seed: int) -> tuple:
    keys = jax.random.split(jax.random.key(seed), 4)
    parameter, mean, variance, gradient = (jax.random.normal(k, (size,)) for k in keys)
    return parameter, 0.1 * mean, variance * variance, gradient


def _ours(module: Any, settings: Any, update: Callable, *arrays: jax.Array) -> tuple:
    corrections = 1 - B1**STEP, 1 - B2**STEP
    return tuple(update(*arrays, module.numbers(SCALE, RATE, corrections), settings))


def _optax(p: jax.Array, mean: jax.Array, variance: jax.Array, gradient: jax.Array) -> tuple:
    parts = optax.scale_by_adam(B1, B2, EPS), optax.add_decayed_weights(DECAY), optax.scale(-RATE)
    optimizer = optax.chain(*parts)
    state: Any = optimizer.init(p)
    state = (state[0]._replace(count=jnp.int32(STEP - 1), mu=mean, nu=variance), *state[1:])
    moves, state = optimizer.update(SCALE * gradient, state, p)
    new: Any = optax.apply_updates(p, moves)
    return new, state[0].mu, state[0].nu, new.astype(jnp.bfloat16)
