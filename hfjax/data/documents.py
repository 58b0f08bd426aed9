"""Documents of text, JSONL and Parquet files, also gzipped; errors name the file and line."""

import gzip
import json
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

from hfjax.utils.command_errors import import_optional
from hfjax.utils.read_files import MISSING, encoding_error, parse_json, path_kind
from hfjax.utils.tables import quote

TEXT, LINES, TABLES = (".txt", ".md"), (".jsonl", ".ndjson"), (".parquet",)
KNOWN = TEXT + LINES + TABLES
REFUSED = (".json", ".csv", ".tsv", ".arrow", ".feather")  # tabular formats that are not supported
READ = ("a file", "a pipe", "a folder")
PATIENCE = 10.0  # seconds to wait for a writer to open a pipe
MARK = "\ufeff"  # byte order mark of UTF-8: not part of the text
SURROGATE = re.compile(r"[\ud800-\udfff]")  # a lone surrogate: has no UTF-8 encoding


@dataclass(frozen=True)
class Document:
    """A text, its location, and how many bytes of its file are read."""

    text: str
    location: str
    bytes_read: int


@dataclass(frozen=True)
class Sources:
    """Files to read. `field`: the JSONL field or Parquet column; `errors`: for invalid UTF-8."""

    files: tuple[Path, ...]
    field: str = "text"
    errors: str = "strict"

    @property
    def nbytes(self) -> int:
        """The total size of all files in bytes."""
        return sum(path.stat().st_size for path in self.files)

    def __iter__(self) -> Iterator[Document]:
        offset = 0
        for path in self.files:
            for document in self._read_documents(path):
                yield Document(document.text, document.location, offset + document.bytes_read)
            offset += path.stat().st_size

    def _read_documents(self, path: Path) -> Iterator[Document]:
        kind = suffix(path)
        if kind in LINES:
            return self._read_lines(path)
        return self._read_table(path) if kind in TABLES else self._read_text(path)

    def _read_text(self, path: Path) -> Iterator[Document]:
        with open_decompressed(path) as (file, raw):
            text = self._decode(file.read(), quote(path)).removeprefix(MARK)
            yield Document(text, quote(path), _bytes_read(raw))

    def _read_lines(self, path: Path) -> Iterator[Document]:
        name = quote(path)
        with open_decompressed(path) as (file, raw):
            for number, line in enumerate(file, 1):
                location = f"{name}:{number}"
                text = self._decode(line, location)
                text = text.removeprefix(MARK) if number == 1 else text
                if text.strip():
                    yield Document(self._parse_line(text, location), location, _bytes_read(raw))

    def _read_table(self, path: Path) -> Iterator[Document]:
        message = f"{quote(path)}: reading Parquet"
        parquet = import_optional("pyarrow.parquet", message, "text")
        pyarrow = import_optional("pyarrow", message, "text")
        try:
            with parquet.ParquetFile(path) as table:
                self._check_column(path, table.schema_arrow)
                yield from self._read_column(path, table)
        except MemoryError:
            raise MemoryError(memory_message(quote(path))) from None
        except (pyarrow.ArrowException, OSError) as error:
            if getattr(error, "errno", None) is not None:  # an OS error
                raise
            message = quote(next(iter(str(error).splitlines()), ""))
            raise ValueError(f"{quote(path)} is no whole Parquet file: {message}") from None

    def _read_column(self, path: Path, table: Any) -> Iterator[Document]:
        file_size, row_number, name = path.stat().st_size, 0, quote(path)
        num_rows = max(table.metadata.num_rows, 1)
        batches = table.iter_batches(1024, columns=[self.field])
        for batch in batches:
            for text in _column_values(batch.column(0)):
                row_number += 1
                location = f"{name}: row {row_number}"
                if isinstance(text, bytes):
                    text = self._decode(text, location)
                yield Document(
                    self._check_text(text, location), location, file_size * row_number // num_rows
                )

    def _check_column(self, path: Path, schema: Any) -> None:
        names = list(schema.names)
        if self.field not in names:
            raise ValueError(
                f"{quote(path)} has no column {self.field!r}: it has "
                f"{', '.join(map(quote, names))}. Name the one "
                "with the text: --field NAME"
            )

    def _decode(self, data: bytes, location: str) -> str:
        try:
            return data.decode("utf-8", self.errors)
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{encoding_error(location, error)}, or give --errors replace."
            ) from None

    def _parse_line(self, line: str, location: str) -> str:
        try:
            record = parse_json(line)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{location}: no JSON: {error.msg} at character {error.pos}."
            ) from None
        except ValueError as error:
            raise ValueError(f"{location} cannot be read: {error}. Take the line out.") from None
        if not isinstance(record, dict) or self.field not in record:
            is_object = isinstance(record, dict)
            contents = ", ".join(map(quote, record)) if is_object else type(record).__name__
            contents = contents or "none"
            raise ValueError(
                f"{location} has no field {self.field!r}: it has {contents}. Name the one with the "
                "text: --field NAME"
            )
        return self._check_text(record[self.field], location)

    def _check_text(self, value: object, location: str) -> str:
        if value is None:
            raise ValueError(
                f"{location}: {self.field!r} is null, text is expected. Take such rows out, or "
                "give them an empty text: these are left out and counted."
            )
        if not isinstance(value, str):
            kind = type(value).__name__
            raise ValueError(f"{location}: {self.field!r} is {kind}, text is expected.")
        if value.isascii() or (surrogate := SURROGATE.search(value)) is None:
            return value
        if self.errors == "replace":
            return SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
        raise ValueError(
            f"{location}: character {surrogate.start()} of {self.field!r} is "
            f"{ascii(surrogate[0])[1:-1]}, half "
            "of a pair, which is no text. Mend the line, or give --errors replace."
        )


