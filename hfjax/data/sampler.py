"""The order of examples, and the global batches cut from it.

Each epoch is shuffled anew and several data sets are mixed, as a function of the seed. A process
reads only its own examples of each batch.
"""

import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Protocol, cast

import grain
import numpy as np

from hfjax.data.examples import ArrayDict

MAX_EXAMPLES = 1 << 32  # limit of grain's shuffle


def example_order(
    counts: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool, epochs: int | None
) -> grain.MapDataset[int]:
    """Return the random-access stream of example numbers; set i's follow those of set i - 1.

    >>> stream = example_order([3], [1.0], seed=0, shuffle=True, epochs=2)
    >>> sorted(int(stream[i]) for i in range(3)), len(stream)
    ([0, 1, 2], 6)
    """
    starts = list(accumulate(counts, initial=0))
    if starts[-1] > MAX_EXAMPLES:
        raise ValueError(
            f"{starts[-1]} examples: at most {MAX_EXAMPLES} can be shuffled. Longer examples."
        )
    streams = []
    for i, (start, count) in enumerate(zip(starts, counts, strict=False)):
        indices = grain.MapDataset.range(start, start + count)
        if shuffle:
            indices = indices.shuffle(
                seed=int(np.random.SeedSequence([seed, i]).generate_state(1)[0])
            )
        streams.append(indices.repeat(epochs))
    return streams[0] if len(streams) == 1 else grain.MapDataset.mix(streams, list(weights))


def fingerprint(stream: grain.MapDataset[int]) -> int:
    """Return a CRC32 of the beginning of a stream: another grain may shuffle differently."""
    numbers = [cast(int, stream[i]) for i in range(min(64, len(stream)))]
    return zlib.crc32(np.array(numbers, "<i8").tobytes())


class ExampleSource(Protocol):
    """Reads examples by number; all have the same names and shapes."""

    def example(self, index: int, position: int) -> ArrayDict:
        """Return an example; `position` is its position in the stream, which gives the epoch."""
        ...

    def padding_example(self) -> ArrayDict:
        """Return an example without weight, which pads the last batch."""
        ...

    def collate(self, examples: list[ArrayDict]) -> ArrayDict:
        """Return examples as a batch."""
        ...


class Batches(grain.MapDataset):
    """Batch b of a process: its examples of the global batch at stream[start + b * batch_size]."""

    def __init__(
        self,
        stream: grain.MapDataset[int],
        source: ExampleSource,
        batch_size: int,
        local_indices: np.ndarray,
        start: int,
        pad_last: bool,
    ) -> None:
        super().__init__(stream)
        self._stream, self._source, self._batch_size, self._local_indices = (
            stream,
            source,
            batch_size,
            local_indices,
        )
        self._start, self._pad_last = start, pad_last

    def __len__(self) -> int:
        remaining = max(len(self._stream) - self._start, 0)
        return (
            -(-remaining // self._batch_size) if self._pad_last else remaining // self._batch_size
        )

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        positions = self._start + index * self._batch_size + self._local_indices
        return self._source.collate([self._example(int(position)) for position in positions])

    def _example(self, position: int) -> ArrayDict:
        """Return an example of the stream; beyond its end a padding example."""
        if position >= len(self._stream):
            return self._source.padding_example()
        return self._source.example(cast(int, self._stream[position]), position)
