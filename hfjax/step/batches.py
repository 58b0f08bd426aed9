"""Batches: sharded over devices and processes, checked before anything is traced."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from hfjax.parallel.execution import Execution
from hfjax.parallel.mesh import ROW_AXIS, describe_mesh, grid_axes
from hfjax.parallel.param_specs import batch_devices, batch_spec, num_batch_shards
from hfjax.sharding.check_process_batches import (
    batch_factor,
    check_same_examples,
    remember_checksums,
)
from hfjax.sharding.check_state import check_layout, check_not_donated
from hfjax.sharding.layout import Layout
from hfjax.utils.keywords import is_int
from hfjax.utils.paths import Tree, is_random_key


def num_microbatches(execution: Execution) -> int:
    """Return the number of microbatches into which a step splits the examples of each device."""
    schedule = execution.schedule
    return execution.gradient_accumulation_steps * (
        1 if schedule is None else schedule.microbatches
    )


def shard_batch(layout: Layout, batch: Any, microbatches: int = 1) -> Any:
    """Return a batch on its devices, its examples sharded over data and fsdp.

    A step does this by itself; do it ahead to overlap the copy with the step before.

    Args:
        layout: The layout of the step that takes the batch.
        batch: Pytree of arrays with the same number of examples. With several processes each
            passes its own (`process_batch_slice`). Processes whose devices compute with the
            same examples (along pipe, context, row and tensor) pass the same ones; a step refuses
            those that differ.
        microbatches: Number of microbatches of the step: the number of examples has to be
            divisible by devices times microbatches.

    Raises:
        ValueError: It is no pytree of arrays, or its number of examples is not divisible.

    Example:
        >>> import hfjax, jax.numpy as jnp, numpy as np, optax
        >>> model = lambda rngs: {"w": jnp.zeros((64, 8))}
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> batch = hfjax.shard_batch(layout, {"x": np.ones((16, 64))})
        >>> batch["x"].addressable_shards[0].data.shape
        (2, 64)
    """
    check_layout(layout)
    factor = batch_factor(layout.mesh)
    check_batch(layout, batch, microbatches, factor)
    if jax.process_count() == 1:
        return jax.device_put(batch, batch_sharding(layout.mesh))
    global_batch = jax.tree.map(lambda x: _put(layout.mesh, np.asarray(x), factor), batch)
    remember_checksums(layout.mesh, batch, global_batch)
    return global_batch


def _put(mesh: Mesh, local_examples: np.ndarray, factor: Fraction) -> jax.Array:
    """Return an array sharded over all processes, from the examples that this process passes."""
    shape = (int(len(local_examples) * factor), *local_examples.shape[1:])
    return jax.make_array_from_process_local_data(batch_sharding(mesh), local_examples, shape)


def place_batch(layout: Layout, batch: Any, microbatches: int = 1) -> Any:
    """Return a batch as a step takes it: sharded, and equal in processes that share examples."""
    if not jax.tree.leaves(batch) or not is_placed(layout.mesh, batch):
        batch = shard_batch(layout, batch, microbatches)
    check_same_examples(layout.mesh, batch)
    return batch


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Return the sharding of the arrays of a batch: whole examples, split over the batch axes."""
    return NamedSharding(mesh, batch_spec(mesh))


