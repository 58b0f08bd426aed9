"""Arrays beside the model and the batch: a teacher's parameters, a coefficient, a table.

`step.gradients(…, extra=…)` takes a tree of them, and `forward` and `loss` ask for `extra` by name.
They have no examples and no gradient. What is sharded over devices is taken as it lies and gathered
where it is used (in a layer stack and a pipeline once in a step, as the parameters of the head
are); everything else is replicated.
"""

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.parallel.engine.comm_plan import CommPlan, collectives, use_xla
from hfjax.parallel.engine.unshard import ShardedParam, is_sharded_param
from hfjax.parallel.mesh import in_use
from hfjax.parallel.param_specs import auto_part, entries_of, manual_part
from hfjax.parallel.strategy import Axes
from hfjax.utils.paths import is_random_key

EXTRA = "extra"


@dataclass(frozen=True)
class ExtraSpecs:
    """The structure of a tree of extra arrays, and the spec of each on the mesh of a step."""

    treedef: Any
    specs: tuple[P, ...]

    @classmethod
    def of(cls, extra: Any, mesh: Mesh) -> "ExtraSpecs":
        """Return the specs of a tree of arrays, traced ones replicated."""
        leaves, treedef = jax.tree.flatten(extra)
        return cls(treedef, tuple(_spec_on(mesh, x) for x in leaves))

    def shardings(self, mesh: Mesh) -> Any:
        """Return the sharding of each array."""
        return self.treedef.unflatten([NamedSharding(mesh, spec) for spec in self.specs])

    def manual_specs(self, mesh: Mesh) -> Any:
        """Return the spec of each array over the axes whose collectives hfjax writes."""
        return self.treedef.unflatten([manual_part(spec, mesh) for spec in self.specs])

    def bind(self, extra: Any, mesh: Mesh) -> Any:
        """Return a device's arrays, those sharded over manual axes as `ShardedParam`."""
        leaves = self.treedef.flatten_up_to(extra)
        pairs = zip(leaves, self.specs, strict=True)
        return self.treedef.unflatten([_bind(x, spec, mesh) for x, spec in pairs])


def split_extra(extra: Any) -> tuple[dict[str, ShardedParam], list[Any], Callable]:
    """Return the sharded arrays of a bound tree by name, the others, and what joins them again."""
    leaves, treedef = jax.tree.flatten(extra, is_leaf=is_sharded_param)
    sharded = {f"{EXTRA}/{i}": x for i, x in enumerate(leaves) if is_sharded_param(x)}
    arrays = [x for x in leaves if not is_sharded_param(x)]

    def join(gathered: Mapping[str, Any], arrays: Sequence[Any]) -> Any:
        rest, names = iter(arrays), (f"{EXTRA}/{i}" for i in range(len(leaves)))
        return treedef.unflatten([gathered[n] if n in sharded else next(rest) for n in names])

    return sharded, arrays, join


def asks_for_extra(function: Callable | None) -> bool:
    """Return whether a `forward` or a loss has an argument `extra`."""
    try:
        return function is not None and EXTRA in inspect.signature(function).parameters
    except (TypeError, ValueError):  # it has no signature
        return False


def with_extra(function: Callable, extra: Any) -> Callable:
    """Return the function with `extra` given, if it asks for it."""
    if not asks_for_extra(function):
        return function
    if extra is None and _is_required(function):
        raise ValueError(
            f"{getattr(function, '__name__', 'this function')} asks for `extra`, and none is "
            "given: step.gradients(state, batch, extra=…)."
        )
    return function if extra is None else partial(function, extra=extra)


def _is_required(function: Callable) -> bool:
    parameter = inspect.signature(function).parameters[EXTRA]
    return parameter.default is parameter.empty


def _bind(x: jax.Array, spec: P, mesh: Mesh) -> Any:
    manual = manual_part(spec, mesh)
    dims = tuple((d - x.ndim, axes) for d, axes in enumerate(entries_of(manual, x.ndim)) if axes)
    if not dims:
        return x
    gathers = collectives("all_gather", dims, x, x.dtype, mesh, use_xla)
    sizes = [int(np.prod([mesh.shape[a] for a in axes])) for axes in entries_of(manual, x.ndim)]
    shape = tuple(n * size for n, size in zip(x.shape, sizes, strict=True))
    tensor_entries = enumerate(entries_of(auto_part(spec), x.ndim))
    tensor_dims = tuple((d - x.ndim, axes) for d, axes in tensor_entries if axes)
    moved = {dim for dim, _ in dims}
    tensor_dims = () if moved & {dim for dim, _ in tensor_dims} else tensor_dims
    dtypes = (x.dtype, x.dtype, x.dtype)
    ignore = lambda path: None
    return ShardedParam(
        x, None, CommPlan(EXTRA, shape, gathers, (), (), tensor_dims, *dtypes, ignore)
    )


def _spec_on(mesh: Mesh, x: Any) -> P:
    """Return the spec on a mesh with which an array lies as it lies now; P() if there is none."""
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if sharding is None or sharding.is_fully_replicated or is_random_key(x):
        return P()
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return sharding.spec
    if sharding.device_set != set(mesh.devices.flat):
        return P()
    pieces = [n // piece for n, piece in zip(x.shape, sharding.shard_shape(x.shape), strict=True)]
    for spec in _specs_of(pieces, mesh):
        if NamedSharding(mesh, spec).is_equivalent_to(sharding, x.ndim):
            return spec
    return P()


def _specs_of(pieces: Sequence[int], mesh: Mesh) -> Any:
    """Yield the specs that split each dimension into so many pieces."""
    axes = in_use(mesh, mesh.axis_names)
    runs: Mapping[int, list[Axes]] = {1: [()]}
    for count in range(1, len(axes) + 1):
        for chosen in itertools.permutations(axes, count):
            size = int(np.prod([mesh.shape[a] for a in chosen]))
            runs.setdefault(size, []).append(chosen)
    for entries in itertools.product(*(runs.get(n, []) for n in pieces)):
        used = [axis for axes in entries for axis in axes]
        if len(used) == len(set(used)):
            yield P(*[entry or None for entry in entries])
