"""Write a data set, which appears once it is complete."""

import os
from array import array
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from hfjax.data.token_dataset import (
    COUNTED,
    COUNTED_FORMAT,
    DOCUMENTS,
    FORMAT,
    META,
    SMALL,
    SPLITS,
    TOKENS,
    Meta,
    TokenSet,
    crc32,
    dtype_for,
    sampled_crc32,
)
from hfjax.data.tokenizer import ByteTokenizer, TrainedTokenizer
from hfjax.utils.atomic import atomic_directory, exit_on_sigterm, sweep
from hfjax.utils.read_files import UNREACHED, path_kind
from hfjax.utils.tables import quote


class TokenWriter:
    """Appends documents to a new directory; `finish` writes the metadata.

    With `is_counted` each document says which of its tokens the loss counts.
    """

    def __init__(self, directory: Path, vocab: int, is_counted: bool = False) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.vocab, self.dtype = directory, vocab, dtype_for(vocab)
        self._file = (directory / TOKENS).open("wb")
        self._counted = (directory / COUNTED).open("wb") if is_counted else None
        self._offsets = array("q", [0])
        self.text_bytes = 0

    @property
    def documents(self) -> int:
        """The number of documents written so far."""
        return len(self._offsets) - 1

    def add(
        self, tokens: np.ndarray, location: str = "", text_bytes: int = 0, end: int | None = None
    ) -> None:
        """Append a document, and its end token; `text_bytes` is the size of its text."""
        location = location or f"document {self.documents}"
        end_tokens = [] if end is None else [end]
        count = tokens.size + len(end_tokens)
        if tokens.ndim != 1 or not count or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"{location} has shape {tokens.shape} and dtype {tokens.dtype}: a document is a "
                "flat array of integers, at least one."
            )
        if tokens.size and (tokens.min() < 0 or tokens.max() >= self.vocab):
            bad_index = int(np.argmax((tokens < 0) | (tokens >= self.vocab)))
            raise ValueError(
                f"{location}: token {bad_index} is {tokens[bad_index]}, the vocabulary has "
                f"{self.vocab} (0 … {self.vocab - 1}). Give the vocabulary of the tokenizer that "
                "made it."
            )
        for values in (tokens, end_tokens):
            self._file.write(np.ascontiguousarray(values, self.dtype).data)  # no copy for bytes
        self._offsets.append(self._offsets[-1] + count)
        self.text_bytes += text_bytes

    def add_counted(self, tokens: np.ndarray, counted: np.ndarray, location: str) -> None:
        """Append a document, and for each of its tokens whether the loss counts it."""
        assert self._counted is not None
        assert tokens.shape == counted.shape
        self.add(tokens, location)
        self._counted.write(np.ascontiguousarray(counted, np.uint8).data)

    def finish(
        self, tokenizer: ByteTokenizer | TrainedTokenizer | None, end: int | None, sources: list
    ) -> Meta:
        """Write offsets, tokenizer and, as the last file, the metadata; return the metadata."""
        self.close()
        _save_array(self.directory / DOCUMENTS, np.frombuffer(self._offsets, np.int64))
        if tokenizer is not None:
            tokenizer.save(self.directory)
        files = sorted(self.directory.iterdir())
        meta = Meta(
            vocab=self.vocab,
            dtype=self.dtype.name,
            tokens=self._offsets[-1],
            documents=self.documents,
            text=self.text_bytes,
            end=end,
            tokenizer="none" if tokenizer is None else tokenizer.kind,
            sources=sources,
            crc32={path.name: crc32(path) for path in files},
            format=FORMAT if self._counted is None else COUNTED_FORMAT,
            samples={
                path.name: sampled_crc32(path) for path in files if path.stat().st_size > SMALL
            },
        )
        meta.save(self.directory)
        return meta

    def close(self) -> None:
        """Close the files of tokens."""
        self._file.close()
        if self._counted is not None:
            self._counted.close()


def write_tokens(
    directory: str | Path, documents: Iterable[np.ndarray], vocab: int, overwrite: bool = False
) -> TokenSet:
    """Write documents that are already tokenized (by nanoGPT, Megatron, …); return the data set.

    Args:
        directory: The directory to create; it appears once it is complete.
        documents: Flat, non-empty arrays of integers.
        vocab: The vocabulary size; all tokens are below it. It determines the stored dtype.
        overwrite: Whether to replace an existing data set.

    Raises:
        ValueError: The directory exists, or a document is no such array.

    Example:
        >>> import numpy as np, tempfile
        >>> from hfjax.data import write_tokens
        >>> folder = tempfile.TemporaryDirectory()
        >>> tokens = write_tokens(folder.name, [np.arange(3), np.arange(5)], vocab=64)
        >>> tokens.tokens.tolist(), tokens.tokens.dtype.name
        ([0, 1, 2, 0, 1, 2, 3, 4], 'uint8')
    """
    with atomic_dataset(Path(directory), overwrite) as folder:
        writer = TokenWriter(folder, vocab)
        try:
            for document in documents:
                writer.add(np.asarray(document))
        finally:
            writer.close()
        if not writer.documents:
            raise ValueError(f"no documents for {directory}: at least one is needed.")
        writer.finish(None, None, [])
    return TokenSet(directory)


def _save_array(path: Path, array: np.ndarray) -> None:
    """Write an array as np.save does, but report a full disk as such."""
    with path.open("wb") as file:
        header = np.lib.format.header_data_from_array_1_0(array)
        np.lib.format.write_array_header_1_0(file, header)
        file.write(array.data)


@contextmanager
def atomic_dataset(directory: Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield a folder to write to; it becomes `directory` at the end, or is removed on an error."""
    target = Path(os.path.realpath(directory))
    sweep(target)
    check_free(directory, overwrite)
    hidden_prefix = str(target.with_name(f".{target.name}."))  # of temporary folders
    try:
        with exit_on_sigterm(), atomic_directory(target, replace=overwrite) as folder:
            yield folder
    except OSError as error:
        is_ours = error.filename is None or str(error.filename).startswith(hidden_prefix)
        if not is_ours or error.errno is None:
            raise
        message = f"{os.strerror(error.errno)}; nothing is left of what was written"
        raise OSError(error.errno, message, str(directory)) from None


def check_free(directory: Path, overwrite: bool) -> None:
    """Refuse a directory that exists, unless it is a data set and `overwrite` is set."""
    if (kind := path_kind(directory)).startswith(UNREACHED):
        raise ValueError(f"{quote(directory)} is {kind}: choose another --data-dir.")
    if not directory.exists() or (directory.is_dir() and not any(directory.iterdir())):
        return
    if not is_data_set(directory):
        raise ValueError(f"{directory} exists and is not a data set: choose another --data-dir.")
    if not overwrite:
        raise ValueError(
            f"{directory} holds a data set already. Give --overwrite to replace it, or another "
            "--data-dir."
        )


def is_data_set(directory: Path) -> bool:
    """Return whether a directory is a data set, or one split into train and valid."""
    return any((directory / name / META).is_file() for name in ("", *SPLITS))
