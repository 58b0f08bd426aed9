"""Tensors as rows of their files, split over all devices: each process has its own share of them.

A row of a file is one run of bytes. So each process reads whole runs, and every byte is read by
one process; what lies where on the devices is another program's affair (`stream_in`, `write_out`).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hfjax.weights.row_moves import Way
from hfjax.weights.tensor_files import Tensor, aligned, fill


@dataclass(frozen=True, eq=False)
class RowsOfFiles:
    """Rows of tensors on the devices of a mesh; files stay open until `close`.

    Attributes:
        mesh: The devices.
        writes: Whether files are written.
        moved: Bytes of each file that this process read or wrote.
    """

    mesh: Mesh
    writes: bool = False
    moved: dict[Path, int] = field(default_factory=dict)
    _open: dict[Path, int] = field(default_factory=dict)

    @cached_property
    def _here(self) -> list[tuple[tuple[int, ...], Any]]:
        """The devices of this process, with their indices in the mesh."""
        mine = jax.process_index()
        return [(at, d) for at, d in np.ndenumerate(self.mesh.devices) if d.process_index == mine]

    def read(self, tensors: Sequence[Tensor], way: Way) -> list[np.ndarray]:
        """Return the rows of each device that is here; of those that a file has not, zeros."""
        return [self._of_device(tensors, way, *way.place(at)) for at, _ in self._here]

    def _of_device(self, tensors: Sequence[Tensor], way: Way, start: int, count: int) -> np.ndarray:
        like = tensors[0]
        made = aligned((len(tensors), way.rows, *like.shape[1:]), like.dtype)
        for into, tensor in zip(made, tensors, strict=True):
            if count:
                at = tensor.begin + start * tensor.row_bytes
                fill(self.descriptor(tensor.file), at, into[:count], tensor)
                self._count(tensor, count)
            into[count:] = 0
        return made.reshape(*way.first, way.rows, *like.shape[1:])

    def on_devices(self, parts: Sequence[np.ndarray], way: Way) -> jax.Array:
        """Return what `read` returned as one array."""
        held = [jax.device_put(x, d) for x, (_, d) in zip(parts, self._here, strict=True)]
        return jax.make_array_from_single_device_arrays(way.shape, way.sharding, held)

    def write(self, tensors: Sequence[Tensor], array: jax.Array, way: Way) -> None:
        """Write the rows that are here, at their places in the files."""
        places = {device: way.place(at) for at, device in self._here}
        for shard in array.addressable_shards:
            start, count = places[shard.device]
            part = np.asarray(shard.data)
            rows = part.reshape(len(tensors), way.rows, *part.shape[len(way.first) + 1 :])
            for tensor, x in zip(tensors, rows, strict=True):
                if count:
                    at = tensor.begin + start * tensor.row_bytes
                    _put(self.descriptor(tensor.file), at, x[:count])
                    self._count(tensor, count)

    def _count(self, tensor: Tensor, rows: int) -> None:
        self.moved[tensor.file] = self.moved.get(tensor.file, 0) + rows * tensor.row_bytes

    def descriptor(self, file: Path) -> int:
        """Return the descriptor of a file, opened when it is first asked for."""
        if file not in self._open:
            self._open[file] = os.open(file, os.O_WRONLY if self.writes else os.O_RDONLY)
        return self._open[file]

    def close(self) -> None:
        """Close the files; those written are on the disk then."""
        while self._open:
            _, descriptor = self._open.popitem()
            try:
                if self.writes:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)


def _put(descriptor: int, at: int, rows: np.ndarray) -> None:
    left = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
    while left:
        done = os.pwrite(descriptor, left, at)
        left, at = left[done:], at + done
