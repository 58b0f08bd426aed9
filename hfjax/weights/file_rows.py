"""Tensors as rows of their files, split over all devices: each process has its own share of them.

A row of a file is one run of bytes. So each process reads whole runs, and every byte is read by
one process; what lies where on the devices is another program's affair (`stream_in`, `write_out`).
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

from hfjax.utils.tables import named
from hfjax.weights.redistribute_rows import Way
from hfjax.weights.tensor_files import FileTensor, aligned, fill, open_to_read, stamp_of


@dataclass(frozen=True, eq=False)
class RowsOfFiles:
    """Rows of tensors on the devices of a mesh; files stay open until `close`.

    What fails in one process must not keep the others waiting for its collectives: it is kept, rows
    go on with whatever is in them, and `ended` raises it.

    Attributes:
        mesh: The devices.
        writes: Whether files are written.
        moved: Bytes of each file that this process read or wrote.
    """

    mesh: Mesh
    writes: bool = False
    moved: dict[Path, int] = field(default_factory=dict)
    _open: dict[Path, int] = field(default_factory=dict)
    _stamps: dict[Path, tuple[int, ...]] = field(default_factory=dict)
    _failures: list[Exception] = field(default_factory=list)

    @cached_property
    def _here(self) -> list[tuple[tuple[int, ...], Any]]:
        """The devices of this process, with their indices in the mesh."""
        mine = jax.process_index()
        return [(at, d) for at, d in np.ndenumerate(self.mesh.devices) if d.process_index == mine]

    def read(self, tensors: Sequence[FileTensor], way: Way) -> list[np.ndarray]:
        """Return the rows of each device that is here; of those that a file has not, zeros."""
        return [self._of_device(tensors, way, *way.place(at)) for at, _ in self._here]

    def _of_device(
        self, tensors: Sequence[FileTensor], way: Way, start: int, count: int
    ) -> np.ndarray:
        like = tensors[0]
        made = aligned((len(tensors), way.rows, *like.shape[1:]), like.dtype)
        for into, tensor in zip(made, tensors, strict=True):
            into[count:] = 0
            at = tensor.begin + start * tensor.row_bytes
            self._move(tensor, count, partial(fill, at=at, into=into[:count], tensor=tensor))
        return made.reshape(*way.first, way.rows, *like.shape[1:])

    def on_devices(self, parts: Sequence[np.ndarray], way: Way) -> jax.Array:
        """Return what `read` returned as one array."""
        held = [jax.device_put(x, d) for x, (_, d) in zip(parts, self._here, strict=True)]
        return jax.make_array_from_single_device_arrays(way.shape, way.sharding, held)

    def write(self, tensors: Sequence[FileTensor], array: jax.Array, way: Way) -> None:
        """Write the rows that are here, at their places in the files."""
        places = {device: way.place(at) for at, device in self._here}
        for shard in array.addressable_shards:
            start, count = places[shard.device]
            part = np.asarray(shard.data)
            rows = part.reshape(len(tensors), way.rows, *part.shape[len(way.first) + 1 :])
            for tensor, narrow in zip(tensors, rows, strict=True):
                x = narrow.astype(tensor.dtype, copy=False)  # float64, where a device has none
                self._move(tensor, count, partial(_put, tensor=tensor, start=start, rows=x[:count]))

    def _move(self, tensor: FileTensor, rows: int, move: Callable[[int], None]) -> None:
        """Move rows by the descriptor of their file; count their bytes, or keep why it failed."""
        try:
            move(self.descriptor(tensor))
            self.moved[tensor.file] = self.moved.get(tensor.file, 0) + rows * tensor.row_bytes
        except (OSError, ValueError) as failure:
            self._failures.append(failure)

    def ended(self) -> int:
        """Return how many bytes were moved here; raise what failed first."""
        self.close()
        if self._failures:
            raise self._failures[0]
        return sum(self.moved.values())

    def descriptor(self, tensor: FileTensor) -> int:
        """Return the descriptor of a tensor's file, opened when it is first asked for."""
        if tensor.file not in self._open:
            opened = os.open(tensor.file, os.O_WRONLY) if self.writes else open_to_read(tensor)
            self._open[tensor.file] = opened
            if not self.writes:
                self._stamps[tensor.file] = stamp_of(opened)
        return self._open[tensor.file]

    def close(self) -> None:
        """Close the files; those written are on the disk then, and those read are as they were."""
        while self._open:
            file, descriptor = self._open.popitem()
            try:
                if self.writes:
                    os.fsync(descriptor)
                elif stamp_of(descriptor) != self._stamps[file]:
                    self._failures.append(
                        ValueError(f"{named(file)} was written while it was read: read it again.")
                    )
            finally:
                os.close(descriptor)


def _put(descriptor: int, tensor: FileTensor, start: int, rows: np.ndarray) -> None:
    """Write rows of a tensor, from one on."""
    assert rows.nbytes == len(rows) * tensor.row_bytes, (tensor, rows.shape, rows.dtype)
    at = tensor.begin + start * tensor.row_bytes
    left = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
    while left:
        done = os.pwrite(descriptor, left, at)
        left, at = left[done:], at + done
