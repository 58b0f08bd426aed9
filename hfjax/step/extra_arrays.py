"""Arrays beside the model and the batch: a teacher's parameters, a coefficient, a table.

`step.gradients(…, extra=…)` takes a tree of them, and `forward` and the loss ask for `extra` by
name. They have no batch dimension and no gradient. Sharded arrays keep their sharding and are
all-gathered where they are used (in a layer stack and a pipeline once per step, as the parameters
of the head are); all others are replicated. The core knows `extra` only as the object that
`ExtraSpecs.bind` returns.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from hfjax.parallel.engine.comm_plan import CommPlan, collectives, use_xla
from hfjax.parallel.engine.step_context import StepContext
from hfjax.parallel.engine.unshard import ShardedParam, is_sharded_param, unshard
from hfjax.parallel.mesh import in_use, size_of
from hfjax.parallel.offload.host_memory import to_device
from hfjax.parallel.param_specs import auto_part, entries_of, manual_part
from hfjax.parallel.strategy import Axes
from hfjax.utils.paths import is_random_key

EXTRA = "extra"
IN_A_TRAINING_STEP = "step.gradients(state, batch, extra=…), then step.apply."
IN_EVALUATION = "there eval_step and predict_step give none. Let it be optional: extra=None."


@partial(jax.tree_util.register_dataclass, data_fields=["tree"], meta_fields=[])
@dataclass(frozen=True)
class Extra:
    """A tree of extra arrays within a step: those of a device, or full ones."""

    tree: Any

    def give(self, function: Callable) -> Callable:
        """Return the function with `extra` given, if it asks for it."""
        return partial(function, extra=self.tree) if asks_for_extra(function) else function

    def split(self) -> tuple[dict[str, ShardedParam], list[Any]]:
        """Return the sharded arrays by name, and the others."""
        leaves = jax.tree.leaves(self.tree, is_leaf=is_sharded_param)
        sharded = {f"{EXTRA}/{i}": x for i, x in enumerate(leaves) if is_sharded_param(x)}
        return sharded, [x for x in leaves if not is_sharded_param(x)]

    def join(self, gathered: Mapping[str, Any], arrays: Sequence[Any]) -> "Extra":
        """Return full arrays, given what `split` returned, the sharded ones gathered."""
        leaves, treedef = jax.tree.flatten(self.tree, is_leaf=is_sharded_param)
        rest = iter(arrays)
        full = [
            gathered[f"{EXTRA}/{i}"] if is_sharded_param(x) else next(rest)
            for i, x in enumerate(leaves)
        ]
        return Extra(treedef.unflatten(full))


@dataclass(frozen=True)
class ExtraSpecs:
    """The structure of a tree of extra arrays, and the sharding of each on the mesh of a step."""

    treedef: Any
    shardings: tuple[NamedSharding, ...]

    @classmethod
    def of(cls, extra: Any, mesh: Mesh) -> "ExtraSpecs":
        """Return the specs of a tree of arrays, traced ones replicated."""
        pairs, treedef = jax.tree_util.tree_flatten_with_path(extra)
        for keys, x in pairs:
            _check_array(f"extra{jax.tree_util.keystr(keys)}", x)
        return cls(treedef, tuple(_sharding_on(mesh, x) for _, x in pairs))

    def place(self, extra: Any) -> Any:
        """Return the arrays; those with a sharding that this mesh cannot express are copied."""
        leaves = zip(self.treedef.flatten_up_to(extra), self.shardings, strict=True)
        return self.treedef.unflatten([_place(x, sharding) for x, sharding in leaves])

    def in_shardings(self) -> Any:
        """Return the sharding of each array."""
        return self.treedef.unflatten(self.shardings)

    def manual_specs(self, mesh: Mesh) -> Any:
        """Return the spec of each array over the axes whose collectives hfjax writes."""
        return self.treedef.unflatten([manual_part(s.spec, mesh) for s in self.shardings])

    def bind(self, extra: Any, context: StepContext) -> Extra:
        """Return a device's arrays as `forward` and the loss may ask for them.

        A whole model gathers each array where it is used, a layer stack all of them here.
        """
        leaves = zip(self.treedef.flatten_up_to(extra), self.shardings, strict=True)
        bound = [_bind(to_device(x), sharding.spec, context.mesh) for x, sharding in leaves]
        tree = self.treedef.unflatten(bound)
        return Extra(unshard(tree) if context.is_layer_stack else tree)


def asks_for_extra(function: Callable | None) -> bool:
    """Return whether a `forward` or a loss has an argument `extra`."""
    return _parameter(function) is not None


def check_extra(
    extra: Any, functions: Mapping[str, Callable | None], remedy: str = IN_A_TRAINING_STEP
) -> None:
    """Refuse extra arrays that nothing asks for, and a function that needs some without."""
    parameters = {name: _parameter(function) for name, function in functions.items()}
    if extra is not None and not any(parameters.values()):
        raise ValueError(
            f"extra= is given, and neither {' nor '.join(functions)} asks for it. Write "
            "loss(outputs, batch, extra), or forward(model, batch, extra) for hfjax.layout."
        )
    for name, parameter in parameters.items():
        if extra is None and parameter is not None and parameter.default is parameter.empty:
            raise ValueError(f"{name} asks for `extra`, and none is given: {remedy}")


def _parameter(function: Callable | None) -> inspect.Parameter | None:
    try:
        return None if function is None else inspect.signature(function).parameters.get(EXTRA)
    except (TypeError, ValueError):  # it has no signature
        return None


def _check_array(name: str, x: Any) -> None:
    """Refuse what is no array or number, and an array that was donated."""
    if getattr(x, "is_deleted", bool)() and not isinstance(x, Tracer):
        raise ValueError(
            f"{name} was given to a step, which took its memory (donation). To keep parameters "
            "beside a state that is trained, copy them: jax.tree.map(jnp.copy, state.params)."
        )
    if isinstance(x, jax.Array):
        return
    if (
        not isinstance(x, np.ndarray | np.generic | int | float)
        or np.asarray(x).dtype.kind in "OSUV"
    ):
        raise ValueError(
            f"{name} is a {type(x).__name__}: arrays and numbers are expected. Close over anything "
            "else in the loss."
        )


def _place(x: Any, sharding: NamedSharding) -> Any:
    if isinstance(x, Tracer) or not isinstance(x, jax.Array) or not x.committed:
        return x
    return x if x.sharding.is_equivalent_to(sharding, x.ndim) else jax.device_put(x, sharding)


def _bind(x: jax.Array, spec: P, mesh: Mesh) -> Any:
    entries = entries_of(manual_part(spec, mesh), x.ndim)
    dims = tuple((d - x.ndim, axes) for d, axes in enumerate(entries) if axes)
    if not dims:
        return x
    gathers = collectives("all_gather", dims, x, x.dtype, mesh, use_xla)
    shape = tuple(n * size_of(axes, mesh) for n, axes in zip(x.shape, entries, strict=True))
    auto = enumerate(entries_of(auto_part(spec), x.ndim))
    tensor_dims = tuple((d - x.ndim, axes) for d, axes in auto if axes)
    if {dim for dim, _ in dims} & {dim for dim, _ in tensor_dims}:
        tensor_dims = ()
    dtypes, ignore = (x.dtype, x.dtype, x.dtype), lambda path: None
    plan = CommPlan(EXTRA, shape, gathers, (), (), tensor_dims, *dtypes, ignore)
    return ShardedParam(x, None, plan)


def _sharding_on(mesh: Mesh, x: Any) -> NamedSharding:
    """Return the sharding on a mesh that leaves an array where it is; if none does, replicated."""
    sharding = None if isinstance(x, Tracer) else getattr(x, "sharding", None)
    if sharding is None or sharding.device_set != set(mesh.devices.flat) or is_random_key(x):
        return NamedSharding(mesh, P())
    if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
        return sharding
    shard_shape = sharding.shard_shape(x.shape)
    pieces = [n // size if size else 1 for n, size in zip(x.shape, shard_shape, strict=True)]
    here = lambda spec: NamedSharding(mesh, spec, memory_kind=sharding.memory_kind)
    same = lambda spec: here(spec).is_equivalent_to(sharding, x.ndim)
    return here(next(filter(same, _specs_of(pieces, mesh)), P()))


def _specs_of(pieces: Sequence[int], mesh: Mesh) -> Iterator[P]:
    """Yield the specs that split each dimension into so many pieces."""
    names = in_use(mesh, mesh.axis_names)
    groups: dict[int, list[Axes]] = {1: [()]}
    for count in range(1, len(names) + 1):
        for axes in itertools.permutations(names, count):
            groups.setdefault(size_of(axes, mesh), []).append(axes)
    for entries in itertools.product(*(groups.get(n, []) for n in pieces)):
        used: Axes = tuple(itertools.chain(*entries))
        if len(set(used)) == len(used):
            yield P(*[axes or None for axes in entries])
