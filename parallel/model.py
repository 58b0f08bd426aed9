"""A model as a pass over a batch sees it, whoever runs it: stages, or a loop over layers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Model:
    """What the stages run, each function for one microbatch `m`."""

    first: Callable  # (ends, m) -> x, what enters the first layer
    passes: Callable  # (known, slots, x, split) -> Dissected; known: (values of a unit, number, m)
    last: Callable  # (ends, x, m) -> (total, aux): what is differentiated, and what is told
    values: Any  # parameters of this stage's units, [chunks * units, ...]
    ends: Any  # parameters of first and last
    slots: Any  # shapes and dtypes of one unit's gradients
    order: np.ndarray  # [stages, chunks, units]: number of the unit, -1 where there is none
    keep: Callable | None = None  # the passes of the last microbatch, if that recomputes less
