"""Reads the copies between device and host in a jaxpr, whose values have a memory space.

A jaxpr shows only in some places how an array is sharded: in the shardings of arguments and
constraints. So the walk tracks the number of shards of each dimension of a value.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn
from jax.interpreters import partial_eval

from hfjax.analysis import hlo
from hfjax.parallel.jaxprs.walk import bodies_of, equations_in, interpret_jaxpr, scan_counts

TO_HOST, TO_DEVICE = "to host", "to device"
HOST = jax.memory.Space.Host
Shape = tuple[int, ...]
Split = Shape | None  # shards of each dimension; None: the program does not say


@dataclasses.dataclass(frozen=True)
class Copy(hlo.Transfer):
    """A copy between device and host memory; its kind is its direction."""

    is_global: bool = False  # the shape is global: the sharding is not known


RegionCopies = tuple[list[Copy], list[Split]]  # copies in a region, and splits of its results


def copies(jaxpr: Any, arguments: Sequence[Any], results: Sequence[Any]) -> list[Copy]:
    """Return the copies of one run of a jaxpr; what nothing reads is not counted.

    `arguments` and `results` are their shardings, None where they are not known.
    """
    meshes = [sharding.mesh for sharding in (*arguments, *results) if hasattr(sharding, "mesh")]
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), True)
    local = all(mesh.size <= 1 for mesh in (*meshes, *_meshes(jaxpr)))
    arg_splits = _splits_of(arguments, jaxpr.invars, [None] * len(jaxpr.invars))
    out, splits = _region(jaxpr, arg_splits, local)
    for value, split, sharding in zip(jaxpr.outvars, splits, results, strict=True):
        kind = getattr(sharding, "memory_kind", None)
        if kind is not None:
            out += _copy_to(value, kind != "device", split, local)
    return out


def _meshes(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the meshes that a program names."""
    for equation, _ in equations_in(jaxpr):
        for value in jax.tree.leaves(list(equation.params.values())):
            mesh = getattr(value, "mesh", value)
            if isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
                yield mesh


# -- a walk over the equations; `local`: shapes are per device --------------------------------


def _region(jaxpr: Jaxpr, splits: Sequence[Split], local: bool) -> RegionCopies:
    """Return the copies in one run of a jaxpr, and the splits of its results."""
    out: list[Copy] = []

    def run(equation: JaxprEqn, in_splits: list[Split]) -> list[Split]:
        sent, results = _read_equation(equation, in_splits, local)
        out.extend(sent)
        return results

    unknown: list[Split] = [None] * len(jaxpr.constvars)
    return out, interpret_jaxpr(jaxpr, unknown, splits, run, constant=lambda _: None)


def _read_equation(equation: Any, in_splits: list[Split], local: bool) -> RegionCopies:
    name, results, params = equation.primitive.name, equation.outvars, equation.params
    if name in _HANDLERS:
        return _HANDLERS[name](equation, in_splits, local)
    if name == "sharding_constraint" and not local:
        ndim, free = results[0].aval.ndim, params["unconstrained_dims"]
        return [], [_sharding_split(params["sharding"], ndim, in_splits[0], free)]
    if name == "optimization_barrier":
        return [], in_splits
    bodies = [body for body, _ in bodies_of(equation)]
    if len(bodies) == 1 and len(bodies[0].invars) == len(in_splits):
        return _region(bodies[0], in_splits, local)
    out = [c for body in bodies for c in _region(body, [None] * len(body.invars), local)[0]]
    return out, [_result_split(equation.invars, in_splits, v.aval.shape) for v in results]


def _device_put(equation: JaxprEqn, in_splits: list[Split], local: bool) -> RegionCopies:
    splits = _splits_of(equation.params["devices"], equation.invars, in_splits)
    out = []
    for old, new, split in zip(equation.invars, equation.outvars, splits, strict=True):
        out += _copy_to(old, is_on_host(new), split, local)
    return out, splits


