"""Batches: split over devices and processes, checked before anything is traced."""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.base.paths import Tree
from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import (
    AXES,
    BATCH_AXES,
    PIPE_AXIS,
    ROW_AXIS,
    SAMPLE_AXES,
    TENSOR_AXES,
    batch_axes,
    describe_mesh,
    in_use,
    on_grid,
    size_of,
)
from hfjax.parallel.placement import batch_devices, row_shares
from hfjax.plan.check_state import check_not_taken
from hfjax.plan.layout import Layout


def microbatches_of(execution: Execution) -> int:
    """Return into how many microbatches a step splits the rows of each device."""
    schedule = execution.schedule
    return execution.accumulate * (1 if schedule is None else schedule.microbatches)


def shard_batch(layout: Layout, batch: Any, microbatches: int = 1) -> Any:
    """Return a batch on its devices, rows split over data and fsdp.

    A step does this by itself; do it ahead to overlap the copy with the step before.

    Args:
        layout: The layout of the step that takes the batch.
        batch: Pytree of arrays with the same number of rows. With several processes each gives its
            own rows (`rows_of_process`); processes that hold other stages, or other positions, of
            the same rows give the same rows, whole.
        microbatches: Into how many the step splits the rows: rows have to divide by devices times
            microbatches.

    Raises:
        ValueError: It is no pytree of arrays, or its rows do not divide.

    Example:
        >>> import hfjax, jax.numpy as jnp, numpy as np, optax
        >>> model = lambda rngs: {"w": jnp.zeros((64, 8))}
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> batch = hfjax.shard_batch(layout, {"x": np.ones((16, 64))})
        >>> batch["x"].addressable_shards[0].data.shape
        (2, 64)
    """
    check_batch(layout, batch, microbatches, _shares(layout))
    if jax.process_count() == 1:
        return jax.device_put(batch, batch_sharding(layout.mesh))
    _check_processes(layout)
    put = jax.make_array_from_process_local_data
    return jax.tree.map(lambda x: put(batch_sharding(layout.mesh), np.asarray(x)), batch)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return where an array of a batch lies: rows are split, and each row is whole."""
    return NamedSharding(mesh, P(batch_axes(mesh)))


def rows_of_process(layout: Layout, rows: int) -> np.ndarray:
    """Return which rows of a global batch this process gives to `shard_batch`, in order.

    Args:
        layout: The layout of the step that takes the batch.
        rows: The number of rows of the global batch.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax
        >>> model = lambda rngs: {"w": jnp.zeros((64, 8))}
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> hfjax.rows_of_process(layout, 8).tolist()  # of one process: all
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    check_batch(layout, jax.ShapeDtypeStruct((rows,), "int32"), 1)
    split = NamedSharding(layout.mesh, P(batch_axes(layout.mesh))).addressable_devices_indices_map(
        (rows,)
    )
    numbers = np.arange(rows)
    return np.unique(np.concatenate([numbers[index] for index in split.values() if index]))


def _shares(layout: Layout) -> int:
    """Return into how many parts the processes split the rows of a batch."""
    me, groups = jax.process_index(), _by(layout.mesh, BATCH_AXES)
    mine = [any(device.process_index == me for device in group) for group in groups]
    return len(mine) // max(sum(mine), 1)


def _by(mesh: Mesh, axes: Sequence[str]) -> np.ndarray:
    """Return the devices [places along these axes, all others]."""
    first = [AXES.index(axis) for axis in axes]
    rest = [i for i in range(len(AXES)) if i not in first]
    return mesh.devices.transpose(*first, *rest).reshape(size_of(axes, mesh), -1)


