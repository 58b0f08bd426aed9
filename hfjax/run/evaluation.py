"""The loss over a data set: each of its rows once."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from hfjax.plan import State


class Evaluated(NamedTuple):
    """A mean loss, and of how many tokens it is the mean."""

    loss: float
    tokens: int


def evaluate(
    step: Callable, state: State, batches: Iterable[Any], most: int | None = None
) -> Evaluated:
    """Return the mean loss by `hfjax.eval_step` over all batches, or the first `most` of them."""
    found = [step(state, batch) for batch in itertools.islice(batches, most)]
    if not found:
        raise ValueError("evaluate: there is no batch. Give a data set with at least one row.")
    weights = [float(metrics["weight"]) for metrics in found]
    losses = [float(metrics["loss"]) for metrics in found]
    total = sum(w * loss for w, loss in zip(weights, losses, strict=True) if w)
    return Evaluated(total / sum(weights), round(sum(weights)))
