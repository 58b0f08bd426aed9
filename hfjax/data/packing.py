"""Best-fit-decreasing packing of documents into rows, whole groups of equal pieces at a time.

Best fit decreasing as in "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Packed:
    """Pieces [start, start + size) of the tokens in the order of rows; row i is first[i] on."""

    starts: np.ndarray
    sizes: np.ndarray
    first: np.ndarray

    def __len__(self) -> int:
        return len(self.first) - 1

    def row(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield start and size of each piece of a row."""
        of = slice(self.first[index], self.first[index + 1])
        return zip(self.starts[of].tolist(), self.sizes[of].tolist(), strict=True)


def pieces(offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return where documents' pieces start and how many tokens they have, at most length + 1.

    Neighbours share a token: the last target of one is the first input of the next.

    >>> starts, sizes = pieces(np.array([0, 6, 7, 9]), length=2)
    >>> starts.tolist(), sizes.tolist()
    ([0, 2, 4, 7], [3, 3, 2, 2])
    """
    offsets = np.asarray(offsets)
    targets = np.diff(offsets) - 1
    counts = -(-targets // length)  # documents of one token have none
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(offsets[:-1], counts) + within * length
    left = np.repeat(targets, counts) - within * length
    return starts, np.minimum(left, length) + 1


def pack(starts: np.ndarray, sizes: np.ndarray, capacity: int) -> Packed:
    """Return the pieces packed; rows follow their first pieces, pieces keep their order."""
    row_of = best_fit(sizes, capacity)
    by_row = np.argsort(row_of, kind="stable")
    rows = row_of[by_row]
    heads = np.flatnonzero(np.diff(rows, prepend=-1))  # where each row begins
    rank = np.empty(len(heads), np.int64)
    rank[np.argsort(by_row[heads])] = np.arange(len(heads))
    order = np.argsort(rank[row_of], kind="stable")
    counts = np.bincount(rank[row_of], minlength=len(heads))
    return Packed(starts[order], sizes[order], np.append(0, np.cumsum(counts)))


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the row of each piece: the largest first, each where the least room is left.

    >>> best_fit(np.array([2, 5, 3, 4, 1]), 5).tolist()
    [2, 0, 2, 1, 1]
    """
    row_of, rows = np.empty(len(sizes), np.int64), 0
    open_rows = _OpenRows()
    order = np.argsort(-sizes, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(sizes[order])) + 1, len(order))
    for group in np.split(order, ends[:-1]):
        size = int(sizes[group[0]]) if len(group) else 1
        while len(group):
            room = open_rows.least(size) or capacity
            each = room // size  # pieces of this size that one such row takes
            wanted = -(-len(group) // each)
            found = open_rows.take(room, wanted)
            if found is None:
                found = np.arange(rows, rows + wanted)
                rows += wanted
            fits = len(found) * each
            taken, group = group[:fits], group[fits:]
            row_of[taken] = found[np.arange(len(taken)) // each]
            full, rest = divmod(len(taken), each)
            open_rows.put(room - each * size, found[:full])
            open_rows.put(room - rest * size, found[full:])
    return row_of


class _OpenRows:
    """Rows that have room left, by how much; none of them is empty."""

    def __init__(self):
        self._rooms: list[int] = []
        self._rows: dict[int, list[np.ndarray]] = {}

    def least(self, size: int) -> int | None:
        """Return the least room that is enough, if any is."""
        at = bisect_left(self._rooms, size)
        return self._rooms[at] if at < len(self._rooms) else None

    def take(self, room: int, most: int) -> np.ndarray | None:
        """Remove and return up to `most` rows with a room, if there are any."""
        if room not in self._rows:
            return None
        parts = self._rows[room]
        last = parts.pop()
        if len(last) > most:
            parts.append(last[most:])
        if not parts:
            del self._rows[room]
            self._rooms.remove(room)
        return last[:most]

    def put(self, room: int, rows: np.ndarray) -> None:
        """Add rows that have a room left."""
        if not room or not len(rows):
            return
        if room not in self._rows:
            insort(self._rooms, room)
        self._rows.setdefault(room, []).append(rows)
