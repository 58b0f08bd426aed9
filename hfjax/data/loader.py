"""Batches of a run: the same global batches on any number of processes, and exact resume."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import grain
import numpy as np

from hfjax.base.keywords import is_whole
from hfjax.base.tables import named
from hfjax.data.rows import DocumentRows, Row, Rows, StreamRows
from hfjax.data.stream import Batches, fingerprint, order
from hfjax.data.tokens import DOCUMENTS, TOKENS, TokenSet, check_same_tokenizer

PACKINGS = ("stream", "documents")
Sets = TokenSet | str | Path | Sequence[TokenSet | str | Path]


@dataclass(eq=False)
class Loader:
    """An iterator over batches {"tokens": int32 [rows, length + 1], …} of one or several data sets.

    The order is a function of data, length, packing, weights, shuffle and seed: not of processes,
    threads or batch size. Packed documents, and `documents=True`, add "documents" and "mask".

    Attributes:
        data: A data set or its directory, or several of them.
        rows: Rows of the global batch.
        length: Targets of a row; it has one token more.
        seed: Of the shuffle.
        packing: stream (rows cut from the text as it follows), or documents (whole ones, packed).
        shuffle: Whether each epoch has an order of its own.
        epochs: How often to go over the data. None: without end, as a mixture of several has to.
        mine: The numbers of the rows that this process gives (`share`). None: all.
        weights: How often to draw from each of several data sets. None: equally often.
        documents: Whether rows of a stream have document numbers and a mask.
        pad_last: Whether the last batch is filled up with rows of mask 0, not dropped.
        threads: How many read; 0: none beside the caller.
        prefetch: Batches that wait, at least as many as threads.

    Example:
        >>> import numpy as np, tempfile
        >>> from hfjax.data import Loader, write_tokens
        >>> folder = tempfile.TemporaryDirectory()
        >>> tokens = write_tokens(folder.name, [np.arange(33)], vocab=64)
        >>> loader = Loader(tokens, rows=2, length=4, shuffle=False, epochs=1)
        >>> next(loader)["tokens"].tolist(), len(loader)
        ([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]], 4)
    """

    data: Sets
    rows: int
    length: int
    seed: int = 0
    packing: str = "stream"  # or documents: whole ones, packed
    shuffle: bool = True
    epochs: int | None = None  # None: no end
    mine: Sequence[int] | np.ndarray | None = None
    weights: Sequence[float] | None = None  # of several data sets
    documents: bool = False  # a stream with document numbers and mask
    pad_last: bool = False  # the last batch is filled up with rows of mask 0, not dropped
    threads: int = 2
    prefetch: int = 4  # batches that wait
    _position: int = field(default=0, init=False, repr=False)
    _iterator: Any = field(default=None, init=False, repr=False)

    def __post_init__(self):
        _check_sizes(self)
        _check_ends(self)
        _check_weights(self)
        if self.rows > self.rows_per_epoch and not self.pad_last:
            raise ValueError(
                f"a batch of {self.rows} rows: the data has {self.rows_per_epoch} rows of "
                f"{self.length} tokens. Lower rows or length, or give more data."
            )

    # -- the batches ----------------------------------------------------------------------

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        """Return the next batch; StopIteration after the last one."""
        if self._iterator is None:
            options = grain.ReadOptions(self.threads, self.prefetch)
            self._iterator = iter(self._batches(self._position).to_iter_dataset(options))
        try:
            batch = next(self._iterator)
        except BaseException:  # also Ctrl-C: the next call tries the same batch
            self._go_to(self._position)
            raise
        self._position += self.rows
        return batch

    def at(self, number: int) -> Row:
        """Return batch `number`, counted from the beginning; the position stays.

        Args:
            number: From 0 on.

        Example:
            >>> import numpy as np, tempfile
            >>> from hfjax.data import Loader, write_tokens
            >>> folder = tempfile.TemporaryDirectory()
            >>> tokens = write_tokens(folder.name, [np.arange(33)], vocab=64)
            >>> Loader(tokens, rows=2, length=4, shuffle=False).at(1)["tokens"].tolist()
            [[8, 9, 10, 11, 12], [12, 13, 14, 15, 16]]
        """
        count = len(self._batches(0))
        if number not in range(count) or isinstance(number, bool | float):
            raise ValueError(f"batch {number}: there are {count}, from 0 on.")
        return self._batches(0)[number]

    def __len__(self) -> int:
        """Return the number of batches of all epochs, counted from the beginning."""
        if self.epochs is None:
            raise TypeError("a loader without epochs has no end, so no length. Give epochs=1.")
        return len(self._batches(0))

    @property
    def rows_per_epoch(self) -> int:
        """The rows of all data sets together."""
        return sum(map(len, self._sets))

    @property
    def epoch(self) -> float:
        """How often the rows were gone through: 1.5 is the middle of the second time."""
        return self._position / self.rows_per_epoch

    @property
    def dropped(self) -> int:
        """The tokens that are in no row."""
        return sum(rows.dropped for rows in self._sets)

    @property
    def density(self) -> float:
        """The part of all places in rows that holds a token, not padding."""
        return sum(rows.density * len(rows) for rows in self._sets) / self.rows_per_epoch

    def check(self, vocab: int | None = None, length: int | None = None) -> None:
        """Refuse a model with fewer tokens than the data, or fewer positions than a row.

        Args:
            vocab: The model's number of tokens. None: not looked at.
            length: The model's number of positions. None: not looked at.

        Example:
            >>> import numpy as np, tempfile
            >>> from hfjax.data import Loader, write_tokens
            >>> folder = tempfile.TemporaryDirectory()
            >>> tokens = write_tokens(folder.name, [np.arange(33)], vocab=64)
            >>> Loader(tokens, rows=2, length=4).check(vocab=64, length=1024)
        """
        for data in (rows.data for rows in self._sets):
            if vocab is not None and data.vocab > vocab:
                raise ValueError(
                    f"{data.directory} has a vocabulary of {data.vocab}, the model one of {vocab}. "
                    f"Give the model {data.vocab}, or make the data with a smaller tokenizer."
                )
        if length is not None and self.length > length:
            raise ValueError(
                f"rows of {self.length} tokens, the model has {length} positions: shorten the "
                "rows, or give the model more."
            )

    # -- the position ---------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the position as JSON: rows consumed of the stream, and which stream it is.

        Save it with a checkpoint: `checkpoints.save(state, data=loader.state())`. `restore` has an
        example.
        """
        return {"rows": self._position, **self.identity}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on at a position. Batch size and processes may be others, the stream not.

        Args:
            state: What `state()` returned, also after a way through JSON.

        Raises:
            ValueError: It is of another stream of rows, or beyond the end of the data.

        Example:
            >>> import numpy as np, tempfile
            >>> from hfjax.data import Loader, write_tokens
            >>> folder = tempfile.TemporaryDirectory()
            >>> tokens = write_tokens(folder.name, [np.arange(33)], vocab=64)
            >>> loader, other = Loader(tokens, rows=2, length=4), Loader(tokens, rows=1, length=4)
            >>> _ = next(loader)
            >>> other.restore(loader.state())
            >>> bool((next(other)["tokens"][0] == next(loader)["tokens"][0]).all())
            True
        """
        rows = state.get("rows") if isinstance(state, Mapping) else None
        if not isinstance(rows, int) or isinstance(rows, bool) or rows < 0:
            raise ValueError(f"restore({state!r}): what `loader.state()` returned is expected.")
        for name, here in self.identity.items():
            if state.get(name) != here:
                told = named(state.get(name))
                raise ValueError(
                    f"this state is of another stream of rows: its {name} is {told}, here it is "
                    f"{here}. Go on with what the run began with, or begin anew."
                )
        if rows >= len(self._stream) + self.rows:
            raise ValueError(
                f"this state is at row {rows}, the data ends at row {len(self._stream)} (epochs="
                f"{self.epochs}). Give more epochs."
            )
        self._go_to(rows)

    def rewind(self) -> "Loader":
        """Go back to the beginning and return the loader: `for batch in loader.rewind(): …`.

        Example:
            >>> import numpy as np, tempfile
            >>> from hfjax.data import Loader, write_tokens
            >>> folder = tempfile.TemporaryDirectory()
            >>> tokens = write_tokens(folder.name, [np.arange(33)], vocab=64)
            >>> loader = Loader(tokens, rows=2, length=4, epochs=1)
            >>> [sum(1 for batch in loader.rewind()) for _ in range(2)]
            [4, 4]
        """
        self._go_to(0)
        return self

    def _go_to(self, position: int) -> None:
        if self._iterator is not None:
            self._iterator.close()
        self._iterator, self._position = None, position

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What the stream of rows is a function of; `order` tells the shuffle of another grain."""
        return {
            "length": self.length,
            "packing": self.packing,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "weights": self._weights,
            "data": [_identity_of(rows) for rows in self._sets],
            "order": fingerprint(self._order(None)),
        }

    # -- what it reads --------------------------------------------------------------------

    @cached_property
    def _sets(self) -> list[Rows]:
        given = [self.data] if isinstance(self.data, TokenSet | str | Path) else self.data
        opened = [data if isinstance(data, TokenSet) else TokenSet(data) for data in given]
        check_same_tokenizer(opened)
        for data in opened:
            data.check()
        if self.packing == "documents":
            return [DocumentRows(data, self.length) for data in opened]
        return [StreamRows(data, self.length, self.documents) for data in opened]

    @property
    def _weights(self) -> list[float]:
        return [1.0] * len(self._sets) if self.weights is None else list(map(float, self.weights))

    def _order(self, epochs: int | None) -> grain.MapDataset[int]:
        counts = list(map(len, self._sets))
        return order(counts, self._weights, self.seed, self.shuffle, epochs)

    @cached_property
    def _stream(self) -> grain.MapDataset[int]:
        return self._order(self.epochs)

    def _batches(self, start: int) -> Batches:
        mine = np.arange(self.rows) if self.mine is None else np.asarray(self.mine)
        return Batches(self._stream, self._sets, self.rows, mine, start, self.pad_last)


