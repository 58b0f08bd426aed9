"""Row = f(index): which tokens of a data set are row i. As one stream, or whole documents."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from hfjax.data.packing import Packed, pack, pieces
from hfjax.data.tokens import TokenSet

Row = dict[str, np.ndarray]


@dataclass(frozen=True)
class StreamRows:
    """Windows over all documents as one stream: each token is a target once, but the first one.

    With `documents` a row also says which tokens are of one document, and masks what is not.
    """

    data: TokenSet
    length: int
    documents: bool = False

    def __post_init__(self):
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
        found = self.data.tokens[start : start + self.length + 1]
        self.data.check_vocab(found, start)
        row = {"tokens": found.astype(np.int32)}
        if not self.documents:
            return row
        begins = self._begins(start, start + self.length)
        numbers = np.cumsum(begins, dtype=np.int32) + 1
        return row | {"documents": numbers, "mask": mask_of(numbers)}

    def _begins(self, start: int, stop: int) -> np.ndarray:
        """Return 1 for each token of [start, stop] that begins a document, but the first."""
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

    def __post_init__(self):
        check_length(self.length)
        if not len(self.plan):
            raise ValueError(
                f"{self.data.directory}: none of its {self.data.meta.documents} documents has two "
                "tokens. Give more text."
            )

    @cached_property
    def plan(self) -> Packed:
        """The pieces of each row: computed once, the same on every machine."""
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
            found = self.data.tokens[start : start + size]
            self.data.check_vocab(found, start)
            tokens[at : at + size], numbers[at : at + size] = found, number
            at += size
        return {"tokens": tokens, "documents": numbers, "mask": mask_of(numbers)}


Rows = StreamRows | DocumentRows


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
