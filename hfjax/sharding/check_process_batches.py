"""Which examples of a batch each process passes, and whether shared ones are equal.

Devices along pipe, context, row and tensor compute with the same examples, and may belong to
several processes. Each of these passes all those examples. Their checksums are compared once a
batch.
"""

import weakref
import zlib
from collections import defaultdict
from fractions import Fraction
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hfjax.distributed.exchange import gather_values
from hfjax.parallel.mesh import AXES, BATCH_AXES, describe_mesh, in_use, size_of

Sums = list[int]  # one for each shard of the batch
_sums: dict[int, Sums] = {}  # of arrays on devices, by their id


@lru_cache(maxsize=32)
def batch_shards_of(mesh: Mesh) -> dict[int, list[int]]:
    """Return {process: which shards of a batch its devices compute with}."""
    batch_dims = [AXES.index(axis) for axis in BATCH_AXES]
    other_dims = [i for i in range(len(AXES)) if i not in batch_dims]
    devices_by_shard = mesh.devices.transpose(*batch_dims, *other_dims).reshape(
        size_of(BATCH_AXES, mesh), -1
    )
    shards = defaultdict(list)
    for shard, devices in enumerate(devices_by_shard):
        for process in sorted({device.process_index for device in devices}):
            shards[process].append(shard)
    return dict(shards)


def batch_factor(mesh: Mesh) -> Fraction:
    """Return the size of the global batch divided by that of this process."""
    if jax.process_count() == 1:
        return Fraction(1)
    return Fraction(size_of(BATCH_AXES, mesh), len(batch_shards_of(mesh)[jax.process_index()]))


@lru_cache(maxsize=32)
def _sharing_processes(mesh: Mesh, process: int) -> tuple[int, ...]:
    """Return the processes that share examples with a process, or with one that does."""
    shards, processes = {p: {*own} for p, own in batch_shards_of(mesh).items()}, {process}
    while True:
        shared = set().union(*(shards[p] for p in processes))
        group = {p for p, own in shards.items() if own & shared}
        if group == processes:
            return tuple(sorted(processes))
        processes = group


def remember_checksums(mesh: Mesh, local_batch: Any, global_batch: Any) -> None:
    """Remember checksums of the examples passed for an array, if others pass them too."""
    if len(_sharing_processes(mesh, jax.process_index())) == 1:
        return
    count = len(batch_shards_of(mesh)[jax.process_index()])
    for local_examples, x in zip(
        jax.tree.leaves(local_batch), jax.tree.leaves(global_batch), strict=True
    ):
        _sums[id(x)] = [_checksum(shard) for shard in np.split(np.asarray(local_examples), count)]
        weakref.finalize(x, _sums.pop, id(x), None).atexit = False


def _checksum(examples: np.ndarray) -> int:
    header = f"{examples.dtype} {examples.shape}".encode()
    return zlib.crc32(
        np.ascontiguousarray(examples).reshape(-1).view(np.uint8).data, zlib.crc32(header)
    )


def check_same_examples(mesh: Mesh, batch: Any) -> None:
    """Refuse, in all processes that share examples of a batch, examples that differ between them.

    A batch is compared where a step takes it: steps come in the same order in all processes. Arrays
    that were put on their devices by other means are not checked.
    """
    known_sums = [sums for x in jax.tree.leaves(batch) if (sums := _sums.pop(id(x), None))]
    if not known_sums:
        return
    own_sums = [list(sums) for sums in zip(*known_sums, strict=True)]
    sums_by_process = gather_values(_sharing_processes(mesh, jax.process_index()), own_sums)
    first: dict[int, tuple[int, Any]] = {}
    for process, process_sums in sums_by_process.items():
        for shard, sums in zip(batch_shards_of(mesh)[process], process_sums, strict=True):
            other, first_sums = first.setdefault(shard, (process, sums))
            if sums != first_sums:
                raise ValueError(_mismatch_message(mesh, process, other))


def _mismatch_message(mesh: Mesh, process: int, other: int) -> str:
    axes = " and ".join(in_use(mesh, [axis for axis in AXES if axis not in BATCH_AXES]))
    return (
        f"process {process} gave other examples of the batch than process {other}: on mesh "
        f"{describe_mesh(mesh)} devices along {axes} compute with the same examples, and belong to "
        "both. Give the same in each: those of hfjax.process_batch_slice(layout, "
        "global_batch_size), drawn in the same order."
    )
