"""The first state of a run: born sharded from a seed, or from parameters that are given.

Given parameters are put on their shards one array at a time, as the model has them. Then they go
where a pipeline stores them, and the optimizer starts from them.
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

from hfjax.checks.combinations import check
from hfjax.parallel.adapters.constructed import holding
from hfjax.parallel.adapters.model_template import raw
from hfjax.parallel.execution import Execution, PipelineSchedule
from hfjax.parallel.mesh import describe_mesh, platform_of
from hfjax.parallel.offload.host_memory import (
    is_host_sharding,
    of_results,
    one_by_one,
    to_device,
    to_host,
)
from hfjax.sharding.check_state import check_layout
from hfjax.sharding.layout import Layout, State, begun
from hfjax.sharding.reorder_layers import copy_to, parameters_of, stored
from hfjax.sharding.stage_assignment import on_stages
from hfjax.utils.keywords import NEAREST, known_keywords, nearest_of
from hfjax.utils.paths import Flat, Index, flatten, nest
from hfjax.utils.tables import few, human

Slices = tuple[slice, ...]


@known_keywords
def init(
    layout: Layout, seed: int = 0, schedule: PipelineSchedule | None = None, parameters: Any = None
) -> State:
    """Return a new state, born sharded: no device ever holds the whole model.

    Args:
        layout: Where everything lives, as `hfjax.layout` returns it.
        seed: Whole number of 32 bits from which `model_init` gets its random numbers. The same
            seed gives the same parameters on every mesh: up to rounding, those of `model_init` with
            `nnx.Rngs(key, dropout=jax.random.fold_in(key, 1))`, where `key = jax.random.key(seed)`.
            Dropout has a stream of its own, so that a rate changes no parameter; with
            `nnx.Rngs(seed)` a model that draws keys for dropout may have other parameters.
        schedule: The pipeline schedule of the training step. With it, layers are born on the
            stages that run them. None: the first step moves them there.
        parameters: The parameters to start from, in the model's own order, whatever the schedule:
            NumPy or JAX arrays in a tree like `state.params`, or as {path: array}; a state or
            `hfjax.full(state)`, whose layers may be stored for any schedule; the `weights` of
            `hfjax.pretrained`, which stream from their files; or a function of (path, slices) that
            returns this part of the array, so that none is ever whole. In place of an array None
            says: from the seed. Floating-point arrays are cast to the model's dtype; moments,
            master weights and averages start from them.

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
        >>> own = hfjax.module(layout, state)  # a loop of your own from those of hfjax
    """
    check_layout(layout)
    layout = on_stages(layout, schedule)
    check(layout, Execution(schedule=schedule))
    seed = _seed(seed)
    with _fitting(layout):
        if parameters is None:
            return jax.block_until_ready(creation(layout)(seed))
        given = stored(layout, _placed(layout, seed, parameters))
        return jax.block_until_ready(_begun(layout, seed, given))


@contextmanager
def _fitting(layout: Layout) -> Iterator[None]:
    """Say what a state needs where the devices have no room for it: before it is made if it can be.

    Nothing may wait for arrays whose making failed.
    """
    sizes = {k: n for k, n in layout.bytes_per_device().items() if k in ("parameters", "moments")}
    if (room := _room(layout.mesh)) is not None and sum(sizes.values()) > room:
        raise MemoryError(_too_large(layout, sizes, f"there is room for {human(room)}"))
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        told = f"JAX says: {str(error).splitlines()[0][:200]}"
        raise MemoryError(_too_large(layout, sizes, told)) from None


def _room(mesh: Mesh) -> int | None:
    """Return how many bytes a device has at most, if that is known."""
    here = mesh.local_devices
    if platform_of(mesh) == "cpu" and here:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // len(here)
    stats = here[0].memory_stats() if here else None
    return stats.get("bytes_limit") if stats else None


def _too_large(layout: Layout, sizes: Mapping[str, int], told: str) -> str:
    needed = ", ".join(f"{what} {human(n)}" for what, n in sizes.items())
    return (
        f"the state does not fit: a device needs {needed} ({layout.strategy.name} on "
        f"{describe_mesh(layout.mesh)}). Take a strategy that splits it (hfjax.FSDP, on more "
        "devices), keep a part on the host (hfjax.HOST_OPTIMIZER), or make the model smaller; "
        f"{told}."
    )


def _seed(given: int | np.integer | jax.Array) -> Any:
    """Return a seed as a program takes it: a whole number of 32 bits, with a sign or without."""
    least, most = -(1 << 31), (1 << 32) - 1
    whole = jnp.issubdtype(getattr(given, "dtype", type(given)), jnp.integer)
    if not whole or (isinstance(given, int) and not least <= given <= most):
        raise ValueError(f"seed={given!r}: a whole number from {least} to {most} is expected.")
    if not isinstance(given, int):
        return given
    return given if given < 1 << 31 else np.uint32(given)


def creation(layout: Layout) -> jax.stages.Wrapped:
    """Return the jitted program that makes a new state from a seed."""
    shardings = layout.shardings()

    def born(seed: Index) -> State:
        return jax.tree.map(_in_memory, layout.create(seed), shardings)

    return _of_a_seed(layout, born, shardings)


def _of_a_seed(layout: Layout, run: Callable, shardings: State | Flat) -> Any:
    """Return `run(seed, *arguments)` as a program; of a model that is built it is given arrays."""
    where, built = of_results(shardings), layout.blueprint.built
    if built is None:
        return jax.jit(run, out_shardings=where)

    def holds(arrays: Sequence[np.ndarray], *given: Any) -> Any:
        with holding(arrays):
            return run(*given)

    program = jax.jit(holds, out_shardings=where)
    return lambda seed, *given: program(built.arrays(seed), seed, *given)


def _in_memory(x: jax.Array, where: Sharding) -> jax.Array:
    return to_host(x) if is_host_sharding(where) else x


# -- from given parameters ----------------------------------------------------------------------


def _begun(layout: Layout, seed: Index, params: Flat) -> State:
    """Return the state that begins with these parameters, which are stored as the layout has them.

    They become a part of it: nobody else may hold them.
    """
    shardings = replace(layout.shardings(), params=None)

    def beside(seed: Index, params: Flat) -> State:
        made = begun(layout, layout.blueprint.create(seed), to_device(params))
        return jax.tree.map(_in_memory, replace(made, params=None), shardings)

    state = _of_a_seed(layout, beside, shardings)(seed, params)
    return replace(state, params=nest(_cast(layout, params)))


def _cast(layout: Layout, params: Flat) -> Flat:
    """Return parameters in the dtypes of the state: beside master weights they are narrower."""
    dtypes = {path: p.dtype for path, p in layout.placed.items()}
    if all(x.dtype == dtypes[path] for path, x in params.items()):
        return params
    shardings = flatten(layout.shardings().params)
    run = lambda params: one_by_one(lambda x, dtype: x.astype(dtype), params, dtypes)
    return jax.jit(run, out_shardings=of_results(shardings))(params)


def _placed(layout: Layout, seed: Index, parameters: Any) -> Flat:
    """Return all parameters on their shards, as the model has them and in its dtypes."""
    plain = layout.as_the_model
    if hasattr(parameters, "into"):  # they are read into their places
        return parameters.into(plain)
    shardings = flatten(plain.shardings().params)
    wanted = {
        path: jax.ShapeDtypeStruct(x.shape, plain.blueprint.parameters[path].dtype)
        for path, x in plain.arrays.items()
    }
    if isinstance(parameters, State):
        parameters = parameters_of(layout, parameters)
    put = partial(_of_function, parameters)
    if not (callable(parameters) and jax.tree_util.all_leaves([parameters])):
        given = _by_path(parameters)
        _check_kind(parameters, given, wanted)
        _check(given, wanted)
        put = lambda path, *where: _of_array(given[path], *where)
    found = {path: put(path, like, shardings[path]) for path, like in wanted.items()}
    return found | _of_seed(plain, seed, [path for path, x in found.items() if x is None])


def _of_seed(plain: Layout, seed: Index, paths: list[str]) -> Flat:
    """Return those parameters that the seed gives."""
    if not paths:
        return {}
    shardings = {path: flatten(plain.shardings().params)[path] for path in paths}

    def made(seed: Index) -> Flat:
        arrays = plain.blueprint.create(seed)
        return {path: _in_memory(arrays[path], where) for path, where in shardings.items()}

    return _of_a_seed(plain, made, shardings)(seed)


def _of_array(x: Any, like: jax.ShapeDtypeStruct, sharding: Sharding) -> jax.Array | None:
    """Return a copy of an array on its shards; None: there is no array."""
    if isinstance(x, jax.Array):
        cast = x if x.dtype == like.dtype else to_device(x).astype(like.dtype)
        return copy_to(cast, sharding)
    if x is None:
        return None
    part = lambda slices: np.array(
        x[slices], like.dtype
    )  # a copy: steps donate what they are given
    return jax.make_array_from_callback(like.shape, sharding, part)


def _of_function(
    give: Callable[[str, Slices], Any], path: str, like: jax.ShapeDtypeStruct, sharding: Sharding
) -> jax.Array | None:
    """Return the array whose parts a function gives, each asked for once; None if it gives none."""
    known: dict[tuple, Any] = {}

    def part(index: Any) -> Any:
        slices = tuple(slice(*s.indices(n)[:2]) for s, n in zip(index, like.shape, strict=True))
        key = tuple((s.start, s.stop) for s in slices)
        if key not in known:
            known[key] = _part(give(path, slices), path, slices, like.dtype)
        return known[key]

    indices = sharding.addressable_devices_indices_map(like.shape).values()
    if any(part(index) is None for index in indices):
        return None
    return jax.make_array_from_callback(like.shape, sharding, part)


def _part(given: Any, path: str, slices: Slices, dtype: DTypeLike) -> np.ndarray | None:
    """Return a part that a function gave, in the model's dtype."""
    if given is None:
        return None
    wanted = tuple(s.stop - s.start for s in slices)
    found = np.asarray(given)
    if found.shape != wanted or not _real(found):
        where = ", ".join(f"{s.start}:{s.stop}" for s in slices)
        raise ValueError(
            f"parameters({path!r}, [{where}]) returned {_shown(found)}: real floating-point "
            f"numbers of shape {wanted} are expected, or None to take this parameter from the seed."
        )
    return np.array(found, dtype)


