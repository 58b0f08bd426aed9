"""The initial state of a run: created sharded, from a seed or from given parameters.

Given parameters are put on their shards one array at a time, in the model's order. Then they are
moved to where a pipeline stores them, and the optimizer state is initialized from them.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike

from hfjax.checks.feature_conflicts import check_combinations
from hfjax.parallel.adapters.constructed import use_arrays
from hfjax.parallel.adapters.model_template import raw_value
from hfjax.parallel.execution import Execution, PipelineSchedule
from hfjax.parallel.jaxprs.model_mesh import without_mesh
from hfjax.parallel.mesh import describe_mesh, platform_of
from hfjax.parallel.offload.host_memory import (
    is_host_sharding,
    map_one_by_one,
    result_shardings,
    to_device,
    to_host,
)
from hfjax.sharding.check_state import check_layout
from hfjax.sharding.layout import Layout, State
from hfjax.sharding.reorder_layers import copy_to, params_in_model_order, to_stored_order
from hfjax.sharding.stage_assignment import assign_stages
from hfjax.sharding.state import initial_state
from hfjax.utils.keywords import NEAREST, name_hint, strict_keywords
from hfjax.utils.paths import Flat, Index, flatten, nest
from hfjax.utils.tables import first_lines, human

Slices = tuple[slice, ...]


@without_mesh
@strict_keywords
def init(
    layout: Layout, seed: int = 0, schedule: PipelineSchedule | None = None, parameters: Any = None
) -> State:
    """Return a new state, created sharded: no device ever holds the whole model.

    Args:
        layout: The layout of the state, as `hfjax.layout` returns it.
        seed: 32-bit integer from which `model_init` gets its random numbers. The same
            seed gives the same parameters on every mesh: up to rounding, those of `model_init` with
            `nnx.Rngs(key, dropout=jax.random.fold_in(key, 1))`, where `key = jax.random.key(seed)`.
            Dropout has its own stream, so that its rate changes no parameter; with
            `nnx.Rngs(seed)` a model that draws keys for dropout may have other parameters.
        schedule: The pipeline schedule of the training step. With it, layers are created on the
            stages that run them. None: the first step moves them there.
        parameters: The parameters to start from, in the model's own order, whatever the schedule:
            NumPy or JAX arrays in a tree like `state.params`, or as {path: array}; a state or
            `hfjax.full_array(state)`, whose layers may be stored for any schedule; the `weights` of
            `hfjax.pretrained`, which stream from their files; or a function of (path, slices) that
            returns this slice of the array, so that no array is ever held in full. None in place
            of an array takes it from the seed. Floating-point arrays are cast to the model's dtype;
            optimizer state, master weights and averages start from them.

    Raises:
        ValueError: A given path is unknown or missing, or an array has another shape, or is not of
            real floating-point numbers.

    Example:
        >>> import hfjax, numpy as np, optax
        >>> from flax import nnx
        >>> model = lambda rngs: nnx.Linear(8, 16, rngs=rngs)
        >>> fsdp = hfjax.FSDP.edit(replicate_below=0)  # split arrays however small
        >>> layout = hfjax.layout(model, optax.adam(1e-3), hfjax.make_mesh(fsdp=8), fsdp)
        >>> state = hfjax.init(layout, seed=0)
        >>> kernel = state.params["kernel"]
        >>> kernel.shape, kernel.addressable_shards[0].data.shape
        ((8, 16), (1, 16))
        >>> given = {"kernel": np.ones((8, 16)), "bias": None}  # the bias: from the seed
        >>> float(hfjax.init(layout, parameters=given).params["kernel"].sum())
        128.0
        >>> own = model(nnx.Rngs(0))  # hfjax from the parameters of a loop of your own
        >>> state = hfjax.init(layout, parameters=own)
        >>> own = hfjax.to_model(layout, state)  # a loop of your own from those of hfjax
    """
    check_layout(layout)
    layout = assign_stages(layout, schedule)
    check_combinations(layout, Execution(schedule=schedule))
    seed = _as_int32_seed(seed)
    with _explain_out_of_memory(layout):
        if parameters is None:
            return jax.block_until_ready(init_program(layout)(seed))
        params = to_stored_order(layout, _place_params(layout, seed, parameters))
        return jax.block_until_ready(_start_from_params(layout, seed, params))


@contextmanager
def _explain_out_of_memory(layout: Layout) -> Iterator[None]:
    """Raise MemoryError if the devices lack room for a state: before it is created if possible.

    Nothing may wait for arrays whose creation failed.
    """
    parts = ("parameters", "optimizer_state")
    sizes = {k: n for k, n in layout.bytes_per_device().items() if k in parts}
    if (available := _device_memory(layout.mesh)) is not None and sum(sizes.values()) > available:
        raise MemoryError(
            _out_of_memory_message(layout, sizes, f"there is room for {human(available)}")
        )
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        cause = f"JAX says: {str(error).splitlines()[0][:200]}"
        raise MemoryError(_out_of_memory_message(layout, sizes, cause)) from None


def _device_memory(mesh: Mesh) -> int | None:
    """Return how many bytes a device has at most, if known."""
    devices = mesh.local_devices
    if platform_of(mesh) == "cpu" and devices:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(devices)
    stats = devices[0].memory_stats() if devices else None
    return stats.get("bytes_limit") if stats else None


def _out_of_memory_message(layout: Layout, sizes: Mapping[str, int], cause: str) -> str:
    needed = ", ".join(f"{name} {human(n)}" for name, n in sizes.items())
    return (
        f"the state does not fit: a device needs {needed} ({layout.strategy.name} on "
        f"{describe_mesh(layout.mesh)}). Take a strategy that splits it (hfjax.FSDP, on more "
        "devices), keep a part on the host (hfjax.HOST_OPTIMIZER), or make the model smaller; "
        f"{cause}."
    )


def _as_int32_seed(seed: int | np.integer | jax.Array) -> Any:
    """Return a seed as a program takes it: a 32-bit integer, signed or unsigned."""
    minimum, maximum = -(1 << 31), (1 << 32) - 1
    is_integer = jnp.issubdtype(getattr(seed, "dtype", type(seed)), jnp.integer)
    if not is_integer or (isinstance(seed, int) and not minimum <= seed <= maximum):
        raise ValueError(f"seed={seed!r}: a whole number from {minimum} to {maximum} is expected.")
    if not isinstance(seed, int):
        return seed
    return seed if seed < 1 << 31 else np.uint32(seed)


def init_program(layout: Layout) -> jax.stages.Wrapped:
    """Return the jitted program that makes a new state from a seed."""
    shardings = layout.shardings()

    def create(seed: Index) -> State:
        return jax.tree.map(_to_memory, layout.create(seed), shardings)

    return _jit_with_seed(layout, create, shardings)


def _jit_with_seed(layout: Layout, run: Callable, shardings: State | Flat) -> Any:
    """Return `run(seed, *arguments)` jitted; for a model that is constructed, arrays are passed."""
    out_shardings, constructor = result_shardings(shardings), layout.template.eager_init
    if constructor is None:
        return jax.jit(run, out_shardings=out_shardings)

    def run_with_arrays(arrays: Sequence[np.ndarray], *seed_and_args: Any) -> Any:
        with use_arrays(arrays):
            return run(*seed_and_args)

    program = jax.jit(run_with_arrays, out_shardings=out_shardings)
    return lambda seed, *arguments: program(constructor.arrays(seed), seed, *arguments)


def _to_memory(x: jax.Array, sharding: Sharding) -> jax.Array:
    return to_host(x) if is_host_sharding(sharding) else x


# -- from given parameters ----------------------------------------------------------------------


def _start_from_params(layout: Layout, seed: Index, params: Flat) -> State:
    """Return the initial state with these parameters, which are stored as the layout stores them.

    They become part of the state: no one else may use them.
    """
    shardings = replace(layout.shardings(), params=None)

    def make_state_without_params(seed: Index, params: Flat) -> State:
        new_state = initial_state(layout, layout.template.create(seed), to_device(params))
        return jax.tree.map(_to_memory, replace(new_state, params=None), shardings)

    state = _jit_with_seed(layout, make_state_without_params, shardings)(seed, params)
    return replace(state, params=nest(_cast_params(layout, params)))


def _cast_params(layout: Layout, params: Flat) -> Flat:
    """Return parameters in the dtypes of the state: narrower than their master weights."""
    dtypes = {path: p.dtype for path, p in layout.param_specs.items()}
    if all(x.dtype == dtypes[path] for path, x in params.items()):
        return params
    shardings = flatten(layout.shardings().params)
    run = lambda params: map_one_by_one(lambda x, dtype: x.astype(dtype), params, dtypes)
    return jax.jit(run, out_shardings=result_shardings(shardings))(params)


def _place_params(layout: Layout, seed: Index, parameters: Any) -> Flat:
    """Return all parameters on their shards, in the model's order and dtypes."""
    model_layout = layout.model_layout
    if hasattr(parameters, "into"):  # they are read directly onto their shards
        params = parameters.into(model_layout)
        others = [path for path in model_layout.arrays if path not in params]  # adapters
        return params | _params_from_seed(model_layout, seed, others)
    shardings = flatten(model_layout.shardings().params)
    expected = {
        path: jax.ShapeDtypeStruct(x.shape, model_layout.template.parameters[path].dtype)
        for path, x in model_layout.arrays.items()
    }
    if isinstance(parameters, State):
        parameters = params_in_model_order(layout, parameters)
    put = partial(_array_from_function, parameters)
    if not (callable(parameters) and jax.tree_util.all_leaves([parameters])):
        arrays = _arrays_by_path(parameters)
        _check_tree(parameters, arrays, expected)
        _check_params(arrays, expected)
        put = lambda path, *target: _array_on_shards(arrays[path], *target)
    params = {path: put(path, like, shardings[path]) for path, like in expected.items()}
    return params | _params_from_seed(
        model_layout, seed, [path for path, x in params.items() if x is None]
    )


