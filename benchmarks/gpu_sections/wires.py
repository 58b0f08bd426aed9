"""Collectives with the cast fused, on a ring of one GPU: the memory's part.

On one GPU nothing travels: what is seen is that the cast runs at the speed of a copy.
"""

from collections.abc import Callable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from benchmarks.gpu_sections.cases import FP32, Case, Goal, run_cases, tunings
from benchmarks.gpu_sections.rows import Reporter
from hfjax.pallas_kernels.collectives.casting import Tuning, tuned
from hfjax.pallas_kernels.collectives.reference import all_gather, reduce_scatter

ROWS, TINY, WIDTH = 2**15, 8, 4096
AXIS = "tensor"
GOALS = (Goal("of_ceiling", 0.85),)
TUNINGS = ({"elements": 2048}, {"elements": 8192}, {"stages": 2}, {"stages": 4}, {"blocks": 264})


def run(reporter: Reporter) -> None:
    """Measure the collectives."""
    run_cases(reporter, cases)


def alone(function: Callable, inputs: int = 1) -> Callable:
    """Return a function of a ring, run on a ring of this one device."""
    mesh = Mesh(np.array(jax.devices()[:1]), (AXIS,))
    specs = {"in_specs": (P(AXIS),) * inputs, "out_specs": P(AXIS)}
    return jax.shard_map(function, mesh=mesh, check_vma=False, **specs)


def cases(smoke: bool) -> Iterator[Case]:
    """Yield a case for each collective."""
    size = _elements(smoke)
    both = (("all_gather", 2, all_gather), ("reduce_scatter", 4, reduce_scatter))
    for i, (name, left, move) in enumerate(both):
        reference = _of(move)
        candidates = {"reference": reference}
        if not smoke:
            found = tunings(Tuning(), *TUNINGS)
            candidates = {text: _of(tuned(t)[i]) for text, t in found.items()}
        yield Case(
            name,
            f"ring of 1, float32, {jnp.bfloat16.__name__} on the wire, {size / 2**20:g}Mi",
            operands=partial(_operands, smoke),
            candidates=candidates,
            rivals={"XLA": reference},
            oracle=reference,
            flops=0.0,
            bytes=(4 + left) * size,
            allowed=FP32,
            goals=GOALS,
            notes={"ring": 1},
        )


def _of(collective: Callable) -> Callable:
    return alone(lambda x: collective(x, AXIS, jnp.bfloat16))


def _elements(smoke: bool) -> int:
    return (TINY if smoke else ROWS) * WIDTH


def _operands(smoke: bool, seed: int) -> tuple:
    return (jax.random.normal(jax.random.key(seed), (TINY if smoke else ROWS, WIDTH)),)
