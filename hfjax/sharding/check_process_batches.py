"""Which rows of a batch each process gives; those that have to give the same ones do.

Devices along pipe, context, row and tensor compute with the same rows, and may belong to several
processes. Each of these gives all those rows. Checksums of them are compared once a batch.
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

from hfjax.distributed.exchange import exchanged
from hfjax.parallel.mesh import AXES, BATCH_AXES, describe_mesh, in_use, size_of

Sums = list[int]  # one for each part of the rows
_sums: dict[int, Sums] = {}  # of arrays that lie on devices, by their id


@lru_cache(maxsize=32)
def parts_of(mesh: Mesh) -> dict[int, list[int]]:
    """Return {process: which parts of the rows of a batch its devices compute with}."""
    first = [AXES.index(axis) for axis in BATCH_AXES]
    rest = [i for i in range(len(AXES)) if i not in first]
    by_rows = mesh.devices.transpose(*first, *rest).reshape(size_of(BATCH_AXES, mesh), -1)
    found = defaultdict(list)
    for part, devices in enumerate(by_rows):
        for process in sorted({device.process_index for device in devices}):
            found[process].append(part)
    return dict(found)


def shares(mesh: Mesh) -> Fraction:
    """Return how many times the rows of this process the whole batch has."""
    if jax.process_count() == 1:
        return Fraction(1)
    return Fraction(size_of(BATCH_AXES, mesh), len(parts_of(mesh)[jax.process_index()]))


@lru_cache(maxsize=32)
def _group(mesh: Mesh, process: int) -> tuple[int, ...]:
    """Return the processes that share rows with a process, or with one that does."""
    parts, found = {p: {*own} for p, own in parts_of(mesh).items()}, {process}
    while True:
        theirs = set().union(*(parts[p] for p in found))
        more = {p for p, own in parts.items() if own & theirs}
        if more == found:
            return tuple(sorted(found))
        found = more


def note(mesh: Mesh, given: Any, placed: Any) -> None:
    """Remember checksums of the rows that were given for an array, if others give them too."""
    if len(_group(mesh, jax.process_index())) == 1:
        return
    count = len(parts_of(mesh)[jax.process_index()])
    for rows, x in zip(jax.tree.leaves(given), jax.tree.leaves(placed), strict=True):
        _sums[id(x)] = [_sum(part) for part in np.split(np.asarray(rows), count)]
        weakref.finalize(x, _sums.pop, id(x), None).atexit = False


def _sum(rows: np.ndarray) -> int:
    kind = f"{rows.dtype} {rows.shape}".encode()
    return zlib.crc32(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data, zlib.crc32(kind))


def check_same_rows(mesh: Mesh, batch: Any) -> None:
    """Refuse, in all processes that share rows of a batch, rows that differ between them.

    A batch is compared where a step takes it: steps come in the same order in all processes. Arrays
    that were put on their devices by other means are not looked at.
    """
    known = [sums for x in jax.tree.leaves(batch) if (sums := _sums.pop(id(x), None))]
    if not known:
        return
    mine = [list(sums) for sums in zip(*known, strict=True)]
    found = exchanged(_group(mesh, jax.process_index()), mine)
    first: dict[int, tuple[int, Any]] = {}
    for process, told in found.items():
        for part, sums in zip(parts_of(mesh)[process], told, strict=True):
            other, wanted = first.setdefault(part, (process, sums))
            if sums != wanted:
                raise ValueError(_unlike(mesh, process, other))


def _unlike(mesh: Mesh, process: int, other: int) -> str:
    along = " and ".join(in_use(mesh, [axis for axis in AXES if axis not in BATCH_AXES]))
    return (
        f"process {process} gave other rows of the batch than process {other}: on mesh "
        f"{describe_mesh(mesh)} devices along {along} compute with the same rows, and belong to "
        "both. Give the same in each: those of hfjax.rows_of_process(layout, rows), drawn in the "
        "same order."
    )
