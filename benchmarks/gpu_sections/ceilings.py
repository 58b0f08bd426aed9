"""What this device can do at most: a copy's bytes a second, cuBLAS's operations a second."""

import jax
import jax.numpy as jnp

from benchmarks.gpu_sections.device import described
from benchmarks.gpu_sections.rows import Reporter
from benchmarks.gpu_sections.timing import Program, compile_all, in_turn, sets_of, told

ROUNDS = 9


def run(reporter: Reporter) -> None:
    """Measure copy, product and launch."""
    reporter.row(kernel="device", status="ok", **described())
    elements, side = (2**20, 256) if reporter.smoke else (2**29, 8192)
    rounds = 2 if reporter.smoke else ROUNDS
    key = jax.random.key

    def copied(seed: int) -> tuple:
        return (jax.random.normal(key(seed), (elements,), jnp.float32),)

    def factors(seed: int) -> tuple:
        one, two = jax.random.split(key(seed))
        return tuple(jax.random.normal(k, (side, side), jnp.bfloat16) for k in (one, two))

    copy = Program("copy", lambda x: -x)  # a plain copy would be no program at all
    product = Program("product", jnp.dot)
    small = Program("launch", lambda x: x + 1)
    rows = (
        (copy, copied, {"rate": 8.0 * elements, "unit": "B/s"}),
        (product, factors, {"rate": 2.0 * side**3, "unit": "FLOP/s"}),
        (small, lambda seed: (jnp.ones(8),), {"rate": 1.0, "unit": "1/s"}),
    )
    for program, make, work in rows:
        try:
            sets = sets_of(make, rotate=False)
            compile_all([program], sets[0])
            in_turn([program], {program.name: sets}, rounds)
        except Exception as wrong:
            program.failure = program.failure or told(wrong)
        ms = program.median
        if ms is None:
            reporter.row(kernel=program.name, status=f"failed: {program.failure}")
            continue
        fields = {"ms": ms, "spread": program.spread, "unit": work["unit"]}
        rate = 1e3 * float(work["rate"]) / ms
        reporter.row(kernel=program.name, status="ok", **fields, rate=rate)
