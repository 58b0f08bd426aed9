"""A file of tensors (safetensors): eight bytes, a JSON header, then the tensors row by row.

A header that does not match the file is refused before a tensor is read. Rows are read and written
at their offsets, so that several processes can share a file.
"""

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hfjax.utils.read_files import brief, check_ordinary
from hfjax.utils.tables import quote

DTYPES: Mapping[str, np.dtype] = {
    **{"F64": np.dtype(np.float64), "F32": np.dtype(np.float32), "F16": np.dtype(np.float16)},
    **{"BF16": np.dtype(ml_dtypes.bfloat16), "BOOL": np.dtype(np.bool_)},
    **{"F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn), "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2)},
    **{f"I{8 * n}": np.dtype(f"i{n}") for n in (1, 2, 4, 8)},
    **{f"U{8 * n}": np.dtype(f"u{n}") for n in (1, 2, 4, 8)},
}
DTYPE_CODES = {dtype: code for code, dtype in DTYPES.items()}
KNOWN_TYPES = ("float32", "bfloat16", "float16", "float64")  # of weights that are read and written
METADATA = "__metadata__"
LONGEST = 100_000_000  # bytes of a header: the limit of the reference reader
START = 8  # bytes that hold the length of the header
ALIGNED = 64  # bytes: aligned host arrays avoid a copy where possible


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a file, and its position in it.

    Attributes:
        file: The path of the file.
        name: The name in the file.
        dtype: The dtype.
        shape: The shape.
        begin: The offset of its first byte in the file.
        stamp: The `file_stamp` from when the header was read; None: it was not read.
    """

    file: Path
    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    begin: int
    stamp: tuple[int, ...] | None = None

    @property
    def nbytes(self) -> int:
        """The size in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def num_rows(self) -> int:
        """The number of rows: the first dimension; a scalar is one row."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """The size of a row in bytes."""
        return self.nbytes // max(self.num_rows, 1)


def read_header(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a file by name; ValueError says what is wrong with it."""
    with os.fdopen(_open_file(path), "rb") as file:
        stamp = size, *_ = file_stamp(file.fileno())
        length = int.from_bytes(file.read(START), "little")
        if size < START or length > min(size - START, LONGEST):
            raise _damage_error(path, f"its header has {length} bytes, the file {size}")
        text = file.read(length)
    try:
        header = json.loads(text.decode(), object_pairs_hook=_reject_duplicates)
    except RecursionError:
        raise _damage_error(path, "its header is nested too deeply") from None
    except ValueError as error:
        raise _damage_error(path, f"its header is no JSON ({error})") from None
    if not isinstance(header, dict):
        raise _damage_error(path, f"its header is {brief(header)}, an object is expected")
    entries = {name: entry for name, entry in header.items() if name != METADATA}
    tensors = {name: _parse_entry(path, name, entries[name], START + length) for name in entries}
    _check_offsets(path, tensors.values(), START + length, size)
    return {name: replace(tensor, stamp=stamp) for name, tensor in tensors.items()}


def file_stamp(descriptor: int) -> tuple[int, ...]:
    """Return what identifies a file's content: its size, time, and a checksum of its header.

    A copy may keep the time of a file; the header has the positions of the tensors.
    """
    status = os.fstat(descriptor)
    length = int.from_bytes(os.pread(descriptor, START, 0), "little")
    header = os.pread(descriptor, START + min(length, LONGEST), 0)
    return status.st_size, status.st_mtime_ns, zlib.crc32(header)


