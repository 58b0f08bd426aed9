"""A state goes out as a model's folder: rows in the files' own order, each process its own.

The folder is written under a name of its own and renamed when it is whole, so that one that was cut
off at any point does not load, and two that are written at the same time do not mix.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from hfjax.distributed.consensus import agreed, in_all
from hfjax.optimizers.transforms import in_full
from hfjax.parallel.offload.host_memory import to_device
from hfjax.parallel.param_specs import entries_of
from hfjax.sharding.layout import Layout, State
from hfjax.sharding.reorder_layers import parameters_of
from hfjax.utils.atomic import atomic_directory, check_alone
from hfjax.utils.paths import Flat, flatten, nest
from hfjax.utils.read_files import what_is
from hfjax.utils.tables import human, named
from hfjax.utils.write_files import opened
from hfjax.weights.file_rows import RowsOfFiles
from hfjax.weights.load import (
    AT_ONCE,
    Group,
    RowMover,
    by_path,
    groups_of,
    mover,
    of_program,
    own_index,
)
from hfjax.weights.model_folder import CONFIG, INDEX, WHOLE, ModelFolder, companions
from hfjax.weights.redistribute_rows import Way
from hfjax.weights.tensor_files import FileTensor, header_of, placed
from hfjax.weights.tensor_rules import PlacedTensor, Rule, Shape

Kinds = dict[str, tuple[np.dtype, Shape]]  # of a file: what it holds, in order
BITS = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def write_out(
    target: Path,
    layout: Layout,
    state: State,
    folder: ModelFolder,
    pieces: Sequence[PlacedTensor],
    dtype: np.dtype | None,
    shard: int,
) -> int:
    """Write the parameters of a state as a model's folder; return the bytes written here."""
    kinds = kinds_of(pieces, folder, dtype)
    files = dict(in_files(kinds, shard))
    agreed(lambda: len(companions(folder.path)))  # what is wrong with them is said now
    with ExitStack() as at_end:
        new = target.parent / agreed(lambda: _begin(target, files, at_end))
        written = in_all(lambda: _written(new, layout, state, pieces, files))
        agreed(lambda: _finish(target, new, files, folder, dtype, at_end))
    return written


def kinds_of(pieces: Sequence[PlacedTensor], folder: ModelFolder, dtype: np.dtype | None) -> Kinds:
    """Return what is written: names, types and shapes, in the order of the model's own files."""
    shapes = {t.name: p.rule.shape for p in pieces for t in (p.tensor, p.twin) if t is not None}
    ours = [tensor for tensor in folder.tensors.values() if tensor.name in shapes]
    return {t.name: (dtype or t.dtype, t.shape) for t in ours}


def in_files(kinds: Kinds, most: int) -> Iterator[tuple[str, Kinds]]:
    """Yield the files, of at most so many bytes unless one tensor has more."""
    shards: list[Kinds] = [{}]
    size = 0
    for name, (dtype, shape) in kinds.items():
        bytes_ = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if shards[-1] and size + bytes_ > most:
            shards, size = [*shards, {}], 0
        shards[-1][name] = dtype, shape
        size += bytes_
    for number, held in enumerate(shards, 1):
        yield (WHOLE if len(shards) == 1 else name_of(number, len(shards))), held


def name_of(number: int, count: int) -> str:
    """Return what transformers calls a file of several.

    >>> name_of(1, 4)
    'model-00001-of-00004.safetensors'
    """
    return f"model-{number:05}-of-{count:05}.safetensors"


def check_free_to_write(target: Path) -> None:
    """Refuse a folder that is there, or that another process is writing."""
    if not target.name:
        raise ValueError(f"{named(target)} is there already: the name of a new folder is expected.")
    if os.path.lexists(target):
        raise ValueError(
            f"{named(target)} is {what_is(target)} already: nothing is written over it. Give "
            "another --out, or remove it."
        )
    check_alone(target)


