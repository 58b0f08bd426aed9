"""A data set on disk: `tokens.bin`, `documents.npy` and `meta.json` in a directory.

Of chats it also has `counted.bin`, a byte for each token: 1 if the loss counts it.
"""

import json
import mmap
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from hfjax.data.tokenizer import (
    FILE as TOKENIZER,
    MADE_BY,
    ByteTokenizer,
    TrainedTokenizer,
    load_tokenizer,
)
from hfjax.utils.hub import PREFIX, parse_model
from hfjax.utils.image_names import contains_images
from hfjax.utils.read_files import (
    TEXT,
    check_fields,
    check_ordinary,
    crc32,
    integer,
    object_of,
    parse_json,
    read_text,
)
from hfjax.utils.tables import quote

FORMAT = 1
COUNTED_FORMAT = 2  # of data sets with counted.bin, which no reader may pass over
TOKENS, DOCUMENTS, META = "tokens.bin", "documents.npy", "meta.json"
COUNTED = "counted.bin"
SPLITS = ("train", "valid")
CHUNK = 1 << 24  # bytes or tokens checked together
SMALL = 1 << 26  # bytes: smaller files are read in full each time, in a fraction of a second
SAMPLES, SAMPLE = 256, 1 << 14  # larger ones: number of blocks, bytes of each

_is_crc32 = lambda x: type(x) is int and 0 <= x < 1 << 32
KINDS = {
    "vocab": ("a number of tokens", lambda x: type(x) is int and 1 <= x <= 1 << 32),
    "dtype": TEXT,
    "tokens": integer(1),
    "documents": integer(1),
    "text": integer(0),
    "end": ("a token or null", lambda x: x is None or (type(x) is int and x >= 0)),
    "tokenizer": MADE_BY,
    "sources": ("a list of texts", lambda x: isinstance(x, list) and all(map(TEXT[1], x))),
    "crc32": object_of("sums of 32 bits", _is_crc32),
}


@dataclass(frozen=True)
class Meta:
    """The metadata of a data set. `end`: the token after each document; `text`: bytes of text."""

    vocab: int
    dtype: str
    tokens: int
    documents: int
    text: int
    end: int | None
    tokenizer: str
    sources: list[str] = field(default_factory=list)
    crc32: dict[str, int] = field(default_factory=dict)
    samples: dict[str, int] = field(default_factory=dict)  # CRC32 of samples, for large files
    format: int = FORMAT

    def save(self, directory: Path) -> None:
        """Write the metadata to a directory: the last file of a data set."""
        (directory / META).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, directory: Path) -> "Meta":
        """Return the metadata of a directory; if it has none, the error says what it is instead."""
        path = directory / META
        if not os.path.lexists(path):
            raise ValueError(_not_a_dataset_message(directory))
        try:
            record = check_fields(parse_json(read_text(path)), {"format": integer(0)})
            if record["format"] in (FORMAT, COUNTED_FORMAT):
                return cls._from_json(record)
        except (ValueError, TypeError) as error:
            names = ", ".join(f.name for f in fields(cls))
            why = quote(str(error).rstrip("."))
            raise ValueError(
                f"{quote(path)} is damaged ({why}): a JSON object of {names} is expected. Make "
                "the data set again: hfjax data … --overwrite"
            ) from None
        raise ValueError(
            f"{path}: format {record['format']}, this hfjax reads formats {FORMAT} and "
            f"{COUNTED_FORMAT}. Make the data set again with this hfjax, or read it with the one "
            "that made it."
        )

    @property
    def is_counted(self) -> bool:
        """Whether the loss counts some tokens only, as of chats."""
        return self.format == COUNTED_FORMAT

    @classmethod
    def _from_json(cls, record: dict[str, Any]) -> "Meta":
        """Return the metadata of a JSON object; earlier ones have no samples."""
        check_fields({"samples": {}, **record}, KINDS | {"samples": KINDS["crc32"]})
        meta = cls(**record)
        _check_dtype(meta)
        if meta.end is not None and meta.end >= meta.vocab:
            raise ValueError(f"end is {meta.end}, beyond a vocabulary of {meta.vocab}")
        for name in (TOKENS, DOCUMENTS, *[COUNTED] * meta.is_counted):
            if name not in meta.crc32:
                raise ValueError(f"crc32 has no {name}")
        for name in (*meta.crc32, *meta.samples):
            if Path(name).name != name:
                raise ValueError(f"crc32 is of {name!r}, which is no name of a file")
        return meta