def _params_from_seed(model_layout: Layout, seed: Index, paths: list[str]) -> Flat:
    """Return the parameters of these paths from the seed."""
    if not paths:
        return {}
    shardings = {path: flatten(model_layout.shardings().params)[path] for path in paths}

    def make_params(seed: Index) -> Flat:
        arrays = model_layout.template.create(seed)
        return {path: _to_memory(arrays[path], sharding) for path, sharding in shardings.items()}

    return _jit_with_seed(model_layout, make_params, shardings)(seed)


def _array_on_shards(x: Any, like: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array | None:
    """Return a copy of an array on its shards; None if there is no array."""
    if isinstance(x, jax.Array):
        cast = x if x.dtype == like.dtype else to_device(x).astype(like.dtype)
        return copy_to(cast, sharding)
    if x is None:
        return None
    read_slice = lambda slices: np.array(x[slices], like.dtype)  # a copy: steps donate their state
    return jax.make_array_from_callback(like.shape, sharding, read_slice)


def _array_from_function(
    read_slice: Callable[[str, Slices], Any],
    path: str,
    like: jax.ShapeDtypeStruct,
    sharding: Sharding,
) -> jax.Array | None:
    """Return the array whose slices a function returns, each read once; None if it returns None."""
    slices_read: dict[tuple, Any] = {}

    def local_slice(index: Any) -> Any:
        slices = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, like.shape, strict=True))
        key = tuple((s.start, s.stop) for s in slices)
        if key not in slices_read:
            slices_read[key] = _check_slice(read_slice(path, slices), path, slices, like.dtype)
        return slices_read[key]

    indices = sharding.addressable_devices_indices_map(like.shape).values()
    if any(local_slice(index) is None for index in indices):
        return None
    return jax.make_array_from_callback(like.shape, sharding, local_slice)