def open_to_read(tensor: FileTensor) -> int:
    """Return the descriptor of a tensor's file; refuse a file that changed since it was read."""
    descriptor = _open_file(tensor.file)
    if tensor.stamp not in (None, file_stamp(descriptor)):
        os.close(descriptor)
        raise ValueError(
            f"{quote(tensor.file)} was written or replaced after its header was read, which says "
            f"where {quote(tensor.name)} lies: its size, time or header is another. Read the "
            "header again: hfjax.pretrained(folder), or read_vision(file)."
        )
    return descriptor


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; refuse duplicate keys."""
    names = [name for name, _ in pairs]
    if len({*names}) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{quote(duplicate)} stands in it twice")
    return dict(pairs)


def _parse_entry(path: Path, name: str, entry: Any, data_start: int) -> FileTensor:
    """Return the tensor of a header entry."""
    is_size = lambda x: type(x) is int and 0 <= x < 1 << 62
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(name) for name in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _damage_error(
            path, f"{quote(name)} is of dtype {brief(dtype)}: one of {', '.join(DTYPES)}"
        )
    if not isinstance(shape, list) or not all(map(is_size, shape)):
        raise _damage_error(path, f"{quote(name)} has the shape {brief(shape)}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(is_size, offsets)):
        raise _damage_error(path, f"{quote(name)} lies at {brief(offsets)}")
    tensor = FileTensor(path, name, DTYPES[dtype], tuple(shape), data_start + offsets[0])
    if tensor.nbytes != offsets[1] - offsets[0]:
        raise _damage_error(
            path,
            f"{quote(name)} {dtype}{shape} has {tensor.nbytes} bytes, its offsets {offsets} leave "
            f"{offsets[1] - offsets[0]}",
        )
    return tensor


def _check_offsets(path: Path, tensors: Any, data_start: int, size: int) -> None:
    """Refuse tensors that overlap, leave gaps, or run past the end of the file."""
    position, last = data_start, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.begin, t.nbytes)):
        if tensor.begin != position:
            problem = "overlaps" if tensor.begin < position else "leaves a hole after"
            raise _damage_error(path, f"{quote(tensor.name)} {problem} {last}")
        position, last = position + tensor.nbytes, quote(tensor.name)
    if position != size:
        problem = (
            f"the file ends {position - size} bytes before"
            if position > size
            else f"{size - position} bytes after"
        )
        raise _damage_error(path, f"{problem} the end of {last}")


def _damage_error(path: Path, problem: str) -> ValueError:
    return ValueError(
        f"{quote(path)} is no whole file of safetensors: {problem}. Get it again, or write it with "
        "hfjax export or safetensors' own save_file."
    )


def _open_file(path: Path) -> int:
    """Return the descriptor of a regular file; ValueError says why it cannot be read."""
    check_ordinary(path)
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise ValueError(
            f"{quote(path)} cannot be read ({error.strerror}). Make it readable, or get it again."
        ) from None


def read_rows(tensor: FileTensor, first: int, count: int) -> np.ndarray:
    """Return `count` rows of a tensor from row `first` on, in aligned memory."""
    rows = empty_aligned((count, *tensor.shape[1:]), tensor.dtype)
    descriptor = open_to_read(tensor)
    try:
        fill(descriptor, tensor.begin + first * tensor.row_bytes, rows, tensor)
    finally:
        os.close(descriptor)
    return rows


def empty_aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an uninitialised array, aligned to `ALIGNED` bytes."""
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + ALIGNED, np.uint8)
    start = -raw.ctypes.data % ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)


def fill(descriptor: int, at: int, into: np.ndarray, tensor: FileTensor) -> None:
    """Read bytes of a file from offset `at` on until an array is full."""
    remaining = into.reshape(-1).view(np.uint8).data
    while remaining:
        num_read = os.preadv(descriptor, [remaining], at)
        if num_read == 0:
            raise ValueError(
                f"{quote(tensor.file)} ends within {quote(tensor.name)}: it was cut while it was "
                "read. Get it again."
            )
        remaining, at = remaining[num_read:], at + num_read


def header_of(tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]) -> tuple[bytes, int]:
    """Return the header bytes of a file of these tensors, and the size of the file.

    Tensors are in the given order; the header ends at a multiple of eight bytes.
    """
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        entries[name] = {
            "dtype": DTYPE_CODES[dtype],
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(START, "little") + text, START + len(text) + at


def plan_file(
    path: Path, tensors: Mapping[str, tuple[np.dtype, tuple[int, ...]]]
) -> Iterator[FileTensor]:
    """Yield the tensors of a file to be written, with their offsets."""
    offset = len(header_of(tensors)[0])
    for name, (dtype, shape) in tensors.items():
        yield FileTensor(path, name, dtype, shape, offset)
        offset += math.prod(shape) * dtype.itemsize
