"""The loss over a data set: each of its rows once."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hfjax.plan import State


def check_weighs_by_mask(step: Callable, state: State, batch: Mapping[str, Any]) -> None:
    """Refuse a loss that counts rows of mask 0, as they fill up the last batch."""
    empty = dict(batch, mask=np.zeros_like(batch["tokens"][:, 1:], np.float32))
    if weight := float(step(state, empty)["weight"]):
        raise ValueError(
            f"the loss weighs a batch whose mask is 0 everywhere by {weight:g}: the rows that fill "
            'up the last batch would count. Let it use batch["mask"] and return hfjax.Mean(total, '
            "mask.sum()), or validate with a --batch that divides the rows."
        )


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
    if not any(weights):
        raise ValueError(
            f"evaluate: no token of {len(found)} batches has a weight, so that there is no mean. "
            "Look at the data set and its masks."
        )
    total = sum(w * loss for w, loss in zip(weights, losses, strict=True) if w)
    return Evaluated(total / sum(weights), round(sum(weights)))