def check_batch(layout: Layout, batch: Any, microbatches: int, shares: int = 1) -> None:
    """Refuse a batch that is none, or whose rows do not split into microbatches and devices."""
    leaves = jax.tree.leaves(batch)
    if not all(hasattr(x, "shape") for x in leaves):
        raise ValueError(
            "a batch is a pytree of arrays; found "
            f"{_kinds(x for x in leaves if not hasattr(x, 'shape'))} in it. Convert lists first: "
            "np.asarray(…)."
        )
    sizes = [x.shape[0] if x.shape else 0 for x in leaves]
    if not sizes or len(set(sizes)) > 1 or not sizes[0]:
        raise ValueError(
            f"a batch is a pytree of arrays with the same number of rows, at least one; "
            f"found rows: {_rows_by_name(batch, sizes)}."
        )
    _check_rows_of_state(layout, sizes[0] * shares)
    devices, mesh = batch_devices(layout.mesh), layout.mesh
    rows, unit = sizes[0] * shares, microbatches * row_shares(mesh)
    if rows % unit:
        several = microbatches > 1
        below, above = rows // unit * unit, (rows // unit + 1) * unit
        raise ValueError(
            f"batch of {rows} rows does not divide by "
            f"{f'{microbatches} microbatches x ' if several else ''}{devices} devices"
            f"{f' x {ROW_AXIS}={mesh.shape[ROW_AXIS]}' if on_grid(mesh) else ''} "
            f"({describe_mesh(mesh)}). Use {f'{below} or ' if below else ''}{above} rows"
            f"{', or change the number of microbatches (accumulate, schedule)' if several else ''}."
            f"{_sides_that_do(rows // (microbatches * devices), mesh) if on_grid(mesh) else ''}"
        )


def _sides_that_do(rows: int, mesh: Mesh) -> str:
    """Return which sides would split so many rows of a device and microbatch."""
    fits = [n for n in range(mesh.shape[ROW_AXIS], 1, -1) if rows % n == 0 < rows]
    would = f"{ROW_AXIS} of {fits}" if fits else "no other size of it"
    return f" On a grid attention splits rows over {ROW_AXIS}: {would} would do."


def _rows_by_name(batch: Any, sizes: Sequence[int]) -> str:
    """Return the name of each array of a batch and its number of rows."""
    paths = [keys for keys, _ in jax.tree_util.tree_flatten_with_path(batch)[0]]
    names = [jax.tree_util.keystr(keys, simple=True, separator="/") for keys in paths]
    pairs = zip(names, sizes, strict=True)
    return ", ".join(f"{name} {size}".strip() for name, size in pairs) or "none"


def _kinds(leaves: Iterable[Any]) -> str:
    kinds = sorted({type(leaf).__name__ for leaf in leaves})
    return "Python numbers" if set(kinds) <= {"int", "float", "bool"} else ", ".join(kinds)


def _check_rows_of_state(layout: Layout, rows: int) -> None:
    """Refuse a batch with other rows than the variables that have a row for each of them."""
    for path, template in layout.blueprint.variables.items():
        if layout.blueprint.of_rows(path) and template.shape[0] != rows:
            raise ValueError(
                f"{path} {tuple(template.shape)} has a row for each row of the batch, and this one "
                f"has {rows}. Give {template.shape[0]} rows, or make the model for {rows}."
            )


def _check_processes(layout: Layout) -> None:
    groups = _by(layout.mesh, (PIPE_AXIS, *SAMPLE_AXES))
    if any(len({device.process_index for device in group}) > 1 for group in groups):
        within = " and ".join(in_use(layout.mesh, (ROW_AXIS, *TENSOR_AXES)))
        raise ValueError(
            f"{describe_mesh(layout.mesh)}: the devices that share rows of the batch belong to "
            f"several processes. Keep {within} within the devices of one process."
        )


def is_placed(mesh: Mesh, batch: Any) -> bool:
    """Return whether a batch already lies where it is wanted."""
    placed = lambda x: x.sharding.is_equivalent_to(batch_sharding(mesh), x.ndim)
    return all(isinstance(x, jax.Array) and placed(x) for x in jax.tree.leaves(batch))


def full(params: Tree) -> Any:
    """Return the whole arrays in host memory, leaf by leaf (summon_full_params).

    Random keys come back as jax arrays, everything else as NumPy arrays. With several processes
    all of them call it, and each gets the whole.

    Args:
        params: Pytree of `jax.Array`: a state, its parameters, or a part of them.

    Example:
        >>> import hfjax, optax
        >>> from flax import nnx
        >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), hfjax.FSDP)
        >>> kernel = hfjax.full(hfjax.init(layout).params)["kernel"]
        >>> type(kernel).__name__, kernel.shape
        ('ndarray', (8, 4))
    """
    check_not_taken(params)
    return jax.tree.map(_whole, params)


def _whole(x: jax.Array) -> Any:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # NumPy has no such type
        data = _whole(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if x.is_fully_addressable:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