def _begin(target: Path, files: Mapping[str, Kinds], at_end: ExitStack) -> str:
    """Return where the folder is until it is whole, in which files have their whole size.

    A disk without room says so now. The folder is nobody else's, and gone at the end if it was not
    moved.
    """
    check_free_to_write(target)
    try:
        new = at_end.enter_context(atomic_directory(target))
        for name, kinds in files.items():
            header, size = header_of(kinds)
            descriptor = opened(new / name, os.O_WRONLY)
            try:
                os.posix_fallocate(descriptor, 0, size)
                os.pwrite(descriptor, header, 0)
            finally:
                os.close(descriptor)
    except OSError as wrong:
        total = sum(header_of(kinds)[1] for kinds in files.values())
        raise ValueError(
            f"{named(target)} cannot be written ({wrong.strerror}): it needs {human(total)}."
        ) from None
    return str(new.relative_to(target.parent))


def _written(
    new: Path,
    layout: Layout,
    state: State,
    pieces: Sequence[PlacedTensor],
    files: Mapping[str, Kinds],
) -> int:
    """Write the rows that are here; return how many bytes they have."""
    places = {t.name: t for name, kinds in files.items() for t in placed(new / name, kinds)}
    params, rows = in_full_precision(layout, state), RowsOfFiles(layout.mesh, writes=True)
    told: list[tuple[Group, Any]] = []
    last: tuple[Group, Taken] | None = None
    where = {
        path: NamedSharding(layout.mesh, P(*of.parameter))
        for path, of in layout.as_the_model.placed.items()
    }
    try:
        for path, of_path in by_path(pieces).items():
            array = _on_device(params[path], where[path])
            for group in groups_of(of_path, AT_ONCE * jax.process_count()):
                made = _taken(group, places, array, where[path])
                told.append((group, made.finite))
                if last is not None:  # written while the devices make the next
                    _write(rows, places, *last)
                last = group, made
        if last is not None:
            _write(rows, places, *last)
    finally:
        rows.close()
    written = rows.ended()
    _check_finite(told)
    return written


def in_full_precision(layout: Layout, state: State) -> Flat:
    """Return parameters by path; of those that are master weights, rounded, these themselves.

    A state with averages in place of parameters keeps its averages.
    """
    params = parameters_of(layout, state)
    kept = in_full(flatten(state.params), state.optimizer)
    if layout.storage.packed or kept.keys() != flatten(state.params).keys():
        return params
    full = parameters_of(layout, replace(state, params=nest(kept)))
    rounded = jax.jit(lambda x, full: jnp.all(to_device(full).astype(x.dtype) == to_device(x)))
    same = lambda path, x: full[path].dtype == x.dtype or not rounded(x, full[path])
    return {path: x if same(path, x) else full[path] for path, x in params.items()}


def _check_finite(told: Sequence[tuple[Group, Any]]) -> None:
    """Refuse numbers that nothing can be read from again."""
    for group, flags in told:
        for slot, fine in zip(group.slots, np.asarray(flags), strict=True):
            for piece, ok in zip(slot, fine.reshape(-1), strict=True):
                if not ok:
                    raise ValueError(
                        f"{piece.name} (our {piece.path}) would hold numbers that are not finite: "
                        "the state has them, or they are too large for the type of the files. Give "
                        'a wider one, dtype="float32", or an earlier state.'
                    )


def _on_device(x: Any, where: NamedSharding) -> jax.Array:
    """Return a parameter on the devices, split as the layout says."""
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(where, x.ndim):
        return x
    return jax.jit(to_device, out_shardings=where)(x)


def _write(
    rows: RowsOfFiles, places: Mapping[str, FileTensor], group: Group, taken: "Taken"
) -> None:
    """Write the rows of each slot, and again where the model's files have a tensor twice."""
    for slot, way, array in zip(group.slots, taken.ways, taken.rows, strict=True):
        for of in ([p.tensor for p in slot], [p.twin for p in slot]):
            if tensors := [places[t.name] for t in of if t is not None]:
                rows.write(tensors, array, way)


class Taken(NamedTuple):
    """The rows of a group's tensors, and the way that they came."""

    ways: Sequence[Way]
    rows: Sequence[jax.Array]
    finite: jax.Array  # of each slot


def _taken(
    group: Group, places: Mapping[str, FileTensor], array: jax.Array, where: NamedSharding
) -> Taken:
    """Return the rows of a group's tensors on the devices, in their types."""
    kinds = tuple(_type_on_device(places[t.name].dtype) for slot, t in _one_each(group))
    twins = (False,) * len(group.slots)
    dtype = np.dtype(array.dtype)
    way = mover(of_program(group.rules), twins, group.first, array.shape, dtype, where)
    rows, finite = _taker(way, kinds)(array, np.array(group.at, np.int32))
    return Taken(way.ways, rows, finite)


