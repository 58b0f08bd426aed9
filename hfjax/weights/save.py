"""Write a state as a model folder: each process writes its own rows, in the files' order.

The folder is written under a unique name and renamed once complete, so that an interrupted one does
not load, and concurrent writes do not mix.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from hfjax.distributed.consensus import run_on_all, run_on_first
from hfjax.optimizers.transforms import masters_or_params
from hfjax.parallel.offload.host_memory import to_device
from hfjax.parallel.param_specs import entries_of
from hfjax.sharding.layout import Layout, State
from hfjax.sharding.reorder_layers import params_in_model_order
from hfjax.utils.atomic import atomic_directory, check_no_writer
from hfjax.utils.paths import Flat, flatten, nest
from hfjax.utils.read_files import path_kind
from hfjax.utils.tables import human, quote
from hfjax.utils.write_files import open_ordinary
from hfjax.weights.file_rows import FileRows
from hfjax.weights.load import (
    GROUP_BYTES,
    RowMover,
    TensorGroup,
    group_by_path,
    group_mappings,
    local_index,
    row_mover,
    strip_names,
)
from hfjax.weights.model_folder import CONFIG, INDEX, SINGLE_FILE, ModelFolder, companion_files
from hfjax.weights.redistribute_rows import RowPlan
from hfjax.weights.tensor_files import FileTensor, header_of, plan_file
from hfjax.weights.tensor_rules import Rule, Shape, TensorMapping

TensorSpecs = dict[str, tuple[np.dtype, Shape]]  # the tensors of a file, in order
BITS = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}


def write_folder(
    target: Path,
    layout: Layout,
    state: State,
    folder: ModelFolder,
    mappings: Sequence[TensorMapping],
    dtype: np.dtype | None,
    max_shard_bytes: int,
) -> int:
    """Write the parameters of a state as a model folder; return the bytes this process wrote.

    Adapters are merged into the parameters that they change.
    """
    specs = tensor_specs(mappings, folder, dtype)
    files = dict(split_into_files(specs, max_shard_bytes))
    run_on_first(lambda: len(companion_files(folder.path)))  # report their problems now
    merge = layout.template.merge_adapters
    get_params = lambda: merge(layout, full_precision_params(layout, state))
    write_others = lambda new: _write_companions(new, files, folder, dtype)
    return write_files(target, layout, get_params, mappings, files, write_others)


def write_files(
    target: Path,
    layout: Layout,
    get_params: Callable[[], Mapping[str, Any]],
    mappings: Sequence[TensorMapping],
    files: Mapping[str, TensorSpecs],
    write_others: Callable[[Path], None],
) -> int:
    """Write a new folder with files of tensors; return the bytes this process wrote.

    Args:
        target: The folder, which appears once it is complete.
        layout: The layout of the parameters.
        get_params: Returns the parameters by path, in the model's order.
        mappings: The mappings of the tensors, whose names are those of the files.
        files: The tensors of each file.
        write_others: Writes the other files of the folder, whose path it gets, on one process.
    """
    with ExitStack() as exit_stack:
        new = target.parent / run_on_first(lambda: _create_folder(target, files, exit_stack))
        num_bytes = run_on_all(lambda: _write_tensors(new, layout, get_params(), mappings, files))
        run_on_first(lambda: _finish_folder(target, new, write_others, exit_stack))
    return num_bytes


def tensor_specs(
    mappings: Sequence[TensorMapping], folder: ModelFolder, dtype: np.dtype | None
) -> TensorSpecs:
    """Return the names, dtypes and shapes to write, in the order of the model's own files."""
    shapes = {t.name: p.rule.shape for p in mappings for t in (p.tensor, p.twin) if t is not None}
    ours = [tensor for tensor in folder.tensors.values() if tensor.name in shapes]
    return {t.name: (dtype or t.dtype, t.shape) for t in ours}


def split_into_files(specs: TensorSpecs, max_bytes: int) -> Iterator[tuple[str, TensorSpecs]]:
    """Yield the files, of at most `max_bytes` unless one tensor has more."""
    shards: list[TensorSpecs] = [{}]
    size = 0
    for name, (dtype, shape) in specs.items():
        num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if shards[-1] and size + num_bytes > max_bytes:
            shards, size = [*shards, {}], 0
        shards[-1][name] = dtype, shape
        size += num_bytes
    for number, file_specs in enumerate(shards, 1):
        yield (SINGLE_FILE if len(shards) == 1 else shard_name(number, len(shards))), file_specs


def shard_name(number: int, count: int) -> str:
    """Return transformers' name of one file of several.

    >>> shard_name(1, 4)
    'model-00001-of-00004.safetensors'
    """
    return f"model-{number:05}-of-{count:05}.safetensors"


def check_free_to_write(target: Path) -> None:
    """Refuse a folder that exists, or that another process is writing."""
    if not target.name:
        raise ValueError(f"{quote(target)} is there already: the name of a new folder is expected.")
    if os.path.lexists(target):
        raise ValueError(
            f"{quote(target)} is {path_kind(target)} already: nothing is written over it. Give "
            "another --export-dir, or remove it."
        )
    check_no_writer(target)


