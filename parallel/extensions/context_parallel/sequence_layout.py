"""Who holds which positions of a row that lies on several devices.

A row is cut into equal chunks. In `contiguous` order device i holds chunk i. In `zigzag` order
device i of N holds the chunks i and 2N - 1 - i: under a causal mask early positions have few keys
and late ones many, so that each device has the same work (zhuzilin/ring-flash-attention, issue 2).

Ulysses exchanges heads for positions in groups of neighbours. A group then holds what one device
of the ring would hold, each of its members an equal part.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Deal:
    """How positions are dealt to the devices that share a row.

    Attributes:
        devices: How many share a row.
        order: zigzag or contiguous.
        ulysses: How many neighbours exchange heads for positions; 1 is off.

    Example:
        >>> Deal(4, "zigzag").chunks.tolist()
        [[0, 7], [1, 6], [2, 5], [3, 4]]
        >>> Deal(4, "zigzag", ulysses=2).positions(16).tolist()
        [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
    """

    devices: int
    order: str = "zigzag"
    ulysses: int = 1

    @property
    def ring(self) -> int:
        """The number of groups: keys and values travel from one to the next."""
        return self.devices // self.ulysses

    @property
    def chunks(self) -> np.ndarray:
        """The numbers of the chunks that each group holds, in order: [ring, chunks]."""
        first = np.arange(self.ring)
        if self.order == "contiguous":
            return first[:, None]
        return np.stack([first, 2 * self.ring - 1 - first], axis=1)

    @property
    def unit(self) -> int:
        """What the number of positions has to divide by."""
        count = self.chunks.size
        each = self.ulysses // math.gcd(self.ulysses, self.chunks.shape[1])
        return count * each

    def positions(self, length: int) -> np.ndarray:
        """Return which positions each device holds, in order: [devices, length / devices]."""
        size = length // self.chunks.size
        held = self.chunks[..., None] * size + np.arange(size)
        return held.reshape(self.devices, -1)

    @property
    def pieces(self) -> tuple[tuple[int, ...], ...] | None:
        """The pieces that each device holds, as few as can be; None: one each, in order.

        >>> Deal(2, "zigzag").pieces, Deal(2, "contiguous").pieces
        (((0, 3), (1, 2)), None)
        """
        held = self.positions(self.unit)
        if (held == np.arange(self.unit).reshape(self.devices, -1)).all():
            return None
        return tuple(tuple(pieces.tolist()) for pieces in held)

    def run(self, length: int) -> int:
        """Return how many positions that a device holds follow each other, from a multiple on.

        >>> Deal(2, "zigzag").run(16), Deal(2, "contiguous").run(16)
        (4, 8)
        """
        return math.gcd(length // self.chunks.size, length // self.devices)

    def hops(self, length: int, window: int | None) -> int:
        """Return how many groups before a group have keys that it may see.

        >>> Deal(8, "contiguous").hops(64, window=9), Deal(8, "zigzag").hops(64, window=9)
        (1, 7)
        """
        if window is None or self.order == "zigzag":
            return self.ring - 1
        return min(self.ring - 1, -(-(window - 1) // (length // self.ring)))

    def check(self, length: int, what: str) -> None:
        """Refuse a number of positions that the devices cannot share equally."""
        if length % self.unit:
            fits = -(-length // self.unit) * self.unit
            raise ValueError(
                f"{what}: {length} positions do not divide by {self.unit} ({self.order} order on "
                f"{self.devices} devices{self._with_ulysses}). Give rows of {fits} positions "
                f"(pad them, with mask 0 there){self._shorter(fits)}{self._other_order(length)}."
            )

    @property
    def _with_ulysses(self) -> str:
        return f", ulysses={self.ulysses}" if self.ulysses > 1 else ""

    def _shorter(self, fits: int) -> str:
        return f" or of {fits - self.unit}" if fits > self.unit else ""

    def _other_order(self, length: int) -> str:
        other = Deal(self.devices, "contiguous", self.ulysses)
        fits = self.order != "contiguous" and length % other.unit == 0
        return ', or choose hfjax.Context(order="contiguous")' if fits else ""


def work(deal: Deal, documents: np.ndarray) -> np.ndarray:
    """Return how many pairs of a query and a key each device computes: [devices].

    Causal, inside documents; of a batch whole rows, [B, S], are given. Blocks of chunks in which no
    query sees a key are skipped, all others are computed whole.

    Example:
        >>> work(Deal(2, "contiguous"), np.zeros((1, 4), int)).tolist()
        [4, 8]
    """
    length = documents.shape[1]
    chunks = deal.chunks
    size = length // chunks.size
    parts = documents.reshape(len(documents), chunks.size, size)
    low, high = parts.min(-1), parts.max(-1)
    meet = (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
    due = meet.any(0) & np.tri(chunks.size, dtype=bool)
    of_chunk = due.sum(1) * size**2
    return np.repeat([of_chunk[held].sum() for held in chunks], deal.ulysses) // deal.ulysses


def work_of(deal: Deal, batch: Mapping[str, Any]) -> str:
    """Return a line that says how evenly the devices of a row share the work of a batch."""
    documents = batch.get("documents")
    length = batch["tokens"].shape[1] - 1
    inside = np.zeros((1, length), int) if documents is None else np.asarray(documents)[:, :length]
    found = work(deal, inside)
    shares = " ".join(f"{n / found.mean():.2f}" for n in found)
    return (
        f"attention of the first batch: work of each device over the mean {shares}; greatest "
        f"{max_over_mean(found):.2f}"
    )


def max_over_mean(work: Sequence[int] | np.ndarray) -> float:
    """Return how much longer the busiest device works than the average.

    >>> max_over_mean([1, 3])
    1.5
    """
    return float(np.max(work) / np.mean(work))