class TokenSet:
    """An opened data set: `tokens` and `documents` (offsets) are memory-mapped, not read.

    Args:
        directory: What `write_tokens`, `prepare` or `hfjax data` wrote; if it is split, its
            `train` or `valid`.

    Raises:
        ValueError: It is no data set, or its files do not match each other.

    Example:
        >>> import numpy as np, tempfile
        >>> from hfjax.data import TokenSet, write_tokens
        >>> folder = tempfile.TemporaryDirectory()
        >>> _ = write_tokens(folder.name, [np.arange(3), np.arange(5)], vocab=64)
        >>> tokens = TokenSet(folder.name)
        >>> len(tokens), tokens.documents.tolist(), tokens.vocab
        (8, [0, 3, 8], 64)
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.meta = Meta.load(self.directory)
        self._check_size()
        dtype = dtype_for(self.vocab)
        with open(self.directory / TOKENS, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.tokens = np.frombuffer(self._map, dtype)
        self.documents = self._open_offsets()
        self._documents_path = str(self.directory / DOCUMENTS)
        self._counted = self._open_counted() if self.meta.is_counted else None

    def __reduce__(self) -> tuple:
        """Reopen the files in a copy, in this process or another one."""
        return TokenSet, (self.directory,)

    @property
    def vocab(self) -> int:
        """The number of different tokens that may occur."""
        return self.meta.vocab

    @cached_property
    def tokenizer(self) -> "ByteTokenizer | TrainedTokenizer":
        """The tokenizer that encoded the data set."""
        return load_tokenizer(self.directory)

    def __len__(self) -> int:
        return self.meta.tokens

    def __repr__(self) -> str:
        meta = self.meta
        return (
            f"TokenSet({str(self.directory)!r}: {meta.tokens} tokens, {meta.documents} documents, "
            f"vocabulary {meta.vocab})"
        )

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens [start, stop) of the file; refuse a truncated one.

        Examples are read this way: access to a truncated memory map kills the process silently.

        Args:
            start: The position of the first token.
            stop: The position after the last one.

        Example:
            >>> import numpy as np, tempfile
            >>> from hfjax.data import write_tokens
            >>> folder = tempfile.TemporaryDirectory()
            >>> write_tokens(folder.name, [np.arange(9)], vocab=64).read(3, 6).tolist()
            [3, 4, 5]
        """
        if self._map.size() < len(self._map):  # its size now, and when it was opened
            self._raise_truncated(TOKENS, len(self._map))
        return self.tokens[start:stop]

    def read_counted(self, start: int, stop: int) -> np.ndarray:
        """Return 1 for each token of [start, stop) that the loss counts; without a record, all.

        Args:
            start: The position of the first token.
            stop: The position after the last one.

        Example:
            >>> import numpy as np, tempfile
            >>> from hfjax.data import write_tokens
            >>> folder = tempfile.TemporaryDirectory()
            >>> write_tokens(folder.name, [np.arange(9)], vocab=64).read_counted(3, 6).tolist()
            [1, 1, 1]
        """
        if self._counted is None:
            return np.ones(max(min(stop, len(self)) - start, 0), np.uint8)
        if self._counted.size() < len(self._counted):
            self._raise_truncated(COUNTED, len(self._counted))
        return np.frombuffer(self._counted, np.uint8)[start:stop]

    def check_documents(self) -> None:
        """Refuse a documents file that was truncated since it was opened, before it is accessed.

        Example:
            >>> import numpy as np, tempfile
            >>> from hfjax.data import write_tokens
            >>> folder = tempfile.TemporaryDirectory()
            >>> write_tokens(folder.name, [np.arange(3)], vocab=64).check_documents()
        """
        if os.stat(self._documents_path).st_size < self.documents.nbytes:
            self._raise_truncated(DOCUMENTS, self.documents.nbytes)

    def _raise_truncated(self, name: str, size: int) -> NoReturn:
        path = self.directory / name
        raise ValueError(
            f"{quote(path)} was cut while it is read: {path.stat().st_size} bytes, it had {size}. "
            "Copy it again, or make the data set again; then start again."
        )

    def verify(self) -> None:
        """Read all files; refuse a CRC32 other than the recorded one, and tokens beyond vocab.

        Example:
            >>> import numpy as np, tempfile
            >>> from hfjax.data import write_tokens
            >>> folder = tempfile.TemporaryDirectory()
            >>> write_tokens(folder.name, [np.arange(3)], vocab=64).verify()
        """
        for name in self.meta.crc32:
            self._check_crc32(name, crc32, self.meta.crc32)
        for start in range(0, len(self), CHUNK):
            self.check_vocab(self.read(start, start + CHUNK), start)
        for start in range(0, self.meta.documents, CHUNK):
            self._check_ends(self.documents[start : start + CHUNK + 1])

    def check(self) -> None:
        """Refuse files that changed since they were written: small ones are read, others sampled.

        Large files of an earlier hfjax have no recorded samples. `Loader` calls this.

        Example:
            >>> import numpy as np, tempfile
            >>> from hfjax.data import write_tokens
            >>> folder = tempfile.TemporaryDirectory()
            >>> write_tokens(folder.name, [np.arange(3)], vocab=64).check()
        """
        files = [self.directory / name for name in self.meta.crc32]
        if all(_file_size(path) <= SMALL for path in files):
            self.verify()
            return
        for path in files:
            if path.name in self.meta.samples:
                self._check_crc32(path.name, sampled_crc32, self.meta.samples)
            elif _file_size(path) <= SMALL:
                self._check_crc32(path.name, crc32, self.meta.crc32)

    def _check_crc32(
        self, name: str, checksum: Callable[[Path], int], expected: dict[str, int]
    ) -> None:
        actual = checksum(self.directory / name)
        if actual != expected[name]:
            raise ValueError(
                f"{quote(self.directory / name)}: CRC32 {actual:08x}, written was "
                f"{expected[name]:08x}: the file changed. Copy it again, or make the data set "
                "again."
            )

    def _check_ends(self, offsets: np.ndarray) -> None:
        """Refuse document offsets that do not increase, and documents without the recorded end."""
        if (np.diff(offsets) <= 0).any() or offsets[-1] > len(self):
            raise ValueError(
                f"{self.directory / DOCUMENTS}: documents do not follow one another. Copy it "
                "again, or make the data set again."
            )
        end, last_tokens = self.meta.end, self.tokens[offsets[1:] - 1]
        if end is not None and (wrong := np.flatnonzero(last_tokens != end)).size:
            raise ValueError(
                f"{self.directory / META}: end is {end}, but the document that ends at token "
                f"{offsets[wrong[0] + 1]} ends with {last_tokens[wrong[0]]}. Make the data set "
                "again."
            )

    def check_vocab(self, tokens: np.ndarray, start: int) -> None:
        """Refuse tokens beyond the vocabulary.

        Args:
            tokens: A slice of the set's tokens.
            start: The position of the first of them, for the message.

        Example:
            >>> import numpy as np, tempfile
            >>> from hfjax.data import write_tokens
            >>> folder = tempfile.TemporaryDirectory()
            >>> data = write_tokens(folder.name, [np.arange(3)], vocab=64)
            >>> data.check_vocab(data.tokens[1:], start=1)
        """
        if len(tokens) and tokens.max() >= self.vocab:
            index = int(tokens.argmax())
            raise ValueError(
                f"{self.directory / TOKENS}: token {start + index} is {tokens[index]}, the "
                f"vocabulary has {self.vocab} (0 … {self.vocab - 1}). The file changed after it "
                "was written: make the data set again."
            )

    def _check_size(self) -> None:
        files = {TOKENS: self.meta.dtype} | ({COUNTED: "uint8"} if self.meta.is_counted else {})
        for name, dtype in files.items():
            path = self.directory / name
            size, expected = _file_size(path), self.meta.tokens * np.dtype(dtype).itemsize
            if size != expected:
                how = "truncated" if size < expected else "longer than it was"
                raise ValueError(
                    f"{path} is {how}: {size} bytes, {META} says {expected} ({self.meta.tokens} "
                    f"tokens of {dtype}). Copy it again, or make the data set again."
                )

    def _open_counted(self) -> mmap.mmap:
        with open(self.directory / COUNTED, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _open_offsets(self) -> np.ndarray:
        path, count = self.directory / DOCUMENTS, self.meta.documents + 1
        check_ordinary(path)
        try:
            offsets = np.lib.format.open_memmap(path, mode="r")
            if offsets.dtype != np.int64:  # differences of unsigned integers would wrap
                raise TypeError(f"its numbers are {offsets.dtype}, int64 is what hfjax writes")
        except Exception as error:  # numpy raises many types
            raise ValueError(
                f"{path} is truncated or no array of numbers ({error}). Copy it again, or make the "
                "data set again."
            ) from None
        if offsets.shape != (count,) or offsets[0] != 0 or offsets[-1] != len(self):
            raise ValueError(
                f"{path} has shape {offsets.shape}, {META} says {count} offsets from 0 to "
                f"{len(self)}: it belongs to another data set. Copy the directory as a whole."
            )
        return offsets


def check_same_tokenizer(sets: Sequence[TokenSet]) -> None:
    """Refuse data sets with different tokenizers."""
    known = [data for data in sets if data.meta.tokenizer != "none"]
    identity = lambda data: (data.meta.tokenizer, data.meta.crc32.get(TOKENIZER), data.vocab)
    for data in known[1:]:
        if identity(data) != identity(known[0]):
            raise ValueError(
                f"{known[0].directory} and {data.directory} were made by different tokenizers: "
                f"{known[0].meta.tokenizer} with a vocabulary of {known[0].vocab}, "
                f"{data.meta.tokenizer} with one of {data.vocab}. Make one with the tokenizer of "
                f"the other: hfjax data … --tokenizer {known[0].directory}"
            )


def check_tokenizer(data: TokenSet, tokenizer: Any, source: str | Path) -> None:
    """Refuse a data set whose token numbers differ in meaning from a model's tokenizer."""
    if data.meta.tokenizer == "none" or tokenizer.is_equivalent(data.tokenizer):
        return
    raise ValueError(
        f"{data.directory} was made by another tokenizer ({data.meta.tokenizer} with a vocabulary "
        f"of {data.vocab}) than that of the model {quote(source)} ({tokenizer.vocab} tokens): its "
        f"numbers mean other tokens. Make it again: hfjax data … --tokenizer {quote(source)}"
    )


def _file_size(path: Path) -> int:
    check_ordinary(path)
    return path.stat().st_size


def sampled_crc32(path: Path) -> int:
    """Return the CRC32 of blocks of a large file, spaced evenly from its first to its last byte."""
    value, last = 0, _file_size(path) - SAMPLE
    with path.open("rb") as file:
        for i in range(SAMPLES):
            file.seek(last * i // (SAMPLES - 1))
            value = zlib.crc32(file.read(SAMPLE), value)
    return value


def dtype_for(vocab: int) -> np.dtype:
    """Return the smallest dtype that holds every token of a vocabulary, little-endian.

    >>> [dtype_for(vocab).name for vocab in (256, 257, 65536, 65537)]
    ['uint8', 'uint16', 'uint16', 'uint32']
    """
    if not 1 <= vocab <= 1 << 32:
        raise ValueError(f"a vocabulary of {vocab}: 1 to {1 << 32} tokens are possible.")
    return np.dtype("<u1" if vocab <= 1 << 8 else "<u2" if vocab <= 1 << 16 else "<u4")


def _check_dtype(meta: Meta) -> None:
    expected = dtype_for(meta.vocab).name
    if meta.dtype != expected:
        raise ValueError(f"dtype {meta.dtype}, a vocabulary of {meta.vocab} has {expected}")


def _not_a_dataset_message(directory: Path) -> str:
    if not directory.exists():
        text = f"{directory}: no such directory. Make a data set there: hfjax data … --data-dir …"
        of_hub = f" A data set of the Hub is named {PREFIX}{directory}."
        return text + of_hub * (parse_model(directory) is not None)
    splits = [name for name in SPLITS if (directory / name / META).is_file()]
    if splits:
        inside = " and ".join(str(directory / name) for name in splits)
        return f"{directory} holds several data sets: open {inside}, one at a time."
    if contains_images(directory):
        return (
            f"{directory} holds images, not tokens: hfjax.data.images.ImageSet opens it, and "
            f"hfjax data {directory} shows what is in it. Here a data set of tokens is expected."
        )
    return (
        f"{directory} is not a data set: it has no {META}. Make one: hfjax data … --data-dir DIR; "
        "if one was being made here, it was not finished."
    )