def _create_folder(target: Path, files: Mapping[str, TensorSpecs], exit_stack: ExitStack) -> str:
    """Return the path of a temporary folder whose files have their final size.

    So a full disk is reported now. The folder has a unique name, and is removed at the end unless
    it was moved.
    """
    check_free_to_write(target)
    try:
        new = exit_stack.enter_context(atomic_directory(target))
        for name, specs in files.items():
            header, size = header_of(specs)
            descriptor = open_ordinary(new / name, os.O_WRONLY)
            try:
                os.posix_fallocate(descriptor, 0, size)
                os.pwrite(descriptor, header, 0)
            finally:
                os.close(descriptor)
    except OSError as error:
        num_bytes = sum(header_of(specs)[1] for specs in files.values())
        raise ValueError(
            f"{quote(target)} cannot be written ({error.strerror}): it needs {human(num_bytes)}."
        ) from None
    return str(new.relative_to(target.parent))


def _write_tensors(
    new: Path,
    layout: Layout,
    params: Mapping[str, Any],
    mappings: Sequence[TensorMapping],
    files: Mapping[str, TensorSpecs],
) -> int:
    """Write the local rows; return their number of bytes."""
    file_tensors = {
        t.name: t for name, specs in files.items() for t in plan_file(new / name, specs)
    }
    file_rows = FileRows(layout.mesh, writable=True)
    finite_flags: list[tuple[TensorGroup, Any]] = []
    last: tuple[TensorGroup, GroupRows] | None = None
    shardings = {
        path: NamedSharding(layout.mesh, P(*param.parameter))
        for path, param in layout.model_layout.param_specs.items()
    }
    try:
        for path, path_mappings in group_by_path(mappings).items():
            array = _to_devices(params[path], shardings[path])
            for group in group_mappings(path_mappings, GROUP_BYTES * jax.process_count()):
                group_rows = _extract_rows(group, file_tensors, array, shardings[path])
                finite_flags.append((group, group_rows.finite))
                if last is not None:  # write while the devices compute the next
                    _write_group(file_rows, file_tensors, *last)
                last = group, group_rows
        if last is not None:
            _write_group(file_rows, file_tensors, *last)
    finally:
        file_rows.close()
    num_bytes = file_rows.finish()
    _check_finite(finite_flags)
    return num_bytes


def full_precision_params(layout: Layout, state: State) -> Flat:
    """Return parameters by path; the master weights instead, where parameters are these, rounded.

    A state with averages in place of parameters keeps the averages.
    """
    params = params_in_model_order(layout, state)
    masters = masters_or_params(flatten(state.params), state.optimizer)
    if layout.storage.packed or masters.keys() != flatten(state.params).keys():
        return params
    full = params_in_model_order(layout, replace(state, params=nest(masters)))
    rounded = jax.jit(lambda x, full: jnp.all(to_device(full).astype(x.dtype) == to_device(x)))
    same = lambda path, x: full[path].dtype == x.dtype or not rounded(x, full[path])
    return {path: x if same(path, x) else full[path] for path, x in params.items()}


def _check_finite(finite_flags: Sequence[tuple[TensorGroup, Any]]) -> None:
    """Refuse numbers that are not finite."""
    for group, flags in finite_flags:
        for slot, slot_finite in zip(group.slots, np.asarray(flags), strict=True):
            for mapping, ok in zip(slot, slot_finite.reshape(-1), strict=True):
                if not ok:
                    raise ValueError(
                        f"{mapping.name} (our {mapping.path}) would hold numbers that are not "
                        "finite: the state has them, or they are too large for the type of the "
                        'files. Give a wider one, dtype="float32", or an earlier state.'
                    )


def _to_devices(x: Any, sharding: NamedSharding) -> jax.Array:
    """Return a parameter in device memory, sharded as the layout says."""
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    return jax.jit(to_device, out_shardings=sharding)(x)


def _write_group(
    file_rows: FileRows,
    file_tensors: Mapping[str, FileTensor],
    group: TensorGroup,
    group_rows: "GroupRows",
) -> None:
    """Write the rows of each slot, twice where the model's files have a tensor twice."""
    for slot, plan, array in zip(group.slots, group_rows.plans, group_rows.rows, strict=True):
        for candidates in ([p.tensor for p in slot], [p.twin for p in slot]):
            if tensors := [file_tensors[t.name] for t in candidates if t is not None]:
                file_rows.write(tensors, array, plan)


class GroupRows(NamedTuple):
    """The rows of a group's tensors, with their plans."""

    plans: Sequence[RowPlan]
    rows: Sequence[jax.Array]
    finite: jax.Array  # per slot


def _extract_rows(
    group: TensorGroup,
    file_tensors: Mapping[str, FileTensor],
    array: jax.Array,
    sharding: NamedSharding,
) -> GroupRows:
    """Return the rows of a group's tensors on the devices, in the files' dtypes."""
    dtypes = tuple(_device_dtype(file_tensors[t.name].dtype) for slot, t in _first_tensors(group))
    twins = (False,) * len(group.slots)
    dtype = np.dtype(array.dtype)
    mover = row_mover(
        strip_names(group.rules), twins, group.stack_shape, array.shape, dtype, sharding
    )
    rows, finite = _extract_program(mover, dtypes)(array, np.array(group.stack_index, np.int32))
    return GroupRows(mover.plans, rows, finite)