def _type_on_device(dtype: np.dtype) -> np.dtype:
    """Return the type that arrays of a type have on a device: none has float64 without x64."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _one_each(group: Group) -> Iterator[tuple[int, FileTensor]]:
    """Yield the first tensor of each slot: all of a slot have one type."""
    for number, slot in enumerate(group.slots):
        assert slot[0].tensor is not None
        yield number, slot[0].tensor


@cache
def _taker(mover: RowMover, kinds: tuple[np.dtype, ...]) -> jax.stages.Wrapped:
    """Return the program (stack, index) -> rows of each slot: a mover the other way round."""
    where, numbered, first = mover.where, mover.numbered, len(mover.first)

    def on_device(stack: jax.Array, index: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        block = mover.ways[0].whole(_block(where, stack, index) if numbered else stack)
        rows = [
            way.leave(_slot(block, way.rule, first, way.padded is not None).astype(kind))
            for way, kind in zip(mover.ways, kinds, strict=True)
        ]
        return rows, jnp.stack([mover.every(jnp.isfinite(x), first) for x in rows])

    specs: Any = {"in_specs": (where.spec, P()), "out_specs": ([w.spec for w in mover.ways], P())}
    return jax.jit(jax.shard_map(on_device, mesh=where.mesh, check_vma=False, **specs))


def _slot(block: jax.Array, rule: Rule, first: int, alone: bool) -> jax.Array:
    """Return what of a block is one tensor; of one alone with what pads it."""
    if rule.along is None or alone:
        return block
    count = rule.block[rule.along]
    return lax.slice_in_dim(block, rule.start, rule.start + count, axis=first + rule.along)


def _block(where: NamedSharding, stack: jax.Array, index: jax.Array) -> jax.Array:
    """Return the block at an index of the first dimensions, which may be split; bit for bit."""
    numbered = len(index)
    at, here = own_index(where, stack.shape[:numbered], index)
    size = (*[1] * numbered, *stack.shape[numbered:])
    block = lax.dynamic_slice(stack, [*at, *[0] * (stack.ndim - numbered)], size)
    block = block.reshape(stack.shape[numbered:])
    if here is None:
        return block
    axes = [a for of in entries_of(where.spec, stack.ndim)[:numbered] for a in of]
    bits = lax.bitcast_convert_type(block, BITS[block.dtype.itemsize])  # a sum keeps no -0
    bits = lax.psum(jnp.where(here, bits, jnp.zeros_like(bits)), axes)
    return lax.bitcast_convert_type(bits, block.dtype)


def _finish(
    target: Path,
    new: Path,
    files: Mapping[str, Kinds],
    folder: ModelFolder,
    dtype: np.dtype | None,
    at_end: ExitStack,
) -> None:
    """Write what goes along, the index and the configuration; then move the folder to its place."""
    try:
        for path in companions(folder.path):  # of a hub's cache they are links
            shutil.copyfile(path, new / path.name)
        if len(files) > 1:
            _json(new / INDEX, _index(files))
        _json(new / CONFIG, _config(folder.config, dtype))
        at_end.close()
    except OSError as wrong:
        if os.path.lexists(target):
            raise ValueError(
                f"{named(target)} was written by another process meanwhile: it stays as it is. "
                "Give another --out."
            ) from None
        raise ValueError(f"{named(target)} cannot be written: {wrong.strerror}.") from None


def _index(files: Mapping[str, Kinds]) -> dict[str, Any]:
    sizes = [np.prod(s, dtype=np.int64) * d.itemsize for k in files.values() for d, s in k.values()]
    where = {name: file for file, kinds in files.items() for name in kinds}
    return {"metadata": {"total_size": int(sum(sizes))}, "weight_map": where}


def _config(config: Mapping[str, Any], dtype: np.dtype | None) -> dict[str, Any]:
    """Return the configuration, with the type that the tensors have now."""
    if dtype is None:
        return dict(config)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, key: dtype.name}


def _json(path: Path, value: Any) -> None:
    with path.open("x") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