def _column_values(column: Any) -> list[Any]:
    """Return the values of a column; texts as bytes, which may be invalid UTF-8."""
    if hasattr(column, "dictionary_decode"):
        column = column.dictionary_decode()
    text = str(column.type) in ("string", "large_string", "string_view")
    return column.cast("large_binary" if text else column.type).to_pylist()


def memory_message(location: str) -> str:
    """Return the error message for a document that does not fit in memory."""
    return (
        f"{location}: memory is full. Memory holds a document whole: split the file, or write it "
        "as JSONL with a document in each line."
    )


def find_files(inputs: tuple[str, ...], pattern: str | None = None) -> tuple[tuple[Path, ...], int]:
    """Return the files that inputs name, in order, folders searched; and how many were skipped.

    In a folder: the files that match the pattern, or those of a known type; never hidden ones.
    """
    files, num_skipped = [], 0
    for name in inputs:
        path = Path(name)
        if (kind := path_kind(path)) not in READ:
            problem = "no such file or folder" if kind == MISSING else f"it is {kind}"
            raise ValueError(f"{quote(name)}: {problem}. Name files and folders of text.")
        if path.is_dir():
            candidates = list_visible(path, pattern or "**/*")
            matches = [f for f in candidates if pattern or suffix(f) in KNOWN]
            files, num_skipped = files + matches, num_skipped + len(candidates) - len(matches)
        else:
            files.append(path)
    _check_kinds(files)
    if not files:
        kinds = pattern or ", ".join(KNOWN)
        raise ValueError(
            f"no file to read in {', '.join(inputs) or 'no inputs'} ({kinds}). Name files, or "
            "folders with --pattern '**/*.py'."
        )
    return tuple(files), num_skipped


def _check_kinds(files: list[Path]) -> None:
    for path in files:
        if (kind := path_kind(path)) not in READ:
            raise ValueError(f"{quote(path)} is {kind}. Take it out.")
        if suffix(path) in TABLES and kind == "a pipe":
            raise ValueError(f"{quote(path)} is a pipe, Parquet is read from its end: give a file.")
        if suffix(path) in REFUSED:
            raise ValueError(
                f"{quote(path)}: {suffix(path)} is not read. Convert it to .jsonl (one object a "
                "line) or .parquet; if it is meant as plain text, copy it to a .txt file."
            )
    duplicates = [path for path, times in Counter(files).items() if times > 1]
    if duplicates:
        raise ValueError(
            f"{quote(duplicates[0])} is named twice: its documents would be in the data twice."
        )


def list_visible(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder that match a pattern, sorted, without hidden ones.

    Dangling links count as files: reading one raises an error.
    """
    is_hidden = lambda path: any(
        component.startswith(".") for component in path.relative_to(folder).parts
    )
    is_file = lambda path: path.is_file() or (path.is_symlink() and not path.exists())
    return sorted(path for path in folder.glob(pattern) if is_file(path) and not is_hidden(path))


def suffix(path: Path) -> str:
    """Return the suffix of a file in lower case, without .gz.

    >>> suffix(Path("a/b.JSONL.gz"))
    '.jsonl'
    """
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


@contextmanager
def open_decompressed(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Yield the decompressed file to read, and the raw one, whose position shows the progress."""
    with _open(path) as raw:
        try:
            is_gzip = path.name.lower().endswith(".gz")
            yield (cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_gzip else raw), raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{quote(path)} is no whole gzip file: {error}") from None
        except MemoryError:
            raise MemoryError(memory_message(quote(path))) from None
        except OSError as error:  # errors while reading carry no file name
            raise OSError(error.errno, error.strerror, str(path)) from None


def _open(path: Path) -> BinaryIO:
    return _open_pipe(path) if path_kind(path) == "a pipe" else path.open("rb")


def _open_pipe(path: Path) -> BinaryIO:
    """Return an open pipe; opening it blocks until a writer opens it too."""
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(path.open, "rb")
        try:
            return future.result(PATIENCE)
        except TimeoutError:
            raise ValueError(
                f"{quote(path)} is a pipe, and for {PATIENCE:g} seconds nobody opened it to write. "
                "Start what writes to it, or give a file."
            ) from None
        finally:
            if not future.done():  # act as the writer, to unblock the other thread
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                future.result().close()


def _bytes_read(raw: BinaryIO) -> int:
    return raw.tell() if raw.seekable() else 0  # a pipe has no position