def _device_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype that arrays have on a device: float64 needs x64 mode."""
    return np.dtype(jax.dtypes.canonicalize_dtype(dtype))


def _first_tensors(group: TensorGroup) -> Iterator[tuple[int, FileTensor]]:
    """Yield the first tensor of each slot: all of a slot have one dtype."""
    for number, slot in enumerate(group.slots):
        assert slot[0].tensor is not None
        yield number, slot[0].tensor


@cache
def _extract_program(mover: RowMover, dtypes: tuple[np.dtype, ...]) -> jax.stages.Wrapped:
    """Return the program (stack, index) -> rows of each slot: the inverse of a mover's."""
    sharding, index_ndim, stack_ndim = mover.sharding, mover.index_ndim, len(mover.stack_shape)

    def extract_local(stack: jax.Array, index: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        block = mover.plans[0].all_gather(
            _slice_block(sharding, stack, index) if index_ndim else stack
        )
        rows = [
            plan.block_to_rows(
                _slice_slot(block, plan.rule, stack_ndim, plan.padded_size is not None).astype(
                    dtype
                )
            )
            for plan, dtype in zip(mover.plans, dtypes, strict=True)
        ]
        return rows, jnp.stack([mover.reduce_all(jnp.isfinite(x), stack_ndim) for x in rows])

    specs: Any = {
        "in_specs": (sharding.spec, P()),
        "out_specs": ([w.spec for w in mover.plans], P()),
    }
    return jax.jit(jax.shard_map(extract_local, mesh=sharding.mesh, check_vma=False, **specs))


def _slice_slot(
    block: jax.Array, rule: Rule, stack_ndim: int, is_alone_in_block: bool
) -> jax.Array:
    """Return one tensor's slice of a block; a tensor alone in its block keeps its padding."""
    if rule.concat_dim is None or is_alone_in_block:
        return block
    count = rule.block[rule.concat_dim]
    return lax.slice_in_dim(
        block, rule.start, rule.start + count, axis=stack_ndim + rule.concat_dim
    )


def _slice_block(sharding: NamedSharding, stack: jax.Array, index: jax.Array) -> jax.Array:
    """Return the block at an index of the first dimensions, which may be sharded; bit-exact."""
    index_ndim = len(index)
    start_index, is_local = local_index(sharding, stack.shape[:index_ndim], index)
    size = (*[1] * index_ndim, *stack.shape[index_ndim:])
    block = lax.dynamic_slice(stack, [*start_index, *[0] * (stack.ndim - index_ndim)], size)
    block = block.reshape(stack.shape[index_ndim:])
    if is_local is None:
        return block
    axes = [
        a for axes_of_dim in entries_of(sharding.spec, stack.ndim)[:index_ndim] for a in axes_of_dim
    ]
    bits = lax.bitcast_convert_type(block, BITS[block.dtype.itemsize])  # a float sum would lose -0
    bits = lax.psum(jnp.where(is_local, bits, jnp.zeros_like(bits)), axes)
    return lax.bitcast_convert_type(bits, block.dtype)


def _finish_folder(
    target: Path, new: Path, write_others: Callable[[Path], None], exit_stack: ExitStack
) -> None:
    """Write the folder's other files; then move it to its final path."""
    try:
        write_others(new)
        exit_stack.close()
    except OSError as error:
        if os.path.lexists(target):
            raise ValueError(
                f"{quote(target)} was written by another process meanwhile: it stays as it is. "
                "Give another --export-dir."
            ) from None
        raise ValueError(f"{quote(target)} cannot be written: {error.strerror}.") from None


def _write_companions(
    new: Path, files: Mapping[str, TensorSpecs], folder: ModelFolder, dtype: np.dtype | None
) -> None:
    """Write companion files, index and configuration."""
    for path in companion_files(folder.path):  # links in a hub's cache
        shutil.copyfile(path, new / path.name)
    if len(files) > 1:
        write_json(new / INDEX, _index_json(files))
    write_json(new / CONFIG, _config_json(folder.config, dtype))


def _index_json(files: Mapping[str, TensorSpecs]) -> dict[str, Any]:
    sizes = [np.prod(s, dtype=np.int64) * d.itemsize for k in files.values() for d, s in k.values()]
    weight_map = {name: file for file, specs in files.items() for name in specs}
    return {"metadata": {"total_size": int(sum(sizes))}, "weight_map": weight_map}


def _config_json(config: Mapping[str, Any], dtype: np.dtype | None) -> dict[str, Any]:
    """Return the configuration, with the dtype of the written tensors."""
    if dtype is None:
        return dict(config)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    return {**config, key: dtype.name}


def write_json(path: Path, value: Any) -> None:
    """Write a new file of JSON."""
    with path.open("x") as file:
        json.dump(value, file, indent=2)
        file.write("\n")