# -- paths and shapes ---------------------------------------------------------------------------


def _by_path(parameters: Any) -> Flat:
    """Return {path: array or None} of a tree, of {path: array}, or of an nnx module."""
    if isinstance(parameters, nnx.Module):
        parameters = nnx.state(parameters, nnx.Param)
    is_leaf = lambda x: x is None or isinstance(x, nnx.Variable)
    found, _ = jax.tree_util.tree_flatten_with_path(parameters, is_leaf=is_leaf)
    path = lambda keys: jax.tree_util.keystr(keys, simple=True, separator="/") or "array"
    return {path(keys): raw(x) for keys, x in found}


def _check_kind(parameters: object, given: Flat, wanted: Mapping[str, Any]) -> None:
    """Refuse what holds no arrays, and a list where the model has names."""
    others = [path for path, x in given.items() if x is not None and not hasattr(x, "dtype")]
    named = given.keys() & wanted.keys() or not isinstance(parameters, list | tuple)
    if named and not others:
        return
    found = type(parameters).__name__
    if named and others != ["array"]:
        found += f" with {type(given[others[0]]).__name__} at {others[0]}"
    raise ValueError(
        "init(…, parameters=…): arrays in a tree like state.params, {path: array}, a state, an "
        f"nnx.Module or a function of (path, slices) is expected, found {found}. print(layout) "
        "shows the paths. Make arrays of lists of numbers, np.asarray(…), and read a file first."
    )