def share(rows: int, process: int, processes: int) -> np.ndarray:
    """Return the row numbers of a process, if all processes have equally many.

    `hfjax.rows_of_process` returns them for any mesh, also where processes share rows.

    Args:
        rows: Rows of the global batch; processes have to divide them.
        process: The number of the process, from 0 on.
        processes: How many there are.

    Example:
        >>> from hfjax.data import share
        >>> share(8, 1, 4).tolist()
        [2, 3]
    """
    if rows % processes:
        raise ValueError(
            f"{rows} rows do not divide among {processes} processes: give "
            f"{-(-rows // processes) * processes} rows."
        )
    each = rows // processes
    return np.arange(process * each, (process + 1) * each)


def _identity_of(rows: Rows) -> dict[str, int]:
    crc32 = rows.data.meta.crc32
    return {
        "tokens": rows.data.meta.tokens,
        "rows": len(rows),
        "crc32": crc32[TOKENS],
        "crc32 of documents": crc32[DOCUMENTS],
    }


def _check_sizes(loader: Loader) -> None:
    """Refuse numbers that mean nothing."""
    least = {"rows": 1, "length": 1, "seed": 0, "threads": 0, "prefetch": loader.threads}
    for name, bound in least.items():
        if not is_whole(getattr(loader, name), bound):
            raise ValueError(f"{name}={getattr(loader, name)!r}: a whole number from {bound} on.")
    for name in ("shuffle", "documents", "pad_last"):
        if not isinstance(getattr(loader, name), bool | np.bool_):
            raise ValueError(f"{name}={getattr(loader, name)!r}: True or False.")
    mine = np.arange(1) if loader.mine is None else np.asarray(loader.mine)
    whole = mine.ndim == 1 and mine.size and np.issubdtype(mine.dtype, np.integer)
    if not whole or mine.min() < 0 or mine.max() >= loader.rows:
        raise ValueError(
            f"mine={loader.mine}: the numbers of this process's rows, from 0 to {loader.rows - 1}, "
            "as share(rows, process, processes) gives them."
        )


def _check_ends(loader: Loader) -> None:
    if loader.packing not in PACKINGS:
        raise ValueError(f"packing={loader.packing!r}: one of {', '.join(PACKINGS)}.")
    if loader.epochs is not None and not is_whole(loader.epochs, 1):
        raise ValueError(f"epochs={loader.epochs!r}: a whole number from 1 on, or None: no end.")
    if loader.pad_last and loader.epochs is None:
        raise ValueError("pad_last=True: without epochs there is no last batch. Give epochs=1.")


def _check_weights(loader: Loader) -> None:
    count = len(loader._sets)
    if not count:
        raise ValueError("no data set given: at least one is needed.")
    if len(loader._weights) != count or not all(0 < w < float("inf") for w in loader._weights):
        raise ValueError(
            f"weights={loader.weights} for {count} data sets: give one for each, above 0."
        )
    if count > 1 and loader.epochs is not None:
        raise ValueError(
            f"epochs={loader.epochs} of {count} data sets: a mixture has no end, its sets repeat. "
            "Leave epochs out."
        )
