"""Which documents are for validation: a function of their number, so the same each time."""

import math
from collections.abc import Iterable, Iterator

import numpy as np

from hfjax.data.sources import Document


def split(documents: Iterable[Document], valid: float) -> Iterator[tuple[Document, int]]:
    """Yield each document with 1 if it is for validation: one of every 1 / valid, drawn by number.

    Of a single document the last part is.
    """
    waiting = iter(documents)
    first, second = next(waiting, None), next(waiting, None)
    if first is not None and second is None:
        yield from _halves(first, valid)
        return
    for number, document in enumerate(d for d in (first, second) if d is not None):
        yield document, is_valid(number, valid)
    for number, document in enumerate(waiting, 2):
        yield document, is_valid(number, valid)


def _halves(document: Document, valid: float) -> Iterator[tuple[Document, int]]:
    cut = math.ceil(len(document.text) * (1 - valid))
    for part, text in enumerate((document.text[:cut], document.text[cut:])):
        if text:
            yield Document(text, document.where, document.read), part


def is_valid(number: int, valid: float) -> bool:
    """Return whether a document is for validation: of each 1 / valid in a row, one drawn by chance.

    >>> [sum(is_valid(number, 0.1) for number in range(n)) for n in (10, 20, 1000)]
    [1, 2, 100]
    >>> sum(is_valid(number, 0.3) for number in range(1000))
    299
    """
    stratum = math.floor(number * valid)
    drawn = (math.floor((s + _chance(s)) / valid) for s in (stratum, stratum + 1))
    return number in drawn


def _chance(number: int) -> float:
    """Return a number in [0, 1) that is the same on every machine."""
    return float(np.random.SeedSequence(number).generate_state(1)[0]) / 2**32
