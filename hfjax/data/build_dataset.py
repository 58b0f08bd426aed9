"""Build a data set from documents: tokenizer, train/valid split, tokens written as they arrive.

The split depends on document numbers only, so it is the same each time.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from hfjax.data.documents import Document, Sources, find_files, memory_message
from hfjax.data.hub_dataset import download_dataset
from hfjax.data.token_dataset import Meta
from hfjax.data.token_writer import TokenWriter, atomic_dataset, check_free
from hfjax.data.tokenizer import (
    GROUP_SIZE,
    KNOWN_ENDS,
    ByteTokenizer,
    TrainedTokenizer,
    group_by_size,
    load_tokenizer,
    train_bpe,
)
from hfjax.utils.hub import parse_dataset, resolve


def split_documents(documents: Iterable[Document], valid: float) -> Iterator[tuple[Document, int]]:
    """Yield each document with 1 if it is for validation: one of every 1 / valid, drawn by number.

    A single document is split: its last part is for validation.
    """
    remaining = iter(documents)
    first, second = next(remaining, None), next(remaining, None)
    if first is not None and second is None:
        yield from _split_text(first, valid)
        return
    for number, document in enumerate(d for d in (first, second) if d is not None):
        yield document, is_validation(number, valid)
    for number, document in enumerate(remaining, 2):
        yield document, is_validation(number, valid)


def _split_text(document: Document, valid: float) -> Iterator[tuple[Document, int]]:
    boundary = math.ceil(len(document.text) * (1 - valid))
    for split_index, text in enumerate((document.text[:boundary], document.text[boundary:])):
        if text:
            yield Document(text, document.location, document.bytes_read), split_index


def is_validation(number: int, valid: float) -> bool:
    """Return whether a document is for validation: one drawn from each 1 / valid consecutive ones.

    >>> [sum(is_validation(number, 0.1) for number in range(n)) for n in (10, 20, 1000)]
    [1, 2, 100]
    >>> sum(is_validation(number, 0.3) for number in range(1000))
    299
    """
    stratum = math.floor(number * valid)
    valid_numbers = (math.floor((s + _stable_uniform(s)) / valid) for s in (stratum, stratum + 1))
    return number in valid_numbers


def _stable_uniform(number: int) -> float:
    """Return a number in [0, 1) that is the same on every machine."""
    return float(np.random.SeedSequence(number).generate_state(1)[0]) / 2**32


DOCUMENT_OVERHEAD = 256  # memory of an empty document, in characters

Progress = Callable[[str, int, int], None]  # activity, bytes read, total bytes


@dataclass(frozen=True)
class Recipe:
    """The inputs and options of a data set to build."""

    inputs: tuple[str, ...]
    out: Path
    tokenizer: str = "bytes"  # or bpe, or the path of one
    vocab: int | None = None  # of bpe; None: 8192
    valid: float = 0.0  # the fraction of documents for validation
    field: str = "text"  # of JSONL, or the Parquet column
    pattern: str | None = None  # which files of a folder to read
    append_end: bool = True  # write an end token after each document
    end_token: str | None = None  # its name in a tokenizer.json
    errors: str = "strict"  # or replace: for invalid UTF-8
    overwrite: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.valid <= 0.5:
            raise ValueError(f"--valid {self.valid:g}: a part of the documents, from 0 to 0.5.")
        if self.errors not in ("strict", "replace"):
            raise ValueError(f"--errors {self.errors}: strict or replace.")
        if self.vocab is not None and self.tokenizer != "bpe":
            raise ValueError(
                f"--vocab {self.vocab}: for --tokenizer bpe; {self.tokenizer} has a vocabulary."
            )
        if self.end_token is not None and (self.tokenizer in ("bytes", "bpe")):
            raise ValueError(
                f"--end-token {self.end_token}: for a tokenizer.json; {self.tokenizer} has its own."
            )

    @property
    def bpe_vocab(self) -> int:
        """The size of a trained vocabulary."""
        return 8192 if self.vocab is None else self.vocab


@dataclass(frozen=True)
class PreparedDataset:
    """The result: metadata of each split ("" for a single one), and what was left out."""

    out: Path
    parts: dict[str, Meta]
    files: int
    passed_over: int  # files of unknown type
    empty: int  # documents without text
    bpe_vocab: int | None  # of a trained tokenizer
    dropped: int = 0  # characters without a token
    unknown: int = 0  # occurrences of the tokenizer's unknown token


def prepare(
    inputs: Iterable[str | Path] | str | Path,
    out: str | Path,
    progress: Progress | None = None,
    **options,
) -> PreparedDataset:
    """Build a data set from text, JSONL and Parquet files; it appears at `out` once complete.

    Args:
        inputs: A file or a folder, or `hub:org/name[/folder][@revision]` for the files of a data
            set on the Hub to train on; or several.
        out: The directory to create. It must not exist yet, or be empty.
        progress: Called with (activity, bytes read, total bytes).
        options: `tokenizer` ("bytes", "bpe", the path of a tokenizer.json, or a model's folder),
            `vocab` (of bpe), `valid` (the fraction of documents for validation: the data set then
            has the splits `train` and `valid`), `field` (of JSONL and Parquet), `pattern` (of the
            files of a folder), `append_end`, `end_token`, `errors` (strict or replace, of UTF-8),
            `overwrite`.

    Returns:
        An object that describes the result: `out`, `parts`, `files`, `passed_over`, `empty`; and
        what the tokenizer cannot encode: `dropped` characters, and the count of its `unknown`
        token.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from hfjax.data import prepare
        >>> folder = tempfile.TemporaryDirectory()
        >>> text = Path(folder.name, "once.txt")
        >>> _ = text.write_text("Once upon a time")
        >>> prepare(text, Path(folder.name, "once")).parts[""].tokens  # bytes, and the end
        17
    """
    several = [inputs] if isinstance(inputs, str | Path) else inputs
    return build(Recipe(tuple(map(str, several)), Path(out), **options), progress)


def build(recipe: Recipe, progress: Progress | None = None) -> PreparedDataset:
    """Build the data set of a recipe."""
    return build_from_files(*find_inputs(recipe), progress=progress)


def find_inputs(recipe: Recipe) -> tuple[Recipe, tuple[Path, ...], int]:
    """Return a recipe, its files and the number of files that are left out.

    Data sets of the Hub are downloaded, and the recipe has their commits.
    """
    check_free(recipe.out, recipe.overwrite)
    names = [parse_dataset(text) for text in recipe.inputs]
    local = tuple(t for t, name in zip(recipe.inputs, names, strict=True) if name is None)
    is_local = len(local) == len(names)
    files, passed_over = find_files(local, recipe.pattern) if local or is_local else ((), 0)
    inputs = list(recipe.inputs)
    for i, name in enumerate(names):
        if name is not None:
            name = name.at(resolve(name))
            hub_files = download_dataset(name, recipe.pattern, valid=False)
            inputs[i], files = str(name), files + hub_files.train
            passed_over += hub_files.passed_over
    return replace(recipe, inputs=tuple(inputs)), files, passed_over


def build_from_files(
    recipe: Recipe,
    files: tuple[Path, ...],
    passed_over: int = 0,
    progress: Progress | None = None,
) -> PreparedDataset:
    """Build the data set of a recipe from these files."""
    sources = Sources(files, recipe.field, recipe.errors)
    report_progress = progress or (lambda task, bytes_read, bytes_total: None)
    tokenizer = _make_tokenizer(recipe, sources, report_progress)
    end = _end_token(recipe, tokenizer)
    documents = _NonemptyDocuments(_with_progress(sources, "writing tokens", report_progress))
    with atomic_dataset(recipe.out, recipe.overwrite) as folder:
        splits = _write_documents(recipe, folder, tokenizer, end, documents)
    bpe_vocab = recipe.bpe_vocab if recipe.tokenizer == "bpe" else None
    unencoded = tokenizer.dropped, tokenizer.unknown
    return PreparedDataset(
        recipe.out, splits, len(files), passed_over, documents.num_empty, bpe_vocab, *unencoded
    )


class _NonemptyDocuments:
    """An iterable over the documents that have text; `num_empty` counts the others."""

    def __init__(self, documents: Iterable[Document]) -> None:
        self._documents, self.num_empty = documents, 0

    def __iter__(self) -> Iterator[Document]:
        for document in self._documents:
            if document.text:
                yield document
            else:
                self.num_empty += 1


def _with_progress(sources: Sources, task: str, report_progress: Progress) -> Iterator[Document]:
    bytes_total = sources.nbytes
    for document in sources:
        report_progress(task, document.bytes_read, bytes_total)
        yield document


def _make_tokenizer(
    recipe: Recipe, sources: Sources, report_progress: Progress
) -> ByteTokenizer | TrainedTokenizer:
    if recipe.tokenizer == "bpe":
        pipes = [path for path in sources.files if not path.is_file()]
        if pipes:
            raise ValueError(
                f"{pipes[0]} is a pipe, but bpe reads the text twice: give a file, or a tokenizer "
                "that is trained."
            )
        texts = (
            document.text
            for document in _with_progress(sources, "training the tokenizer", report_progress)
        )
        return train_bpe(texts, recipe.bpe_vocab)
    return load_tokenizer(recipe.tokenizer, recipe.end_token)


def _end_token(recipe: Recipe, tokenizer: ByteTokenizer | TrainedTokenizer) -> int | None:
    if recipe.append_end and tokenizer.end is None:
        raise ValueError(
            f"{recipe.tokenizer}: none of {', '.join(KNOWN_ENDS)} is in it, so the end of "
            "a document has no token. Name it with --end-token, or give --no-append-end."
        )
    return tokenizer.end if recipe.append_end else None


def _write_documents(
    recipe: Recipe,
    folder: Path,
    tokenizer: ByteTokenizer | TrainedTokenizer,
    end: int | None,
    documents: _NonemptyDocuments,
) -> dict[str, Meta]:
    """Write all documents, each to its split; return the metadata of each split."""
    names = ("train", "valid") if recipe.valid else ("",)
    with ExitStack() as stack:
        writers = [TokenWriter(folder / name, tokenizer.vocab) for name in names]
        for writer in writers:
            stack.callback(writer.close)
        pairs = (
            split_documents(documents, recipe.valid)
            if recipe.valid
            else ((d, 0) for d in documents)
        )
        for group in group_by_size(
            pairs, GROUP_SIZE, lambda pair: len(pair[0].text) + DOCUMENT_OVERHEAD
        ):
            token_arrays = _encode(tokenizer, [document for document, _ in group])
            for (document, split_index), tokens in zip(group, token_arrays, strict=True):
                _check_no_end(tokens, tokenizer, end, document.location)
                if not tokens.size and end is None:
                    documents.num_empty += 1
                    continue
                writers[split_index].add(tokens, document.location, _utf8_size(document.text), end)
        _check_splits(recipe, names, writers)
        sources = list(recipe.inputs)
        return {n: w.finish(tokenizer, end, sources) for n, w in zip(names, writers, strict=True)}


def _encode(
    tokenizer: ByteTokenizer | TrainedTokenizer, documents: list[Document]
) -> list[np.ndarray]:
    """Return the tokens of each document; errors name the document's location."""
    first, last = documents[0].location, documents[-1].location
    location = first if first == last else f"{first} to {last}"
    try:
        return tokenizer.encode([document.text for document in documents])
    except ValueError as error:
        raise ValueError(f"{location}: {error}") from None
    except MemoryError:
        raise MemoryError(memory_message(location)) from None


def _utf8_size(text: str) -> int:
    """Return the number of UTF-8 bytes of a text, without a copy if it is ASCII."""
    return len(text) if text.isascii() else len(text.encode())


def _check_no_end(tokens: np.ndarray, tokenizer: object, end: int | None, location: str) -> None:
    """Refuse tokens that contain 0, the end of a document for the byte tokenizer."""
    if end is None or not isinstance(tokenizer, ByteTokenizer) or tokens.all():
        return
    raise ValueError(
        f"{location} contains byte 0 (at {int(np.argmin(tokens))}), which stands for the end of a "
        "document. Is it text? Give --no-append-end to take it as it is."
    )


def _check_splits(recipe: Recipe, names: tuple[str, ...], writers: list[TokenWriter]) -> None:
    num_documents = sum(writer.documents for writer in writers)
    if not num_documents:
        raise ValueError(f"{', '.join(recipe.inputs)}: no text in it. Nothing was written.")
    for name, writer in zip(names, writers, strict=True):
        if not writer.documents:
            raise ValueError(
                f"--valid {recipe.valid:g} of {num_documents} documents leaves none to {name}. "
                "Give more documents or another part."
            )