def _check_slice(values: Any, path: str, slices: Slices, dtype: DTypeLike) -> np.ndarray | None:
    """Return a slice that a function returned, in the model's dtype."""
    if values is None:
        return None
    shape = tuple(s.stop - s.start for s in slices)
    array = np.asarray(values)
    if array.shape != shape or not _is_real(array):
        bounds = ", ".join(f"{s.start}:{s.stop}" for s in slices)
        raise ValueError(
            f"parameters({path!r}, [{bounds}]) returned {_describe(array)}: real floating-point "
            f"numbers of shape {shape} are expected, or None to take this parameter from the seed."
        )
    return np.array(array, dtype)


# -- paths and shapes ---------------------------------------------------------------------------


def _arrays_by_path(parameters: Any) -> Flat:
    """Return {path: array or None} of a tree, of {path: array}, or of an nnx module."""
    if isinstance(parameters, nnx.Module):
        parameters = nnx.state(parameters, nnx.Param)
    is_leaf = lambda x: x is None or isinstance(x, nnx.Variable)
    leaves, _ = jax.tree_util.tree_flatten_with_path(parameters, is_leaf=is_leaf)
    path = lambda keys: jax.tree_util.keystr(keys, simple=True, separator="/") or "array"
    return {path(keys): raw_value(x) for keys, x in leaves}


