"""A model in three parts as what runs it sees it: functions and values of one device."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hfjax.base.paths import Flat


@dataclass(frozen=True)
class ModelParts:
    """What the stages run, each function for one microbatch `m`."""

    first: Callable  # (outside, m) -> x, what enters the first layer
    passes: Callable  # (known, slots, x, split) -> Dissected; known: (values of a unit, number, m)
    last: Callable  # (outside, x, m) -> (total, aux): what is differentiated, and what is told
    values: Flat  # parameters of this stage's units, [chunks * units, ...]
    outside: Flat  # parameters of first and last
    slots: Mapping[str, Any]  # shapes and dtypes of one unit's gradients
    order: np.ndarray  # [stages, chunks, units]: number of the unit, -1 where there is none
    keep: Callable | None = None  # the passes of the last microbatch, if that recomputes less
