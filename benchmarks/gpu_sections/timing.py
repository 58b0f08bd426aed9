"""Programs timed in turn on one device: compiled beside each other, fed with data beyond the cache.

A program's calls are queued one behind the other and waited for once, so the time of a call is the
device's, not Python's. Input sets rotate, so that none is left in the cache from the last call.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CACHE = 64 * 2**20  # bytes of level 2, of the largest Hopper
BLOCK_S = 0.015  # seconds that a block of calls takes
MOST_CALLS, MOST_SETS, COMPILERS = 50, 8, 8


@dataclass(eq=False)
class Program:
    """A function compiled for its operands. The first `kept` results replace its first operands."""

    name: str
    function: Callable
    kept: int = 0
    compiled: Any = None
    failure: str | None = None
    calls: int = 1
    ms: list[float] = field(default_factory=list)
    turn: int = 0

    def compile(self, operands: Sequence[Any]) -> None:
        """Compile for operands; a failure is kept in words."""
        try:
            jitted = jax.jit(self.function, donate_argnums=tuple(range(self.kept)))
            self.compiled = jitted.lower(*operands).compile()
        except Exception as wrong:
            self.failure = told(wrong)

    def block(self, sets: list[tuple], calls: int) -> float:
        """Return the milliseconds of a call, of so many queued ones."""
        start, result = time.perf_counter(), None
        for _ in range(calls):
            which = self.turn % len(sets)
            self.turn += 1
            result = self.compiled(*sets[which])
            if self.kept:
                sets[which] = (*jax.tree.leaves(result)[: self.kept], *sets[which][self.kept :])
        jax.block_until_ready(result)
        return 1e3 * (time.perf_counter() - start) / calls

    def warm_up(self, sets: list[tuple]) -> None:
        """Run until the speed is known; choose how many calls a block has."""
        self.block(sets, 2)
        ms = self.block(sets, 2)
        self.calls = int(min(max(1e3 * BLOCK_S / ms, 2), MOST_CALLS))

    @property
    def median(self) -> float | None:
        """Milliseconds of a call."""
        return statistics.median(self.ms) if self.ms else None

    @property
    def spread(self) -> float | None:
        """The distance of the quartiles, relative to the median."""
        if len(self.ms) < 4:
            return None
        low, middle, high = statistics.quantiles(self.ms, n=4)
        return (high - low) / middle

    @property
    def memory(self) -> int | None:
        """Bytes of the device that a call takes beside its operands: temporaries and results."""
        seen = self.compiled.memory_analysis() if self.compiled else None
        if seen is None:
            return None
        own = seen.output_size_in_bytes - seen.alias_size_in_bytes
        return seen.temp_size_in_bytes + own


def told(wrong: BaseException) -> str:
    """Return a failure in one line that is not too long."""
    words = " ".join(str(wrong).split())
    return f"{type(wrong).__name__}: {words}"[:300]


def compile_all(programs: Sequence[Program], operands: Sequence[Any]) -> None:
    """Compile programs beside each other; shapes are enough."""
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands]
    with ThreadPoolExecutor(COMPILERS) as beside:
        list(beside.map(lambda program: program.compile(shapes), programs))


def in_turn(programs: Sequence[Program], sets: Mapping[str, list[tuple]], rounds: int) -> None:
    """Time programs in turn; `sets` are the operands of each, by its name."""
    for program in programs:
        program.warm_up(sets[program.name])
    for _ in range(rounds):
        for program in programs:
            program.ms.append(program.block(sets[program.name], program.calls))


def sets_of(make: Callable[[int], tuple], rotate: bool) -> list[tuple]:
    """Return random operands, as many sets as it takes to be larger than the cache by far."""
    first = jax.block_until_ready(make(0))
    size = sum(x.nbytes for x in jax.tree.leaves(first))
    count = min(max(1, -(-4 * CACHE // max(size, 1))), MOST_SETS) if rotate else 1
    return [first, *(jax.block_until_ready(make(seed)) for seed in range(1, count))]


def error(found: Any, expected: Any) -> float:
    """Return the worst relative error of arrays in norm; NaN and infinity are errors of 1.

    >>> error([jnp.ones(3)], [jnp.ones(3)])
    0.0
    """
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    worst = [float(_relative(x, y)) for x, y in pairs]
    return max((e if np.isfinite(e) else 1.0 for e in worst), default=1.0)


@jax.jit
def _relative(found: jax.Array, expected: jax.Array) -> jax.Array:
    wide = lambda x: x.astype(jnp.float32)
    norm = lambda x: jnp.sqrt((x * x).sum())
    apart = norm(wide(found) - wide(expected))
    return apart / jnp.maximum(norm(wide(expected)), 1e-30)