def process_batch_slice(layout: Layout, global_batch_size: int) -> np.ndarray:
    """Return which examples of a global batch this process passes to `shard_batch`, in order.

    Args:
        layout: The layout of the step that takes the batch.
        global_batch_size: The number of examples of the global batch.

    Example:
        >>> import hfjax, jax.numpy as jnp, optax
        >>> model = lambda rngs: {"w": jnp.zeros((64, 8))}
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(data=8), hfjax.DDP)
        >>> hfjax.process_batch_slice(layout, 8).tolist()  # of one process: all
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    if not is_int(global_batch_size, 1):
        raise ValueError(
            f"process_batch_slice: global_batch_size={global_batch_size!r}; a whole number, at "
            "least 1, is expected."
        )
    check_batch(layout, jax.ShapeDtypeStruct((global_batch_size,), "int32"), 1)
    split = batch_sharding(layout.mesh).addressable_devices_indices_map((global_batch_size,))
    numbers = np.arange(global_batch_size)
    return np.unique(np.concatenate([numbers[index] for index in split.values() if index]))


def check_batch(layout: Layout, batch: Any, microbatches: int, factor: Fraction | int = 1) -> None:
    """Refuse what is no batch, or does not divide into microbatches and devices.

    The global batch has `factor` times as many examples as this one.
    """
    check_layout(layout)
    if not is_int(microbatches, 1):
        raise ValueError(f"microbatches={microbatches!r}: a whole number, at least 1, is expected.")
    leaves = jax.tree.leaves(batch)
    if not all(hasattr(x, "shape") for x in leaves):
        names = _type_names(x for x in leaves if not hasattr(x, "shape"))
        raise ValueError(
            f"a batch is a pytree of arrays; found {names} in it. Convert lists first: "
            "np.asarray(…)."
        )
    if odd := _non_numeric_arrays(batch):
        raise ValueError(
            f"a batch is a pytree of arrays of numbers; {odd}. Turn text into tokens, and lists of "
            "examples of several lengths into one array, padded (with a mask)."
        )
    sizes = [x.shape[0] if x.shape else 0 for x in leaves]
    if not sizes or len(set(sizes)) > 1 or not sizes[0]:
        raise ValueError(
            "a batch is a pytree of arrays with the same number of examples, at least one; "
            f"found: {_sizes_by_name(batch, sizes)}."
        )
    _check_per_example_variables(layout, sizes[0] * factor)
    devices, mesh = batch_devices(layout.mesh), layout.mesh
    num_examples, divisor = sizes[0] * factor, microbatches * num_batch_shards(mesh)
    if num_examples % divisor:
        several = microbatches > 1
        below, above = num_examples // divisor * divisor, (num_examples // divisor + 1) * divisor
        local = num_examples // (microbatches * devices)
        hint = _row_axis_hint(local, mesh) if grid_axes(mesh) else ""
        raise ValueError(
            f"batch of {num_examples} examples does not divide by "
            f"{f'{microbatches} microbatches x ' if several else ''}{devices} devices"
            f"{f' x {ROW_AXIS}={mesh.shape[ROW_AXIS]}' if grid_axes(mesh) else ''} "
            f"({describe_mesh(mesh)}). Use {f'{below} or ' if below else ''}{above} examples"
            f"{', or another number of microbatches' if several else ''}."
            f"{hint}"
        )


def missing_examples(layout: Layout, batch: Any) -> int:
    """Return how many examples a batch lacks to divide by the devices; 0 if it is refused anyway.

    Also 0 with several processes, and if the model has a variable with an entry per example.
    """
    sizes = {x.shape[0] if getattr(x, "shape", ()) else 0 for x in jax.tree.leaves(batch)}
    is_per_example = any(map(layout.template.is_batched, layout.template.variables))
    if len(sizes) != 1 or is_per_example or jax.process_count() > 1:
        return 0
    return -sizes.pop() % num_batch_shards(layout.mesh)


def _row_axis_hint(num_examples: int, mesh: Mesh) -> str:
    """Return which sizes of the row axis divide this many examples per device and microbatch."""
    fits = [n for n in range(mesh.shape[ROW_AXIS], 1, -1) if num_examples % n == 0 < num_examples]
    choice = f"{ROW_AXIS} of {fits}" if fits else "no other size of it"
    return f" On a grid attention splits rows over {ROW_AXIS}: {choice} would do."


def _non_numeric_arrays(batch: Any) -> str:
    """Return which arrays have a dtype that no device takes: text, objects, dates; "": none."""
    pairs = zip(_names(batch), jax.tree.leaves(batch), strict=True)
    odd = [(n, x) for n, x in pairs if isinstance(x, np.ndarray) and x.dtype.kind in "OSUVMm"]
    odd = [(name, x) for name, x in odd if not _is_ml_dtype(x.dtype)]
    return ", ".join(f"{name or 'the batch itself'} is of dtype {x.dtype}" for name, x in odd)


def _is_ml_dtype(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.number)  # NumPy takes bfloat16 and float8 for bytes


def _names(batch: Any) -> list[str]:
    paths = [keys for keys, _ in jax.tree_util.tree_flatten_with_path(batch)[0]]
    return [jax.tree_util.keystr(keys, simple=True, separator="/") for keys in paths]


def _sizes_by_name(batch: Any, sizes: Sequence[int]) -> str:
    """Return the name of each array of a batch and its number of examples."""
    pairs = zip(_names(batch), sizes, strict=True)
    return ", ".join(f"{name} {size}".strip() for name, size in pairs) or "none"


def _type_names(leaves: Iterable[Any]) -> str:
    names = sorted({type(leaf).__name__ for leaf in leaves})
    return "Python numbers" if set(names) <= {"int", "float", "bool"} else ", ".join(names)


def _check_per_example_variables(layout: Layout, num_examples: Fraction | int) -> None:
    """Refuse a batch whose size differs from that of variables with an entry per example."""
    for path, variable in layout.template.variables.items():
        if layout.template.is_batched(path) and variable.shape[0] != num_examples:
            raise ValueError(
                f"{path} {tuple(variable.shape)} has an entry for each example of the batch, and "
                f"this one has {num_examples}. Give {variable.shape[0]} examples, or make the "
                f"model for {num_examples}."
            )


def is_placed(mesh: Mesh, batch: Any) -> bool:
    """Return whether a batch already has the sharding that a step expects."""
    has_batch_sharding = lambda x: (
        x.ndim and x.sharding.is_equivalent_to(batch_sharding(mesh), x.ndim)
    )
    return all(isinstance(x, jax.Array) and has_batch_sharding(x) for x in jax.tree.leaves(batch))


def full_array(params: Tree) -> Any:
    """Return the full, unsharded arrays in host memory, leaf by leaf (summon_full_params).

    Random keys come back as jax arrays, everything else as NumPy arrays. With several processes
    all of them call it, and each gets the full arrays.

    Args:
        params: Pytree of `jax.Array`: a state, its parameters, or a part of them.

    Example:
        >>> import hfjax, optax
        >>> from flax import nnx
        >>> model = lambda rngs: nnx.Linear(8, 4, rngs=rngs)
        >>> layout = hfjax.layout(model, optax.sgd(0.1), hfjax.make_mesh(fsdp=8), hfjax.FSDP)
        >>> kernel = hfjax.full_array(hfjax.init(layout).params)["kernel"]
        >>> type(kernel).__name__, kernel.shape
        ('ndarray', (8, 4))
    """
    check_not_donated(params)
    return jax.tree.map(_full_array, params)


def _full_array(x: jax.Array) -> Any:
    if is_random_key(x):
        data = _full_array(jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    if x.is_fully_addressable:
        return np.asarray(x)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(x, tiled=True))
