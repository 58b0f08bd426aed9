"""A loader of numbered examples: position, exact resume, batches read ahead."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Self

import grain
import numpy as np

from hfjax.data.examples import ArrayDict
from hfjax.data.sampler import Batches, ExampleSource, fingerprint
from hfjax.utils.keywords import is_int
from hfjax.utils.tables import quote


class IndexedLoader(ABC):
    """An iterator over batches. The order of examples is a function of `identity` only.

    Subclasses provide the examples: `_source` reads one, `_order` numbers them.
    """

    batch_size: int
    epochs: int | None
    local_examples: Sequence[int] | np.ndarray | None
    pad_last: bool
    _position: int = 0
    _iterator: Any = None

    # -- data -----------------------------------------------------------------------------

    @property
    @abstractmethod
    def examples_per_epoch(self) -> int:
        """The number of examples in one pass over the data."""

    @abstractmethod
    def _identity_fields(self) -> dict[str, Any]:
        """Return everything that determines the examples, as JSON."""

    @abstractmethod
    def _order(self, epochs: int | None) -> grain.MapDataset[int]:
        """Return the stream of example numbers."""

    @abstractmethod
    def _make_source(self) -> ExampleSource:
        """Return the source that reads examples."""

    @abstractmethod
    def _read_options(self) -> grain.ReadOptions:
        """Return the number of reading threads and of prefetched batches."""

    # -- batches --------------------------------------------------------------------------

    def __iter__(self) -> Iterator[ArrayDict]:
        return self

    def __next__(self) -> ArrayDict:
        """Return the next batch; StopIteration after the last one."""
        if self._iterator is None:
            options = self._read_options()
            self._iterator = iter(self._make_batches(self._position).to_iter_dataset(options))
        try:
            batch = next(self._iterator)
        except BaseException:  # also Ctrl-C: the next call tries the same batch
            self._seek(self._position)
            raise
        self._position += self.batch_size
        return batch

    def at(self, number: int) -> ArrayDict:
        """Return batch `number`, counted from the beginning; the position does not change.

        Args:
            number: The number of the batch, from 0 on.

        Example:
            >>> import numpy as np, tempfile
            >>> from hfjax.data import Loader, write_tokens
            >>> folder = tempfile.TemporaryDirectory()
            >>> tokens = write_tokens(folder.name, [np.arange(33)], vocab=64)
            >>> Loader(tokens, batch_size=2, seq_len=4, shuffle=False).at(1)["tokens"].tolist()
            [[8, 9, 10, 11, 12], [12, 13, 14, 15, 16]]
        """
        count = len(self._make_batches(0))
        if number not in range(count) or isinstance(number, bool | float):
            raise ValueError(f"batch {number}: there are {count}, from 0 on.")
        return self._make_batches(0)[number]

    def __len__(self) -> int:
        """Return the number of batches of all epochs, counted from the beginning."""
        if self.epochs is None:
            raise TypeError("a loader without epochs has no end, so no length. Give epochs=1.")
        return len(self._make_batches(0))

    @property
    def epoch(self) -> float:
        """The number of passes done: 1.5 is the middle of the second one."""
        return self._position / self.examples_per_epoch

    # -- position -------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the position as JSON: the number of examples consumed, and which stream it is.

        Save it with a checkpoint: `checkpoints.save(state, data=loader.state())`. `restore` has an
        example.
        """
        return {"rows": self._position, **self.identity}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume at a position. Batch size and processes may change, the stream may not.

        Args:
            state: What `state()` returned, possibly after a round trip through JSON.

        Raises:
            ValueError: It belongs to another stream, or lies beyond the end of the data.

        Example:
            >>> import numpy as np, tempfile
            >>> from hfjax.data import Loader, write_tokens
            >>> folder = tempfile.TemporaryDirectory()
            >>> tokens = write_tokens(folder.name, [np.arange(33)], vocab=64)
            >>> loader, other = (Loader(tokens, batch_size=n, seq_len=4) for n in (2, 1))
            >>> _ = next(loader)
            >>> other.restore(loader.state())
            >>> bool((next(other)["tokens"][0] == next(loader)["tokens"][0]).all())
            True
        """
        position = state.get("rows") if isinstance(state, Mapping) else None
        if not is_int(position, 0):
            raise ValueError(f"restore({state!r}): what `loader.state()` returned is expected.")
        for name, expected in self.identity.items():
            if state.get(name) != expected:
                saved_value = quote(state.get(name))
                raise ValueError(
                    f"this state is of another stream of examples: its {name} is {saved_value}, "
                    f"here it is {expected}. Go on with what the run began with, or begin anew."
                )
        if position >= len(self._stream) + self.batch_size:
            raise ValueError(
                f"this state is at example {position}, the data ends at {len(self._stream)} "
                f"(epochs={self.epochs}). Give more epochs."
            )
        self._seek(position)

    def rewind(self) -> Self:
        """Go back to the beginning and return the loader: `for batch in loader.rewind(): …`.

        Example:
            >>> import numpy as np, tempfile
            >>> from hfjax.data import Loader, write_tokens
            >>> folder = tempfile.TemporaryDirectory()
            >>> tokens = write_tokens(folder.name, [np.arange(33)], vocab=64)
            >>> loader = Loader(tokens, batch_size=2, seq_len=4, epochs=1)
            >>> [sum(1 for batch in loader.rewind()) for _ in range(2)]
            [4, 4]
        """
        self._seek(0)
        return self

    def _seek(self, position: int) -> None:
        if self._iterator is not None:
            self._iterator.close()
        self._iterator, self._position = None, position

    @cached_property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the stream; `order` detects a grain with another shuffle."""
        return {**self._identity_fields(), "order": fingerprint(self._order(None))}

    @cached_property
    def _source(self) -> ExampleSource:
        return self._make_source()

    @cached_property
    def _stream(self) -> grain.MapDataset[int]:
        return self._order(self.epochs)

    def _make_batches(self, start: int) -> Batches:
        local_indices = (
            np.arange(self.batch_size)
            if self.local_examples is None
            else np.asarray(self.local_examples)
        )
        return Batches(
            self._stream, self._source, self.batch_size, local_indices, start, self.pad_last
        )


