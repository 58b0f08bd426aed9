"""Documents of text, JSONL and Parquet files, also gzipped; every fault names its file and line."""

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

from hfjax.utils.command_errors import optional
from hfjax.utils.read_files import MISSING, not_utf8, parsed, what_is
from hfjax.utils.tables import named

TEXT, LINES, TABLES = (".txt", ".md"), (".jsonl", ".ndjson"), (".parquet",)
KNOWN = TEXT + LINES + TABLES
REFUSED = (".json", ".csv", ".tsv", ".arrow", ".feather")  # tables, but not read as such
READ = ("a file", "a pipe", "a folder")
PATIENCE = 10.0  # seconds that somebody has to begin to write to a pipe
MARK = "\ufeff"  # may begin a file of UTF-8, and is no text
SURROGATE = re.compile(r"[\ud800-\udfff]")  # half of a pair: no character, has no UTF-8


@dataclass(frozen=True)
class Document:
    """A text, where it is from, and how many bytes of its file are read."""

    text: str
    where: str
    read: int


@dataclass(frozen=True)
class Sources:
    """Files to read. `field` is that of JSONL lines, the column of Parquet; `errors` for UTF-8."""

    files: tuple[Path, ...]
    field: str = "text"
    errors: str = "strict"

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(path.stat().st_size for path in self.files)

    def __iter__(self) -> Iterator[Document]:
        before = 0
        for path in self.files:
            for document in self._documents(path):
                yield Document(document.text, document.where, before + document.read)
            before += path.stat().st_size

    def _documents(self, path: Path) -> Iterator[Document]:
        kind = suffix(path)
        if kind in LINES:
            return self._lines(path)
        return self._rows(path) if kind in TABLES else self._whole(path)

    def _whole(self, path: Path) -> Iterator[Document]:
        with opened(path) as (file, raw):
            text = self._decode(file.read(), named(path)).removeprefix(MARK)
            yield Document(text, named(path), _read(raw))

    def _lines(self, path: Path) -> Iterator[Document]:
        name = named(path)
        with opened(path) as (file, raw):
            for number, line in enumerate(file, 1):
                where = f"{name}:{number}"
                text = self._decode(line, where)
                text = text.removeprefix(MARK) if number == 1 else text
                if text.strip():
                    yield Document(self._text_of(text, where), where, _read(raw))

    def _rows(self, path: Path) -> Iterator[Document]:
        what = f"{named(path)}: reading Parquet"
        parquet = optional("pyarrow.parquet", what, "text")
        pyarrow = optional("pyarrow", what, "text")
        try:
            with parquet.ParquetFile(path) as table:
                self._check_column(path, table.schema_arrow)
                yield from self._column(path, table)
        except MemoryError:
            raise MemoryError(too_long(named(path))) from None
        except (pyarrow.ArrowException, OSError) as wrong:
            if getattr(wrong, "errno", None) is not None:  # of the system
                raise
            what = named(next(iter(str(wrong).splitlines()), ""))
            raise ValueError(f"{named(path)} is no whole Parquet file: {what}") from None

    def _column(self, path: Path, table: Any) -> Iterator[Document]:
        size, row, name = path.stat().st_size, 0, named(path)
        total = max(table.metadata.num_rows, 1)
        batches = table.iter_batches(1024, columns=[self.field])
        for batch in batches:
            for text in _values(batch.column(0)):
                row += 1
                where = f"{name}: row {row}"
                if isinstance(text, bytes):
                    text = self._decode(text, where)
                yield Document(self._string(text, where), where, size * row // total)

    def _check_column(self, path: Path, schema: Any) -> None:
        names = list(schema.names)
        if self.field not in names:
            raise ValueError(
                f"{named(path)} has no column {self.field!r}: it has "
                f"{', '.join(map(named, names))}. Name the one "
                "with the text: --field NAME"
            )

    def _decode(self, data: bytes, where: str) -> str:
        try:
            return data.decode("utf-8", self.errors)
        except UnicodeDecodeError as wrong:
            raise ValueError(f"{not_utf8(where, wrong)}, or give --errors replace.") from None

    def _text_of(self, line: str, where: str) -> str:
        try:
            found = parsed(line)
        except json.JSONDecodeError as wrong:
            raise ValueError(f"{where}: no JSON: {wrong.msg} at character {wrong.pos}.") from None
        except ValueError as wrong:
            raise ValueError(f"{where} cannot be read: {wrong}. Take the line out.") from None
        if not isinstance(found, dict) or self.field not in found:
            keys = isinstance(found, dict)
            has = ", ".join(map(named, found)) if keys else type(found).__name__
            has = has or "none"
            raise ValueError(
                f"{where} has no field {self.field!r}: it has {has}. Name the one with the text: "
                "--field NAME"
            )
        return self._string(found[self.field], where)

    def _string(self, value: object, where: str) -> str:
        if value is None:
            raise ValueError(
                f"{where}: {self.field!r} is null, text is expected. Take such rows out, or give "
                "them an empty text: these are left out and counted."
            )
        if not isinstance(value, str):
            kind = type(value).__name__
            raise ValueError(f"{where}: {self.field!r} is {kind}, text is expected.")
        if value.isascii() or (half := SURROGATE.search(value)) is None:
            return value
        if self.errors == "replace":
            return SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
        raise ValueError(
            f"{where}: character {half.start()} of {self.field!r} is {ascii(half[0])[1:-1]}, half "
            "of a pair, which is no text. Mend the line, or give --errors replace."
        )


def _values(column: Any) -> list[Any]:
    """Return the values of a column; texts as bytes, which may be no UTF-8."""
    if hasattr(column, "dictionary_decode"):
        column = column.dictionary_decode()
    text = str(column.type) in ("string", "large_string", "string_view")
    return column.cast("large_binary" if text else column.type).to_pylist()


def too_long(where: str) -> str:
    """Return what to say of a document that memory does not hold."""
    return (
        f"{where}: memory is full. Memory holds a document whole: split the file, or write it as "
        "JSONL with a document in each line."
    )


def find(inputs: tuple[str, ...], pattern: str | None = None) -> tuple[tuple[Path, ...], int]:
    """Return the files that inputs name, folders searched, in order; and how many were passed over.

    In a folder: the files that match the pattern, or those of a known kind; none that is hidden.
    """
    files, passed = [], 0
    for name in inputs:
        path = Path(name)
        if (kind := what_is(path)) not in READ:
            what = "no such file or folder" if kind == MISSING else f"it is {kind}"
            raise ValueError(f"{named(name)}: {what}. Name files and folders of text.")
        if path.is_dir():
            inside = visible(path, pattern or "**/*")
            wanted = [f for f in inside if pattern or suffix(f) in KNOWN]
            files, passed = files + wanted, passed + len(inside) - len(wanted)
        else:
            files.append(path)
    _check_kinds(files)
    if not files:
        kinds = pattern or ", ".join(KNOWN)
        raise ValueError(
            f"no file to read in {', '.join(inputs) or 'no inputs'} ({kinds}). Name files, or "
            "folders with --pattern '**/*.py'."
        )
    return tuple(files), passed


def _check_kinds(files: list[Path]) -> None:
    for path in files:
        if (kind := what_is(path)) not in READ:
            raise ValueError(f"{named(path)} is {kind}. Take it out.")
        if suffix(path) in TABLES and kind == "a pipe":
            raise ValueError(f"{named(path)} is a pipe, Parquet is read from its end: give a file.")
        if suffix(path) in REFUSED:
            raise ValueError(
                f"{named(path)}: {suffix(path)} is not read. Convert it to .jsonl (one object a "
                "line) or .parquet; if it is meant as plain text, copy it to a .txt file."
            )
    twice = [path for path, times in Counter(files).items() if times > 1]
    if twice:
        raise ValueError(
            f"{named(twice[0])} is named twice: its documents would be in the data twice."
        )


def visible(folder: Path, pattern: str) -> list[Path]:
    """Return the files of a folder that match a pattern, sorted, but for hidden ones.

    Links that lead nowhere count as files: who wants to read one is told.
    """
    hidden = lambda path: any(part.startswith(".") for part in path.relative_to(folder).parts)
    is_one = lambda path: path.is_file() or (path.is_symlink() and not path.exists())
    return sorted(path for path in folder.glob(pattern) if is_one(path) and not hidden(path))


def suffix(path: Path) -> str:
    """Return what kind of file it is, gzipped or not.

    >>> suffix(Path("a/b.JSONL.gz"))
    '.jsonl'
    """
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


@contextmanager
def opened(path: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Give the file to read, decompressed, and the raw one, whose position shows the progress."""
    with _open(path) as raw:
        try:
            zipped = path.name.lower().endswith(".gz")
            yield (cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if zipped else raw), raw
        except (EOFError, zlib.error, gzip.BadGzipFile) as wrong:
            raise ValueError(f"{named(path)} is no whole gzip file: {wrong}") from None
        except MemoryError:
            raise MemoryError(too_long(named(path))) from None
        except OSError as wrong:  # while reading, it knows no name
            raise OSError(wrong.errno, wrong.strerror, str(path)) from None


def _open(path: Path) -> BinaryIO:
    return _pipe(path) if what_is(path) == "a pipe" else path.open("rb")


def _pipe(path: Path) -> BinaryIO:
    """Return a pipe that is open: to open it waits until somebody opens it to write."""
    with ThreadPoolExecutor(1) as pool:
        opening = pool.submit(path.open, "rb")
        try:
            return opening.result(PATIENCE)
        except TimeoutError:
            raise ValueError(
                f"{named(path)} is a pipe, and for {PATIENCE:g} seconds nobody opened it to write. "
                "Start what writes to it, or give a file."
            ) from None
        finally:
            if not opening.done():  # be the one who writes, so that the other thread goes on
                os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                opening.result().close()


def _read(raw: BinaryIO) -> int:
    return raw.tell() if raw.seekable() else 0  # a pipe does not tell