def _check_tree(parameters: object, arrays: Flat, expected: Mapping[str, Any]) -> None:
    """Refuse what holds no arrays, and a list where the model has names."""
    others = [path for path, x in arrays.items() if x is not None and not hasattr(x, "dtype")]
    named = arrays.keys() & expected.keys() or not isinstance(parameters, list | tuple)
    if named and not others:
        return
    description = type(parameters).__name__
    if named and others != ["array"]:
        description += f" with {type(arrays[others[0]]).__name__} at {others[0]}"
    raise ValueError(
        "init(…, parameters=…): arrays in a tree like state.params, {path: array}, a state, an "
        f"nnx.Module or a function of (path, slices) is expected, found {description}. "
        "print(layout) shows the paths. Make arrays of lists of numbers, np.asarray(…), and read a "
        "file first."
    )


def _check_params(arrays: Flat, expected: Mapping[str, Any]) -> None:
    """Refuse parameters that are not those of the model, and show both."""
    lines = [
        *_missing_lines(arrays, expected),
        *_unknown_lines(arrays, expected),
        *_mismatch_lines(arrays, expected),
    ]
    if lines:
        raise ValueError(
            "these parameters are not those of the layout's model:\n  "
            + "\n  ".join(lines)
            + "\nPaths and shapes are those of the model's own order: "
            "print(layout) shows them. None in place of an array takes it from the seed. If they "
            "lie as a pipeline stores them: give the whole state, "
            "parameters=hfjax.full_array(state)."
        )


def _missing_lines(arrays: Flat, expected: Mapping[str, Any]) -> Iterator[str]:
    lines = [
        f"{path} {like.shape} is missing{name_hint(path, arrays.keys() - expected.keys(), NEAREST)}"
        for path, like in expected.items()
        if path not in arrays
    ]
    yield from first_lines(lines)


def _unknown_lines(arrays: Flat, expected: Mapping[str, Any]) -> Iterator[str]:
    lines = [
        f"{path} {_describe(x)} is no parameter of the model{name_hint(path, expected, NEAREST)}"
        for path, x in arrays.items()
        if path not in expected
    ]
    yield from first_lines(lines)


def _mismatch_lines(given_params: Flat, expected: Mapping[str, Any]) -> Iterator[str]:
    pairs = [
        (path, given_params[path], like) for path, like in expected.items() if path in given_params
    ]
    fits = lambda x, like: x is None or (np.shape(x) == like.shape and _is_real(x))
    lines = [
        f"{path} is {_describe(x)}, the model has {_describe(like)}"
        for path, x, like in pairs
        if not fits(x, like)
    ]
    yield from first_lines(lines)


def _is_real(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _describe(x: Any) -> str:
    if not hasattr(x, "dtype"):
        return f"no array, but {type(x).__name__}"
    return f"{x.dtype}{list(x.shape)}"