def _copy_to(value: Any, to_host: bool, split: Split, local: bool) -> list[Copy]:
    """Return the copy of a value into one of the memories; none if it is there already."""
    if is_on_host(value) == to_host:
        return []
    shape = tuple(value.aval.shape)
    if split is not None and not local:
        shape = tuple(-(-size // shards) for size, shards in zip(shape, split, strict=True))
    kind = TO_HOST if to_host else TO_DEVICE
    return [Copy(kind, (), value.aval.dtype.name, shape, is_global=split is None and not local)]


def is_on_host(value: Any) -> bool:
    """Return whether a variable of a program is in host memory."""
    return getattr(value.aval, "memory_space", None) == HOST


def _jit(equation: JaxprEqn, in_splits: list[Split], local: bool) -> RegionCopies:
    params = equation.params
    body_splits = _splits_of(params["in_shardings"], equation.invars, in_splits)
    out, results = _region(params["jaxpr"].jaxpr, body_splits, local)
    return out, _splits_of(params["out_shardings"], equation.outvars, results)


def _scan(equation: JaxprEqn, in_splits: list[Split], local: bool) -> RegionCopies:
    """Return the copies of a scan over the values that are neither constant nor carried."""
    constants, carried = scan_counts(equation)
    unstack = lambda split: split[1:] if split and split[0] == 1 else None
    stack = lambda split: None if split is None else (1, *split)
    unstacked, stacks = in_splits[: constants + carried], in_splits[constants + carried :]
    body = equation.params["jaxpr"].jaxpr
    out, results = _region(body, [*unstacked, *map(unstack, stacks)], local)
    after = [*results[:carried], *map(stack, results[carried:])]
    return hlo.loop(equation.params["length"], out, []), after


def _while(equation: JaxprEqn, in_splits: list[Split], local: bool) -> RegionCopies:
    params = equation.params
    tests, constants = params["cond_nconsts"], params["body_nconsts"]
    carried = in_splits[tests + constants :]
    body, condition = params["body_jaxpr"].jaxpr, params["cond_jaxpr"].jaxpr
    out, results = _region(body, [*in_splits[tests : tests + constants], *carried], local)
    tested, _ = _region(condition, [*in_splits[:tests], *carried], local)
    return hlo.loop(None, out, tested), results


def _cond(equation: JaxprEqn, in_splits: list[Split], local: bool) -> RegionCopies:
    branches = [
        _region(branch.jaxpr, in_splits[1:], local) for branch in equation.params["branches"]
    ]
    return hlo.heaviest_branch([out for out, _ in branches]), branches[0][1]


def _shard_map(equation: JaxprEqn, in_splits: list[Split], local: bool) -> RegionCopies:
    """Return the copies of a shard_map; over all axes its shapes are per device."""
    params = equation.params
    body, mesh = params["jaxpr"], params["mesh"]
    manual = params.get("newly_manual_axes", params.get("manual_axes", mesh.axis_names))
    local = local or all(n == 1 for axis, n in mesh.shape.items() if axis not in manual)
    shapes = lambda values: [tuple(v.aval.shape) for v in values]
    pairs = zip(in_splits, shapes(equation.invars), shapes(body.invars), strict=True)
    out, results = _region(body, [_enter_shard_map(*x) for x in pairs], local)
    pairs = zip(results, shapes(body.outvars), shapes(equation.outvars), strict=True)
    return out, [_leave_shard_map(*x) for x in pairs]


_HANDLERS = {
    "device_put": _device_put,
    "jit": _jit,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}


# -- how values are sharded -------------------------------------------------------------------


def _splits_of(
    shardings: Sequence[Any], values: Sequence[Any], old: Sequence[Split]
) -> list[Split]:
    """Return the splits of values with these shardings."""
    triples = zip(shardings, values, old, strict=True)
    return [_sharding_split(sharding, v.aval.ndim, split) for sharding, v, split in triples]


def _sharding_split(sharding: Any, ndim: int, old: Split, free: Collection[int] = ()) -> Split:
    """Return the split by a sharding; `free` dimensions keep their old one.

    With a sharding other than `NamedSharding`, all dimensions do.
    """
    if not isinstance(sharding, jax.sharding.NamedSharding) or (free and old is None):
        return old
    sizes = sharding.mesh.shape
    count = lambda entry: prod(sizes[a] for a in (entry if isinstance(entry, tuple) else (entry,)))
    entries = [*sharding.spec, *(None,) * (ndim - len(sharding.spec))]
    return tuple(
        old[i] if old and i in free else 1 if entry is None else count(entry)
        for i, entry in enumerate(entries)
    )


def _enter_shard_map(split: Split, outer: Shape, inner: Shape) -> Split:
    """Return the split that a shard_map's argument has inside of it, along its other axes.

    >>> _enter_shard_map((2, 4), (8, 8), (4, 8)), _enter_shard_map(None, (8,), (4,))
    ((1, 4), None)
    """
    if split is None or 0 in inner:
        return None
    manual = (a // b for a, b in zip(outer, inner, strict=True))
    return tuple(
        max(shards // manual_shards, 1) for shards, manual_shards in zip(split, manual, strict=True)
    )


def _leave_shard_map(split: Split, inner: Shape, outer: Shape) -> Split:
    """Return the split of a shard_map's result outside of it, along all axes.

    >>> _leave_shard_map((1, 4), (4, 8), (8, 8))
    (2, 4)
    """
    if split is None or 0 in inner:
        return None
    return tuple(p * (b // a) for p, a, b in zip(split, inner, outer, strict=True))


def _result_split(operands: Sequence[Any], splits: Sequence[Split], shape: Shape) -> Split:
    """Return a result's split: of the first operand of which it is a copy, slice or view."""
    pairs = zip(splits, operands, strict=True)
    candidates = (_view_split(split, tuple(v.aval.shape), shape) for split, v in pairs)
    return next((split for split in candidates if split is not None), None)


def _view_split(split: Split, old: Shape, new: Shape) -> Split:
    """Return the split of a view or slice of an array, None if it is not known.

    >>> _view_split((1, 4), (6, 8), (1, 8)), _view_split((1, 4), (1, 8), (8,))
    ((1, 4), (4,))
    >>> _view_split((4,), (8,), (2,)) is None
    True
    """
    if split is None or not old:
        return None
    if len(old) == len(new):
        pairs = zip(old, new, split, strict=True)
        return split if all(a == b or shards == 1 for a, b, shards in pairs) else None
    dims = [(size, shards) for size, shards in zip(old, split, strict=True) if size > 1]
    if [size for size, _ in dims] != [size for size in new if size > 1]:
        return None
    shards = iter(shards for _, shards in dims)
    return tuple(next(shards) if size > 1 else 1 for size in new)
