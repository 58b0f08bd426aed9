"""Which device has which positions of a sharded sequence.

A sequence is split into equal chunks. In `contiguous` order device i has chunk i. In `zigzag` order
device i of N has the chunks i and 2N - 1 - i: under a causal mask early positions have few keys
and late ones many, so that each device has the same work (zhuzilin/ring-flash-attention, issue 2).

Ulysses exchanges heads for positions in groups of neighbours. A group then has the positions of one
device of the ring, each of its members an equal part.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class SequenceLayout:
    """How positions are sharded over the devices that share a sequence.

    Attributes:
        devices: How many share a sequence.
        order: zigzag or contiguous.
        ulysses: How many neighbours exchange heads for positions; 1 is off.

    Example:
        >>> SequenceLayout(4, "zigzag").chunks.tolist()
        [[0, 7], [1, 6], [2, 5], [3, 4]]
        >>> SequenceLayout(4, "zigzag", ulysses=2).device_positions(16).tolist()
        [[0, 1, 2, 3], [12, 13, 14, 15], [4, 5, 6, 7], [8, 9, 10, 11]]
    """

    devices: int
    order: str = "zigzag"
    ulysses: int = 1

    @property
    def ring_size(self) -> int:
        """The number of groups: keys and values are sent from one to the next."""
        return self.devices // self.ulysses

    @property
    def chunks(self) -> np.ndarray:
        """The indices of each group's chunks, in order: [ring, chunks]."""
        first = np.arange(self.ring_size)
        if self.order == "contiguous":
            return first[:, None]
        return np.stack([first, 2 * self.ring_size - 1 - first], axis=1)

    @property
    def length_multiple(self) -> int:
        """The number that must divide the length of a sequence."""
        count = self.chunks.size
        each = self.ulysses // math.gcd(self.ulysses, self.chunks.shape[1])
        return count * each

    def device_positions(self, length: int) -> np.ndarray:
        """Return the positions of each device, in order: [devices, length / devices]."""
        size = length // self.chunks.size
        positions = self.chunks[..., None] * size + np.arange(size)
        return positions.reshape(self.devices, -1)

    @property
    def block_ids(self) -> tuple[tuple[int, ...], ...] | None:
        """The blocks of each device, as few as possible; None: one each, in order.

        >>> SequenceLayout(2, "zigzag").block_ids, SequenceLayout(2, "contiguous").block_ids
        (((0, 3), (1, 2)), None)
        """
        positions = self.device_positions(self.length_multiple)
        if (positions == np.arange(self.length_multiple).reshape(self.devices, -1)).all():
            return None
        return tuple(tuple(ids.tolist()) for ids in positions)

    def run_length(self, length: int) -> int:
        """Return how many consecutive positions a device has, from a multiple of that number on.

        >>> [SequenceLayout(2, order).run_length(16) for order in ("zigzag", "contiguous")]
        [4, 8]
        """
        return math.gcd(length // self.chunks.size, length // self.devices)

    def hops(self, length: int, window: int | None) -> int:
        """Return how many groups before a group have keys that it may see.

        >>> [SequenceLayout(8, order).hops(64, window=9) for order in ("contiguous", "zigzag")]
        [1, 7]
        """
        if window is None or self.order == "zigzag":
            return self.ring_size - 1
        return min(self.ring_size - 1, -(-(window - 1) // (length // self.ring_size)))

    def check_length(self, length: int, label: str) -> None:
        """Refuse a length that cannot be sharded equally over the devices."""
        if length % self.length_multiple:
            fits = -(-length // self.length_multiple) * self.length_multiple
            raise ValueError(
                f"{label}: {length} positions do not divide by {self.length_multiple} "
                f"({self.order} order on {self.devices} devices{self._ulysses_text}). Give "
                f"sequences of {fits} positions (pad them, with mask 0 "
                f"there){self._shorter_text(fits)}{self._order_text(length)}."
            )

    @property
    def _ulysses_text(self) -> str:
        return f", ulysses={self.ulysses}" if self.ulysses > 1 else ""

    def _shorter_text(self, fits: int) -> str:
        return f" or of {fits - self.length_multiple}" if fits > self.length_multiple else ""

    def _order_text(self, length: int) -> str:
        other = SequenceLayout(self.devices, "contiguous", self.ulysses)
        is_divisible = self.order != "contiguous" and length % other.length_multiple == 0
        return ', or choose hfjax.ContextParallel(order="contiguous")' if is_divisible else ""


def attention_work(seq_layout: SequenceLayout, documents: np.ndarray) -> np.ndarray:
    """Return how many pairs of a query and a key each device computes: [devices].

    Attention is causal, inside documents; `documents` has full sequences, [B, S]. Blocks of chunks
    in which no query sees a key are skipped, all others are computed in full.

    Example:
        >>> attention_work(SequenceLayout(2, "contiguous"), np.zeros((1, 4), int)).tolist()
        [4, 8]
    """
    length = documents.shape[1]
    chunks = seq_layout.chunks
    size = length // chunks.size
    chunk_documents = documents.reshape(len(documents), chunks.size, size)
    low, high = chunk_documents.min(-1), chunk_documents.max(-1)
    overlaps = (low[:, :, None] <= high[:, None, :]) & (low[:, None, :] <= high[:, :, None])
    is_due = overlaps.any(0) & np.tri(chunks.size, dtype=bool)
    chunk_work = is_due.sum(1) * size**2
    return (
        np.repeat([chunk_work[chunk_ids].sum() for chunk_ids in chunks], seq_layout.ulysses)
        // seq_layout.ulysses
    )


def describe_work(seq_layout: SequenceLayout, batch: Mapping[str, Any]) -> str:
    """Return a line that says how evenly the devices of a sequence share the work of a batch."""
    documents = batch.get("documents")
    length = batch["tokens"].shape[1] - 1
    document_ids = (
        np.zeros((1, length), int) if documents is None else np.asarray(documents)[:, :length]
    )
    device_work = attention_work(seq_layout, document_ids)
    ratios = " ".join(f"{n / device_work.mean():.2f}" for n in device_work)
    return (
        f"attention of the first batch: work of each device over the mean {ratios}; greatest "
        f"{max_over_mean(device_work):.2f}"
    )


def max_over_mean(device_work: Sequence[int] | np.ndarray) -> float:
    """Return how much longer the busiest device works than the average.

    >>> max_over_mean([1, 3])
    1.5
    """
    return float(np.max(device_work) / np.mean(device_work))
