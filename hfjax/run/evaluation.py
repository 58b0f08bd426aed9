"""The loss over a data set: each of its rows once."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from hfjax.plan import State

LAG = 2  # batches behind which results are read: nothing waits for the device


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
    step: Callable,
    state: State,
    batches: Iterable[Any],
    most: int | None = None,
    beat: Callable[[], Any] = lambda: None,
) -> Evaluated:
    """Return the mean loss by `hfjax.eval_step` over all batches, or the first `most` of them.

    `beat` is called for each batch: evaluating gets on.
    """
    read: list[tuple[float, float]] = []
    unread = deque[Any]()
    for batch in itertools.islice(batches, most):
        beat()
        unread.append(step(state, batch))
        while len(unread) > LAG:
            read.append(_read(unread.popleft()))
            beat()
    read += map(_read, unread)
    if not read:
        raise ValueError("evaluate: there is no batch. Give a data set with at least one row.")
    tokens = sum(weight for weight, _ in read)
    if not tokens:
        raise ValueError(
            f"evaluate: no token of {len(read)} batches has a weight, so that there is no mean. "
            "Look at the data set and its masks."
        )
    total = sum(weight * loss for weight, loss in read if weight)
    return Evaluated(total / tokens, round(tokens))


def _read(metrics: Mapping[str, Any]) -> tuple[float, float]:
    """Return weight and loss of a batch."""
    return float(metrics["weight"]), float(metrics["loss"])
