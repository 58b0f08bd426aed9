"""Rows of the tensors in files, sharded over all devices: each process reads or writes its own.

A row is contiguous in its file. So each process reads contiguous ranges, and every byte is read by
one process; `redistribute_rows` reshards them on the devices.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hfjax.utils.tables import quote
from hfjax.weights.redistribute_rows import RowPlan
from hfjax.weights.tensor_files import FileTensor, empty_aligned, file_stamp, fill, open_to_read


@dataclass(frozen=True, eq=False)
class FileRows:
    """Rows of tensors on the devices of a mesh; files stay open until `close`.

    A failure in one process must not leave the others waiting in collectives: it is stored, rows
    proceed with whatever they contain, and `finish` raises it.

    Attributes:
        mesh: The device mesh.
        writable: Whether files are written.
        bytes_by_file: The bytes of each file that this process read or wrote.
    """

    mesh: Mesh
    writable: bool = False
    bytes_by_file: dict[Path, int] = field(default_factory=dict)
    _open: dict[Path, int] = field(default_factory=dict)
    _stamps: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    _failures: list[Exception] = field(default_factory=list)

    @cached_property
    def _local_devices(self) -> list[tuple[tuple[int, ...], Any]]:
        """The devices of this process, with their indices in the mesh."""
        process = jax.process_index()
        return [
            (at, d) for at, d in np.ndenumerate(self.mesh.devices) if d.process_index == process
        ]

    def read(self, tensors: Sequence[FileTensor], plan: RowPlan) -> list[np.ndarray]:
        """Return the rows of each local device; rows beyond the end of a tensor are zeros."""
        return [
            self._read_device_rows(tensors, plan, *plan.row_range(at))
            for at, _ in self._local_devices
        ]

    def _read_device_rows(
        self, tensors: Sequence[FileTensor], plan: RowPlan, start: int, count: int
    ) -> np.ndarray:
        like = tensors[0]
        rows = empty_aligned((len(tensors), plan.device_rows, *like.shape[1:]), like.dtype)
        for out, tensor in zip(rows, tensors, strict=True):
            out[count:] = 0
            offset = tensor.begin + start * tensor.row_bytes
            self._transfer(tensor, count, partial(fill, at=offset, into=out[:count], tensor=tensor))
        return rows.reshape(*plan.stack_shape, plan.device_rows, *like.shape[1:])

    def to_devices(self, device_rows: Sequence[np.ndarray], plan: RowPlan) -> jax.Array:
        """Return the rows from `read` as one sharded array."""
        arrays = [
            jax.device_put(x, d) for x, (_, d) in zip(device_rows, self._local_devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(plan.shape, plan.sharding, arrays)

    def write(self, tensors: Sequence[FileTensor], array: jax.Array, plan: RowPlan) -> None:
        """Write the local rows at their offsets in the files."""
        row_ranges = {device: plan.row_range(at) for at, device in self._local_devices}
        for shard in array.addressable_shards:
            start, count = row_ranges[shard.device]
            data = np.asarray(shard.data)
            rows = data.reshape(
                len(tensors), plan.device_rows, *data.shape[len(plan.stack_shape) + 1 :]
            )
            for tensor, tensor_rows in zip(tensors, rows, strict=True):
                x = tensor_rows.astype(tensor.dtype, copy=False)  # float64, which devices may lack
                self._transfer(
                    tensor, count, partial(_write_rows, tensor=tensor, start=start, rows=x[:count])
                )

    def _transfer(self, tensor: FileTensor, num_rows: int, transfer: Callable[[int], None]) -> None:
        """Transfer rows by their file's descriptor; count their bytes, or store the failure."""
        try:
            transfer(self.descriptor(tensor))
            self.bytes_by_file[tensor.file] = (
                self.bytes_by_file.get(tensor.file, 0) + num_rows * tensor.row_bytes
            )
        except (OSError, ValueError) as failure:
            self._failures.append(failure)

    def finish(self) -> int:
        """Return the number of bytes transferred by this process; raise the first failure."""
        self.close()
        if self._failures:
            raise self._failures[0]
        return sum(self.bytes_by_file.values())

    def descriptor(self, tensor: FileTensor) -> int:
        """Return the descriptor of a tensor's file, opened at first use."""
        if tensor.file not in self._open:
            descriptor = (
                os.open(tensor.file, os.O_WRONLY) if self.writable else open_to_read(tensor)
            )
            self._open[tensor.file] = descriptor
            if not self.writable:
                self._stamps[tensor.file] = file_stamp(descriptor)
        return self._open[tensor.file]

    def close(self) -> None:
        """Close the files: sync written ones to disk, check that read ones did not change."""
        while self._open:
            file, descriptor = self._open.popitem()
            try:
                if self.writable:
                    os.fsync(descriptor)
                elif file_stamp(descriptor) != self._stamps[file]:
                    self._failures.append(
                        ValueError(f"{quote(file)} was written while it was read: read it again.")
                    )
            finally:
                os.close(descriptor)


def _write_rows(descriptor: int, tensor: FileTensor, start: int, rows: np.ndarray) -> None:
    """Write rows of a tensor, from row `start` on."""
    assert rows.nbytes == len(rows) * tensor.row_bytes, (tensor, rows.shape, rows.dtype)
    offset = tensor.begin + start * tensor.row_bytes
    remaining = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
    while remaining:
        num_written = os.pwrite(descriptor, remaining, offset)
        remaining, offset = remaining[num_written:], offset + num_written
