"""The order of rows, and global batches cut from it.

Rows are shuffled anew each epoch and several data sets are mixed, as a function of the seed. A
process reads its own rows of each batch.
"""

import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, cast

import grain
import numpy as np

from hfjax.data.examples import Row

MOST_ROWS = 1 << 32  # what grain's shuffle can number


def order(
    counts: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool, epochs: int | None
) -> grain.MapDataset[int]:
    """Return the stream of row numbers, at random access; set i's rows are numbered after i - 1's.

    >>> stream = order([3], [1.0], seed=0, shuffle=True, epochs=2)
    >>> sorted(int(stream[i]) for i in range(3)), len(stream)
    ([0, 1, 2], 6)
    """
    starts = list(accumulate(counts, initial=0))
    if starts[-1] > MOST_ROWS:
        raise ValueError(f"{starts[-1]} rows: at most {MOST_ROWS} can be shuffled. Longer rows.")
    streams = []
    for i, (start, count) in enumerate(zip(starts, counts, strict=False)):
        one = grain.MapDataset.range(start, start + count)
        if shuffle:
            one = one.shuffle(seed=int(np.random.SeedSequence([seed, i]).generate_state(1)[0]))
        streams.append(one.repeat(epochs))
    return streams[0] if len(streams) == 1 else grain.MapDataset.mix(streams, list(weights))


def fingerprint(stream: grain.MapDataset[int]) -> int:
    """Return a CRC32 of the beginning of a stream: another grain may shuffle otherwise."""
    numbers = [cast(int, stream[i]) for i in range(min(64, len(stream)))]
    return zlib.crc32(np.array(numbers, "<i8").tobytes())


class RowSource(Protocol):
    """What reads rows by their numbers; every row has the same names and shapes."""

    def row(self, number: int, place: int) -> Row:
        """Return a row; `place` is where it stands in the stream, so it tells the epoch."""
        ...

    def nothing(self) -> Row:
        """Return a row that counts for nothing: the last batch is filled up with it."""
        ...

    def together(self, rows: list[Row]) -> Row:
        """Return rows as a batch."""
        ...


class Batches(grain.MapDataset):
    """Batch b of a process: its rows of stream[start + b * rows] and the following ones."""

    def __init__(
        self,
        stream: grain.MapDataset[int],
        source: RowSource,
        rows: int,
        mine: np.ndarray,
        start: int,
        pad_last: bool,
    ) -> None:
        super().__init__(stream)
        self._stream, self._source, self._rows, self._mine = stream, source, rows, mine
        self._start, self._pad_last = start, pad_last

    def __len__(self) -> int:
        left = max(len(self._stream) - self._start, 0)
        return -(-left // self._rows) if self._pad_last else left // self._rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        places = self._start + index * self._rows + self._mine
        return self._source.together([self._row(int(place)) for place in places])

    def _row(self, place: int) -> Row:
        """Return a row of the stream; beyond its end one of nothing."""
        if place >= len(self._stream):
            return self._source.nothing()
        return self._source.row(cast(int, self._stream[place]), place)
