"""Batches of a run: the same global batches on any number of processes, and exact resume."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import grain
import numpy as np

from hfjax.data.examples import DocumentExamples, Examples, StreamExamples, TokenExamples
from hfjax.data.indexed_loader import IndexedLoader, check_batch_size, check_epochs, check_numbers
from hfjax.data.sampler import example_order
from hfjax.data.token_dataset import COUNTED, DOCUMENTS, TOKENS, TokenSet, check_same_tokenizer
from hfjax.utils.keywords import strict_fields

PACKINGS = ("stream", "documents")
LONG_CHATS, LOSS_PER = ("cut", "drop"), ("token", "example")
Sets = TokenSet | str | Path | Sequence[TokenSet | str | Path]


@strict_fields
@dataclass(eq=False)
class Loader(IndexedLoader):
    """An iterator over batches {"tokens": int32 [batch size, length + 1], …} of data sets.

    The order is a function of data, length, packing, weights, shuffle and seed: not of processes,
    threads or batch size. Packed documents, and `documents=True`, add "documents" and "mask".

    Attributes:
        data: A data set or its directory, or several of them.
        batch_size: The global batch size, in examples.
        seq_len: The number of targets of an example; it has one token more.
        seed: The seed of the shuffle.
        packing: stream (examples cut from consecutive text), or documents (whole ones, packed).
        shuffle: Whether each epoch is shuffled anew.
        epochs: The number of passes over the data. None: no end, required for several data sets.
        local_examples: The examples of each batch that this process loads (`share`). None: all.
        weights: Relative sampling rates of several data sets. None: equal.
        documents: Whether examples of a stream have document numbers and a mask.
        long_chats: What becomes of a conversation longer than an example: cut (its beginning stays)
            or drop. Other packed documents are split, in chunks that share a token.
        loss_per: token, or example: the mask gives each packed document the same weight.
        pad_last: Whether to pad the last batch with examples of mask 0 instead of dropping it.
        threads: The number of reading threads; 0: the caller only.
        prefetch: The number of batches to prefetch, at least `threads`.

    Example:
        >>> import numpy as np, tempfile
        >>> from hfjax.data import Loader, write_tokens
        >>> folder = tempfile.TemporaryDirectory()
        >>> tokens = write_tokens(folder.name, [np.arange(33)], vocab=64)
        >>> loader = Loader(tokens, batch_size=2, seq_len=4, shuffle=False, epochs=1)
        >>> next(loader)["tokens"].tolist(), len(loader)
        ([[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]], 4)
    """

    data: Sets
    batch_size: int
    seq_len: int
    seed: int = 0
    packing: str = "stream"  # or documents: whole ones, packed
    shuffle: bool = True
    epochs: int | None = None  # None: no end
    local_examples: Sequence[int] | np.ndarray | None = None
    weights: Sequence[float] | None = None  # of several data sets
    documents: bool = False  # a stream with document numbers and mask
    long_chats: str = "cut"  # longer than an example
    loss_per: str = "token"
    pad_last: bool = False  # pad the last batch with examples of mask 0, do not drop it
    threads: int = 2
    prefetch: int = 4  # batches read ahead

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "seq_len": 1, "seed": 0, "threads": 0, "prefetch": self.threads}
        check_numbers(self, least, ("shuffle", "documents", "pad_last"))
        if self.packing not in PACKINGS:
            raise ValueError(f"packing={self.packing!r}: one of {', '.join(PACKINGS)}.")
        if self.long_chats not in LONG_CHATS:
            raise ValueError(f"long_chats={self.long_chats!r}: one of {', '.join(LONG_CHATS)}.")
        if self.loss_per not in LOSS_PER:
            raise ValueError(f"loss_per={self.loss_per!r}: one of {', '.join(LOSS_PER)}.")
        check_epochs(self)
        _check_weights(self)
        content = f"the data has {self.examples_per_epoch} examples of {self.seq_len} tokens"
        check_batch_size(self, content, "Lower batch_size or seq_len, or give more data.")

    @property
    def examples_per_epoch(self) -> int:
        """The number of examples of all data sets together."""
        return sum(map(len, self._sets))

    @property
    def dropped(self) -> int:
        """The number of tokens that are in no example."""
        return sum(examples.dropped for examples in self._sets)

    @property
    def density(self) -> float:
        """The fraction of positions in all examples that hold a token, not padding."""
        return (
            sum(examples.density * len(examples) for examples in self._sets)
            / self.examples_per_epoch
        )

    def check(self, vocab: int | None = None, seq_len: int | None = None) -> None:
        """Refuse a model with fewer tokens than the data, or fewer positions than an example.

        Args:
            vocab: The model's number of tokens. None: not checked.
            seq_len: The model's number of positions. None: not checked.

        Example:
            >>> import numpy as np, tempfile
            >>> from hfjax.data import Loader, write_tokens
            >>> folder = tempfile.TemporaryDirectory()
            >>> tokens = write_tokens(folder.name, [np.arange(33)], vocab=64)
            >>> Loader(tokens, batch_size=2, seq_len=4).check(vocab=64, seq_len=1024)
        """
        for data in (examples.data for examples in self._sets):
            if vocab is not None and data.vocab > vocab:
                raise ValueError(
                    f"{data.directory} has a vocabulary of {data.vocab}, the model one of {vocab}. "
                    f"Give the model {data.vocab}, or make the data with a smaller tokenizer."
                )
        if seq_len is not None and self.seq_len > seq_len:
            raise ValueError(
                f"sequences of {self.seq_len} tokens, the model has {seq_len} positions: shorten "
                "them, or give the model more."
            )

    # -- data -----------------------------------------------------------------------------

    @cached_property
    def _sets(self) -> list[Examples]:
        sources = [self.data] if isinstance(self.data, TokenSet | str | Path) else self.data
        token_sets = [data if isinstance(data, TokenSet) else TokenSet(data) for data in sources]
        check_same_tokenizer(token_sets)
        for data in token_sets:
            data.check()
        if self.packing == "documents":
            long = lambda data: self.long_chats if data.meta.is_counted else "split"
            return [
                DocumentExamples(data, self.seq_len, long(data), self.loss_per)
                for data in token_sets
            ]
        self._check_stream(token_sets)
        return [StreamExamples(data, self.seq_len, self.documents) for data in token_sets]

    def _check_stream(self, token_sets: Sequence[TokenSet]) -> None:
        """Refuse options of whole documents, and conversations, in a stream."""
        counted = next((data for data in token_sets if data.meta.is_counted), None)
        if counted is not None:
            raise ValueError(
                f"{counted.directory} holds conversations, which are read whole: give "
                "packing='documents' (--data.packing documents)."
            )
        if self.loss_per != "token":
            raise ValueError(
                f"loss_per={self.loss_per!r}: it is of whole documents. Give packing='documents' "
                "(--data.packing documents), or leave it out."
            )

    @property
    def _weights(self) -> list[float]:
        return [1.0] * len(self._sets) if self.weights is None else list(map(float, self.weights))

    def _order(self, epochs: int | None) -> grain.MapDataset[int]:
        counts = list(map(len, self._sets))
        return example_order(counts, self._weights, self.seed, self.shuffle, epochs)

    def _identity_fields(self) -> dict[str, Any]:
        return {
            "length": self.seq_len,
            "packing": self.packing,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "weights": self._weights,
            "data": [_dataset_identity(examples) for examples in self._sets],
            **({} if self.long_chats == "cut" else {"long chats": self.long_chats}),
            **({} if self.loss_per == "token" else {"loss per": self.loss_per}),
        }

    def _make_source(self) -> TokenExamples:
        return TokenExamples(self._sets, self.pad_last)

    def _read_options(self) -> grain.ReadOptions:
        return grain.ReadOptions(self.threads, self.prefetch)


def share(examples: int, process: int, processes: int) -> np.ndarray:
    """Return the indices of a process's examples in the global batch, equally many for each.

    `hfjax.process_batch_slice` returns them for any mesh, also where processes share examples.

    Args:
        examples: The global batch size; it must be divisible by `processes`.
        process: The number of the process, from 0 on.
        processes: The number of processes.

    Example:
        >>> from hfjax.data import share
        >>> share(8, 1, 4).tolist()
        [2, 3]
    """
    if examples % processes:
        raise ValueError(
            f"{examples} examples do not divide among {processes} processes: give "
            f"{-(-examples // processes) * processes} examples."
        )
    local_examples = examples // processes
    return np.arange(process * local_examples, (process + 1) * local_examples)


def _dataset_identity(examples: Examples) -> dict[str, int]:
    crc32 = examples.data.meta.crc32
    return {
        "tokens": examples.data.meta.tokens,
        "rows": len(examples),
        "crc32": crc32[TOKENS],
        "crc32 of documents": crc32[DOCUMENTS],
        **({"crc32 of counted": crc32[COUNTED]} if COUNTED in crc32 else {}),
    }


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
