"""Example = f(index): which tokens of a data set form example i. From one stream or by document.

Documents are packed best fit decreasing, whole groups of equal chunks at a time ("Fewer Truncations
Improve Language Modeling", arXiv:2404.10830).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hfjax.data.token_dataset import TokenSet


@dataclass(frozen=True)
class PackedDocuments:
    """Chunks [start, start + size) of the tokens, by example: i has those from offsets[i] on."""

    starts: np.ndarray
    sizes: np.ndarray
    offsets: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def example_chunks(self, index: int) -> Iterator[tuple[int, int]]:
        """Yield start and size of each chunk of an example."""
        chunks = slice(self.offsets[index], self.offsets[index + 1])
        return zip(self.starts[chunks].tolist(), self.sizes[chunks].tolist(), strict=True)


def chunk_documents(offsets: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and size of the documents' chunks, of at most length + 1 tokens each.

    Adjacent chunks share a token: the last target of one is the first input of the next.

    >>> starts, sizes = chunk_documents(np.array([0, 6, 7, 9]), length=2)
    >>> starts.tolist(), sizes.tolist()
    ([0, 2, 4, 7], [3, 3, 2, 2])
    """
    offsets = np.asarray(offsets)
    targets = np.diff(offsets) - 1
    counts = -(-targets // length)  # documents of one token have none
    chunk_index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(offsets[:-1], counts) + chunk_index * length
    remaining = np.repeat(targets, counts) - chunk_index * length
    return starts, np.minimum(remaining, length) + 1


def pack(starts: np.ndarray, sizes: np.ndarray, capacity: int) -> PackedDocuments:
    """Return the packed chunks; examples are ordered by first chunk, chunks keep their order."""
    bin_ids = best_fit(sizes, capacity)
    by_bin = np.argsort(bin_ids, kind="stable")
    sorted_bins = bin_ids[by_bin]
    heads = np.flatnonzero(np.diff(sorted_bins, prepend=-1))  # where each example begins
    rank = np.empty(len(heads), np.int64)
    rank[np.argsort(by_bin[heads])] = np.arange(len(heads))
    order = np.argsort(rank[bin_ids], kind="stable")
    counts = np.bincount(rank[bin_ids], minlength=len(heads))
    return PackedDocuments(starts[order], sizes[order], np.append(0, np.cumsum(counts)))


def best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the example of each chunk: the largest first, each where the least room is left.

    >>> best_fit(np.array([2, 5, 3, 4, 1]), 5).tolist()
    [2, 0, 2, 1, 1]
    """
    bin_ids, num_bins = np.empty(len(sizes), np.int64), 0
    open_bins = _OpenBins()
    order = np.argsort(-sizes, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(sizes[order])) + 1, len(order))
    for group in np.split(order, ends[:-1]):
        size = int(sizes[group[0]]) if len(group) else 1
        while len(group):
            room = open_bins.least(size) or capacity
            chunks_per_bin = room // size  # chunks of this size that fit in one such example
            num_needed = -(-len(group) // chunks_per_bin)
            bins = open_bins.take(room, num_needed)
            if bins is None:
                bins = np.arange(num_bins, num_bins + num_needed)
                num_bins += num_needed
            num_fitting = len(bins) * chunks_per_bin
            chunks, group = group[:num_fitting], group[num_fitting:]
            bin_ids[chunks] = bins[np.arange(len(chunks)) // chunks_per_bin]
            full, rest = divmod(len(chunks), chunks_per_bin)
            open_bins.put(room - chunks_per_bin * size, bins[:full])
            open_bins.put(room - rest * size, bins[full:])
    return bin_ids


class _OpenBins:
    """Examples with room left, by how much; none of them is empty."""

    def __init__(self) -> None:
        self._rooms: list[int] = []
        self._bins: dict[int, list[np.ndarray]] = {}

    def least(self, size: int) -> int | None:
        """Return the least room that fits `size`, or None."""
        i = bisect_left(self._rooms, size)
        return self._rooms[i] if i < len(self._rooms) else None

    def take(self, room: int, limit: int) -> np.ndarray | None:
        """Remove and return up to `limit` examples with exactly this room, or None."""
        if room not in self._bins:
            return None
        arrays = self._bins[room]
        last = arrays.pop()
        if len(last) > limit:
            arrays.append(last[limit:])
        if not arrays:
            del self._bins[room]
            self._rooms.remove(room)
        return last[:limit]

    def put(self, room: int, bins: np.ndarray) -> None:
        """Add examples that have this room left."""
        if not room or not len(bins):
            return
        if room not in self._bins:
            insort(self._rooms, room)
        self._bins.setdefault(room, []).append(bins)


@dataclass(frozen=True)
class FittedDocuments:
    """The chunks of documents that examples hold, and what is left out.

    A document longer than an example is split (chunks that share a token), cut (its first part
    stays) or dropped.

    Attributes:
        starts: The position of each chunk's first token.
        sizes: Their numbers of tokens.
        num_long: The number of documents that are longer than an example.
        num_uncounted: The documents left out since nothing that the loss counts remains of them.
        num_dropped: The number of tokens in no chunk.
    """

    starts: np.ndarray
    sizes: np.ndarray
    num_long: int
    num_uncounted: int
    num_dropped: int


def fit_documents(data: TokenSet, length: int, long: str) -> FittedDocuments:
    """Return the chunks of a data set's documents, of at most length + 1 tokens each."""
    offsets = np.asarray(data.documents)
    sizes = np.diff(offsets)
    num_long = int((sizes > length + 1).sum())
    if long == "split":
        starts, sizes = chunk_documents(offsets, length)
        num_dropped = int((np.diff(offsets) < 2).sum())
        return FittedDocuments(starts, sizes, num_long, 0, num_dropped)
    fits = sizes <= length + 1
    keep = sizes > 1 if long == "cut" else (sizes > 1) & fits
    starts, sizes = offsets[:-1][keep], np.minimum(sizes[keep], length + 1)
    is_counted = count_targets(data, starts, sizes) > 0
    starts, sizes = starts[is_counted], sizes[is_counted]
    num_uncounted = int((~is_counted).sum())
    return FittedDocuments(starts, sizes, num_long, num_uncounted, len(data) - int(sizes.sum()))


def count_targets(data: TokenSet, starts: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return the number of targets in each chunk that the loss counts; its first token is none."""
    if not data.meta.is_counted or not len(starts):
        return sizes - 1
    bounds = np.stack([starts + 1, starts + sizes], axis=1).ravel()
    counted = data.read_counted(0, len(data))
    bounds_in_range = bounds[:-1] if bounds[-1] == len(counted) else bounds
    return np.add.reduceat(counted, bounds_in_range, dtype=np.int64)[::2]


ArrayDict = dict[str, np.ndarray]


@dataclass(frozen=True)
class StreamExamples:
    """Windows over all documents as one stream: each token but the first is a target once.

    With `documents` an example also has document numbers, and a mask for targets across documents.
    """

    data: TokenSet
    length: int
    documents: bool = False

    def __post_init__(self) -> None:
        check_length(self.length)
        if not len(self):
            raise ValueError(
                f"{self.data.directory} has {len(self.data)} tokens: a sequence of "
                f"{self.length} needs {self.length + 1}. Shorten the sequences, or give more text."
            )

    @property
    def dropped(self) -> int:
        """The number of tokens after the last complete example."""
        return len(self.data) - 1 - len(self) * self.length

    @property
    def density(self) -> float:
        """The fraction of positions that hold a token: 1, there is no padding."""
        return 1.0

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index: int) -> ArrayDict:
        start = index * self.length
        tokens = self.data.read(start, start + self.length + 1)
        self.data.check_vocab(tokens, start)
        example = {"tokens": tokens.astype(np.int32)}
        if not self.documents:
            return example
        is_start = self._document_starts(start, start + self.length)
        document_ids = np.cumsum(is_start, dtype=np.int32) + 1
        return example | {"documents": document_ids, "mask": document_mask(document_ids)}

    def _document_starts(self, start: int, stop: int) -> np.ndarray:
        """Return 1 for each token of [start, stop] but the first that begins a document."""
        self.data.check_documents()
        offsets = self.data.documents
        starts = offsets[np.searchsorted(offsets, start, "right") :][: stop - start]
        is_start = np.zeros(stop - start + 1, np.int32)
        is_start[np.asarray(starts[starts <= stop]) - start] = 1
        return is_start


@dataclass(frozen=True)
class DocumentExamples:
    """Whole documents packed into examples; longer ones are cut, at a shared token.

    So each token of a document but the first is a target once; the mask is 0 for those that the
    loss does not count.

    Attributes:
        data: The data set.
        length: The number of targets of an example.
        long: What becomes of a longer document: see `FittedDocuments`.
        loss_per: token, or example: the mask then weighs the counted tokens of a document 1 in all.
    """

    data: TokenSet
    length: int
    long: str = "split"
    loss_per: str = "token"

    def __post_init__(self) -> None:
        check_length(self.length)
        if not len(self.plan):
            raise ValueError(self._empty_message())

    def _empty_message(self) -> str:
        count = self.data.meta.documents
        if self.data.meta.is_counted:
            return (
                f"{self.data.directory}: in none of its {count} conversations the loss counts a "
                f"token within {self.length + 1} tokens. Lengthen the sequences: --model.seq-len."
            )
        return (
            f"{self.data.directory}: none of its {count} documents has two tokens. Give more text."
        )

    @cached_property
    def fitted(self) -> FittedDocuments:
        """The chunks of documents that examples hold."""
        self.data.check_documents()
        return fit_documents(self.data, self.length, self.long)

    @cached_property
    def _weights(self) -> np.ndarray:
        """What a counted token of each chunk weighs; sorted by the chunk's start."""
        starts, sizes = self.fitted.starts, self.fitted.sizes
        if self.loss_per == "token":
            return np.ones(len(starts), np.float32)
        totals = count_targets(self.data, starts, sizes)
        document = np.searchsorted(np.asarray(self.data.documents), starts, "right")
        _, of_document = np.unique(document, return_inverse=True)
        return (1 / np.maximum(np.bincount(of_document, totals), 1))[of_document].astype("float32")

    @cached_property
    def plan(self) -> PackedDocuments:
        """The chunks of each example: computed once, the same on every machine."""
        return pack(self.fitted.starts, self.fitted.sizes, self.length + 1)

    @property
    def dropped(self) -> int:
        """The number of tokens that are in no example."""
        return self.fitted.num_dropped

    @property
    def density(self) -> float:
        """The fraction of positions that hold a token."""
        return float(self.plan.sizes.sum() / (len(self) * (self.length + 1)))

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> ArrayDict:
        tokens = np.zeros(self.length + 1, np.int32)
        document_ids, offset = np.zeros_like(tokens), 0
        weights = np.zeros(self.length + 1, np.float32)
        for document_id, (start, size) in enumerate(self.plan.example_chunks(index), 1):
            chunk = self.data.read(start, start + size)
            self.data.check_vocab(chunk, start)
            tokens[offset : offset + size], document_ids[offset : offset + size] = (
                chunk,
                document_id,
            )
            chunk_index = np.searchsorted(self.fitted.starts, start)
            counted = self.data.read_counted(start, start + size)
            weights[offset : offset + size] = counted * self._weights[chunk_index]
            offset += size
        mask = document_mask(document_ids) * weights[1:]
        return {"tokens": tokens, "documents": document_ids, "mask": mask}


Examples = StreamExamples | DocumentExamples


class TokenExamples:
    """The examples of one or several data sets: those of set i are numbered after set i - 1's.

    With `masked` each has a mask, which is zeros for a padding example.
    """

    def __init__(self, sets: Sequence[Examples], with_mask: bool) -> None:
        self._sets, self._with_mask = sets, with_mask
        self._first_index = np.cumsum([0, *map(len, sets)])  # the first example number of each set

    def example(self, index: int, position: int) -> ArrayDict:
        """Return an example, which does not depend on its position in the stream."""
        set_index = int(np.searchsorted(self._first_index, index, "right")) - 1
        arrays = self._sets[set_index][index - int(self._first_index[set_index])]
        if not self._with_mask or "mask" in arrays:
            return arrays
        return {**arrays, "mask": np.ones(len(arrays["tokens"]) - 1, np.float32)}

    def padding_example(self) -> ArrayDict:
        """Return an example of zeros."""
        return {name: np.zeros_like(x) for name, x in self.example(0, 0).items()}

    def collate(self, examples: list[ArrayDict]) -> ArrayDict:
        """Return examples as a batch."""
        return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def document_mask(document_ids: np.ndarray) -> np.ndarray:
    """Return 1 for each target in the same document as the token before it.

    >>> document_mask(np.array([1, 1, 2, 2, 0])).tolist()
    [1.0, 0.0, 1.0, 0.0]
    """
    before, after = document_ids[:-1], document_ids[1:]
    return ((before == after) & (after > 0)).astype(np.float32)


def check_length(length: int) -> None:
    """Refuse a length below one target."""
    if length < 1:
        raise ValueError(f"sequences of {length} tokens: at least 1 is needed.")
