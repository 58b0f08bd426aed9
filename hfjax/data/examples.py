"""Row = f(index): which tokens of a data set are row i. As one stream, or whole documents.

Documents are packed best fit decreasing, whole groups of equal pieces at a time ("Fewer Truncations
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


def pack(starts: np.ndarray, sizes: np.ndarray, capacity: int) -> PackedDocuments:
    """Return the pieces packed; rows follow their first pieces, pieces keep their order."""
    row_of = best_fit(sizes, capacity)
    by_row = np.argsort(row_of, kind="stable")
    rows = row_of[by_row]
    heads = np.flatnonzero(np.diff(rows, prepend=-1))  # where each row begins
    rank = np.empty(len(heads), np.int64)
    rank[np.argsort(by_row[heads])] = np.arange(len(heads))
    order = np.argsort(rank[row_of], kind="stable")
    counts = np.bincount(rank[row_of], minlength=len(heads))
    return PackedDocuments(starts[order], sizes[order], np.append(0, np.cumsum(counts)))


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

    def __init__(self) -> None:
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


Row = dict[str, np.ndarray]


@dataclass(frozen=True)
class StreamRows:
    """Windows over all documents as one stream: each token is a target once, but the first one.

    With `documents` a row also says which tokens are of one document, and masks what is not.
    """

    data: TokenSet
    length: int
    documents: bool = False

    def __post_init__(self) -> None:
        check_length(self.length)
        if not len(self):
            raise ValueError(
                f"{self.data.directory} has {len(self.data)} tokens: a row of {self.length} needs "
                f"{self.length + 1}. Shorten the rows, or give more text."
            )

    @property
    def dropped(self) -> int:
        """The tokens after the last whole row."""
        return len(self.data) - 1 - len(self) * self.length

    @property
    def density(self) -> float:
        """The part of all places that holds a token: there is no padding."""
        return 1.0

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def __getitem__(self, index: int) -> Row:
        start = index * self.length
        found = self.data.read(start, start + self.length + 1)
        self.data.check_vocab(found, start)
        row = {"tokens": found.astype(np.int32)}
        if not self.documents:
            return row
        begins = self._begins(start, start + self.length)
        numbers = np.cumsum(begins, dtype=np.int32) + 1
        return row | {"documents": numbers, "mask": mask_of(numbers)}

    def _begins(self, start: int, stop: int) -> np.ndarray:
        """Return 1 for each token of [start, stop] that begins a document, but the first."""
        self.data.check_documents()
        offsets = self.data.documents
        found = offsets[np.searchsorted(offsets, start, "right") :][: stop - start]
        begins = np.zeros(stop - start + 1, np.int32)
        begins[np.asarray(found[found <= stop]) - start] = 1
        return begins


@dataclass(frozen=True)
class DocumentRows:
    """Whole documents packed into rows; those longer than a row are cut, at a shared token.

    So each token of a document is a target once, but its first one.
    """

    data: TokenSet
    length: int

    def __post_init__(self) -> None:
        check_length(self.length)
        if not len(self.plan):
            raise ValueError(
                f"{self.data.directory}: none of its {self.data.meta.documents} documents has two "
                "tokens. Give more text."
            )

    @cached_property
    def plan(self) -> PackedDocuments:
        """The pieces of each row: computed once, the same on every machine."""
        self.data.check_documents()
        return pack(*pieces(self.data.documents, self.length), self.length + 1)

    @property
    def dropped(self) -> int:
        """Documents of one token: they have no target, and no row."""
        return int((np.diff(self.data.documents) < 2).sum())

    @property
    def density(self) -> float:
        """The part of all places that holds a token."""
        return float(self.plan.sizes.sum() / (len(self) * (self.length + 1)))

    def __len__(self) -> int:
        return len(self.plan)

    def __getitem__(self, index: int) -> Row:
        tokens = np.zeros(self.length + 1, np.int32)
        numbers, at = np.zeros_like(tokens), 0
        for number, (start, size) in enumerate(self.plan.row(index), 1):
            found = self.data.read(start, start + size)
            self.data.check_vocab(found, start)
            tokens[at : at + size], numbers[at : at + size] = found, number
            at += size
        return {"tokens": tokens, "documents": numbers, "mask": mask_of(numbers)}


Rows = StreamRows | DocumentRows


class TokenRows:
    """The rows of one or several data sets: those of set i are numbered after those of set i - 1.

    With `masked` each has a mask, and that of a row of nothing is zeros.
    """

    def __init__(self, sets: Sequence[Rows], masked: bool) -> None:
        self._sets, self._masked = sets, masked
        self._first = np.cumsum([0, *map(len, sets)])  # row numbers at which each set begins

    def row(self, number: int, place: int) -> Row:
        """Return a row, which is the same wherever it stands in the stream."""
        of = int(np.searchsorted(self._first, number, "right")) - 1
        row = self._sets[of][number - int(self._first[of])]
        if not self._masked or "mask" in row:
            return row
        return {**row, "mask": np.ones(len(row["tokens"]) - 1, np.float32)}

    def nothing(self) -> Row:
        """Return a row of zeros."""
        return {name: np.zeros_like(x) for name, x in self.row(0, 0).items()}

    def together(self, rows: list[Row]) -> Row:
        """Return rows as a batch."""
        return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def mask_of(documents: np.ndarray) -> np.ndarray:
    """Return 1 for each target that is of the same document as the token before it.

    >>> mask_of(np.array([1, 1, 2, 2, 0])).tolist()
    [1.0, 0.0, 1.0, 0.0]
    """
    before, after = documents[:-1], documents[1:]
    return ((before == after) & (after > 0)).astype(np.float32)


def check_length(length: int) -> None:
    """Refuse rows of no target."""
    if length < 1:
        raise ValueError(f"rows of {length} tokens: at least 1 is needed.")
