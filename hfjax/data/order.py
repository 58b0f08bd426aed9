"""In which order rows come: shuffled anew each epoch, several sets mixed. A function of seed."""

import zlib
from collections.abc import Sequence
from itertools import accumulate
from typing import cast

import grain
import numpy as np

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