def check_numbers(loader: IndexedLoader, minimums: Mapping[str, int], flags: Sequence[str]) -> None:
    """Refuse invalid values: numbers below their minimum, flags, and `mine`."""
    for name, bound in minimums.items():
        if not is_int(getattr(loader, name), bound):
            raise ValueError(f"{name}={getattr(loader, name)!r}: a whole number from {bound} on.")
    for name in flags:
        if not isinstance(getattr(loader, name), bool | np.bool_):
            raise ValueError(f"{name}={getattr(loader, name)!r}: True or False.")
    local_indices = (
        np.arange(1) if loader.local_examples is None else np.asarray(loader.local_examples)
    )
    is_index_list = (
        local_indices.ndim == 1
        and local_indices.size
        and np.issubdtype(local_indices.dtype, np.integer)
    )
    if (
        not is_index_list
        or local_indices.min() < 0
        or local_indices.max() >= loader.batch_size
        or len(set(local_indices)) < len(local_indices)
    ):
        raise ValueError(
            f"local_examples={loader.local_examples}: the numbers of this process's examples, from "
            f"0 to {loader.batch_size - 1}, each once, as share(batch_size, process, processes) "
            "gives them."
        )


def check_epochs(loader: IndexedLoader) -> None:
    """Refuse invalid `epochs`, and `pad_last` without an end."""
    if loader.epochs is not None and not is_int(loader.epochs, 1):
        raise ValueError(f"epochs={loader.epochs!r}: a whole number from 1 on, or None: no end.")
    if loader.pad_last and loader.epochs is None:
        raise ValueError("pad_last=True: without epochs there is no last batch. Give epochs=1.")


def check_batch_size(loader: IndexedLoader, content: str, advice: str) -> None:
    """Refuse a batch that is larger than the data, unless it is padded.

    Args:
        loader: The loader.
        content: What its data has, for the message.
        advice: What to do.
    """
    if loader.batch_size > loader.examples_per_epoch and not loader.pad_last:
        raise ValueError(f"a batch of {loader.batch_size} examples: {content}. {advice}")