def _check(given: Flat, wanted: Mapping[str, Any]) -> None:
    """Refuse parameters that are not those of the model, with both sides."""
    lines = [*_missing(given, wanted), *_unknown(given, wanted), *_other(given, wanted)]
    if lines:
        raise ValueError(
            "these parameters are not those of the layout's model:\n  "
            + "\n  ".join(lines)
            + "\nPaths and shapes are those of the model's own order: "
            "print(layout) shows them. None in place of an array takes it from the seed. If they "
            "lie as a pipeline stores them: give the whole state, parameters=hfjax.full(state)."
        )


def _missing(given: Flat, wanted: Mapping[str, Any]) -> Iterator[str]:
    lines = [
        f"{path} {like.shape} is missing{nearest_of(path, given.keys() - wanted.keys(), NEAREST)}"
        for path, like in wanted.items()
        if path not in given
    ]
    yield from few(lines)


def _unknown(given: Flat, wanted: Mapping[str, Any]) -> Iterator[str]:
    lines = [
        f"{path} {_shown(x)} is no parameter of the model{nearest_of(path, wanted, NEAREST)}"
        for path, x in given.items()
        if path not in wanted
    ]
    yield from few(lines)


def _other(given: Flat, wanted: Mapping[str, Any]) -> Iterator[str]:
    both = [(path, given[path], like) for path, like in wanted.items() if path in given]
    fits = lambda x, like: x is None or (np.shape(x) == like.shape and _real(x))
    lines = [
        f"{path} is {_shown(x)}, the model has {_shown(like)}"
        for path, x, like in both
        if not fits(x, like)
    ]
    yield from few(lines)


def _real(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def _shown(x: Any) -> str:
    if not hasattr(x, "dtype"):
        return f"no array, but {type(x).__name__}"
    return f"{x.dtype}{list(x.shape)}"
