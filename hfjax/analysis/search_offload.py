"""Finds the least offload that fits in memory, by bisection over compiled programs."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hfjax.utils.keywords import is_int, is_real

STEPS = 16  # the ratios that are tried are 0/16, 1/16, …, 16/16


@dataclass(frozen=True)
class OffloadSearch:
    """The result: the ratio, None if none fits, and the peak of every ratio that was built."""

    ratio: float | None
    memory: int
    peaks: Mapping[float, int]

    @property
    def monotone(self) -> bool:
        """Whether more offload never took more memory, among the ratios that were built."""
        peaks = [self.peaks[ratio] for ratio in sorted(self.peaks)]
        return peaks == sorted(peaks, reverse=True)


def least_offload(build: Callable[[float], int], memory: int, steps: int = STEPS) -> OffloadSearch:
    """Return the least offload that fits: a ratio on the grid of 1/steps; the next lower does not.

    It does not assume that more offload takes less memory: the next ratio but one below is built as
    well, and if that fits the search goes on below it.

    Args:
        build: Function of a ratio from 0 to 1 that returns the peak bytes of the program compiled
            with it. It is called once for each ratio.
        memory: The bytes that the peak has to fit.
        steps: The resolution of the grid: 0, 1/steps, 2/steps … 1.

    Returns:
        An object with `ratio` (None if none fits), `memory`, and `peaks` by ratio.

    Example:
        >>> import hfjax
        >>> found = hfjax.analysis.least_offload(lambda ratio: round(100 - 60 * ratio), memory=70)
        >>> found.ratio, found.peaks[0.5]
        (0.5, 70)
    """
    if not is_int(steps, 1) or not is_real(memory, 0, math.inf):
        raise ValueError(
            f"least_offload: memory={memory!r}, steps={steps!r}: a number of bytes, at least 0, "
            "and a whole number of steps of the grid, at least 1, are expected."
        )
    peaks: dict[float, int] = {}

    def fits(step: int) -> bool:
        ratio = step / steps
        if ratio not in peaks:
            peaks[ratio] = build(ratio)
        return peaks[ratio] <= memory

    if fits(0):
        return OffloadSearch(0.0, memory, peaks)
    if not fits(steps):
        return OffloadSearch(None, memory, peaks)
    best = _bisect(fits, 0, steps)
    while best > 2 and fits(best - 2):
        best = _bisect(fits, 0, best - 2)
    return OffloadSearch(best / steps, memory, peaks)


def _bisect(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Return a step that fits while the one below does not; `low` does not fit, `high` does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high
