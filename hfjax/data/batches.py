"""Global batches cut from the stream of rows, of which a process reads its own rows."""

from collections.abc import Sequence
from typing import Any, cast

import grain
import numpy as np

from hfjax.data.rows import Row, Rows


class Batches(grain.MapDataset):
    """Batch b of a process: its rows of stream[start + b * rows] and the following ones."""

    def __init__(
        self,
        stream: grain.MapDataset[int],
        sets: Sequence[Rows],
        rows: int,
        mine: np.ndarray,
        start: int,
        pad_last: bool,
    ):
        super().__init__(stream)
        self._stream, self._sets, self._rows, self._mine = stream, sets, rows, mine
        self._start, self._pad_last = start, pad_last
        self._first = np.cumsum([0, *map(len, sets)])  # row numbers at which each set begins

    def __len__(self) -> int:
        left = max(len(self._stream) - self._start, 0)
        return -(-left // self._rows) if self._pad_last else left // self._rows

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        places = self._start + index * self._rows + self._mine
        rows = [self._row(int(place)) for place in places]
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

    def _row(self, place: int) -> Row:
        """Return a row of the stream; beyond its end one of zeros."""
        if place >= len(self._stream):
            return {name: np.zeros_like(x) for name, x in self._row(0).items()}
        number = cast(int, self._stream[place])
        of = int(np.searchsorted(self._first, number, "right")) - 1
        row = self._sets[of][number - int(self._first[of])]
        if not self._pad_last or "mask" in row:
            return row
        return {**row, "mask": np.ones(len(row["tokens"]) - 1, np.float32)}
