"""Reads the copies between device and host out of a jaxpr, where each value says where it lies.

How an array is split over devices a jaxpr says in places only: in the shardings of arguments and
constraints. So the walk carries along in how many pieces each dimension of a value is split.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var
from jax.interpreters import partial_eval

from hfjax.analysis import hlo
from hfjax.parallel.jaxprs.program import bodies_of, parts_of_scan

TO_HOST, TO_DEVICE = "to host", "to device"
HOST = jax.memory.Space.Host
Shape = tuple[int, ...]
Split = Shape | None  # the pieces of each dimension; None: the program does not say


@dataclasses.dataclass(frozen=True)
class Copy(hlo.Transfer):
    """A copy between the memories of device and host; its kind is its direction."""

    whole: bool = False  # the shape is of the whole array: how it is split is not said


Seen = tuple[list[Copy], list[Split]]  # what a region copies, and how its results are split


def copies(jaxpr: Any, arguments: Sequence[Any], results: Sequence[Any]) -> list[Copy]:
    """Return the copies of one run of a jaxpr; what nothing reads is not counted.

    `arguments` and `results` are their shardings, None where they are not known.
    """
    meshes = [sharding.mesh for sharding in (*arguments, *results) if hasattr(sharding, "mesh")]
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars), True)
    local = all(mesh.size <= 1 for mesh in (*meshes, *_meshes(jaxpr)))
    given = _divided(arguments, jaxpr.invars, [None] * len(jaxpr.invars))
    found, splits = _region(jaxpr, given, local)
    for value, split, sharding in zip(jaxpr.outvars, splits, results, strict=True):
        kind = getattr(sharding, "memory_kind", None)
        if kind is not None:
            found += _sent(value, kind != "device", split, local)
    return found


def _meshes(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield the meshes that a program names."""
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values())):
            mesh = getattr(value, "mesh", value)
            if isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
                yield mesh
        for body, _ in bodies_of(equation):
            yield from _meshes(body)


# -- a walk over the equations; `local`: shapes are those of one device -----------------------


def _region(jaxpr: Jaxpr, splits: Sequence[Split], local: bool) -> Seen:
    """Return what one run through a jaxpr copies, and how its results are split."""
    known: dict[Var, Split] = dict(zip(jaxpr.invars, splits, strict=True))
    split = lambda value: None if isinstance(value, Literal) else known.get(value)
    found: list[Copy] = []
    for equation in jaxpr.eqns:
        sent, results = _visit(equation, list(map(split, equation.invars)), local)
        found += sent
        known.update(zip(equation.outvars, results, strict=True))
    return found, list(map(split, jaxpr.outvars))


def _visit(equation: Any, given: list[Split], local: bool) -> Seen:
    name, results, params = equation.primitive.name, equation.outvars, equation.params
    if name in _READ:
        return _READ[name](equation, given, local)
    if name == "sharding_constraint" and not local:
        ndim, free = results[0].aval.ndim, params["unconstrained_dims"]
        return [], [_constrained(params["sharding"], ndim, given[0], free)]
    if name == "optimization_barrier":
        return [], given
    bodies = [body for body, _ in bodies_of(equation)]
    if len(bodies) == 1 and len(bodies[0].invars) == len(given):
        return _region(bodies[0], given, local)
    found = [c for body in bodies for c in _region(body, [None] * len(body.invars), local)[0]]
    return found, [_followed(equation.invars, given, v.aval.shape) for v in results]


def _placed(equation: JaxprEqn, given: list[Split], local: bool) -> Seen:
    splits = _divided(equation.params["devices"], equation.invars, given)
    found = []
    for old, new, split in zip(equation.invars, equation.outvars, splits, strict=True):
        found += _sent(old, lies_on_host(new), split, local)
    return found, splits


def _sent(value: Any, to_host: bool, split: Split, local: bool) -> list[Copy]:
    """Return the copy of a value into one of the memories; none if it lies there."""
    if lies_on_host(value) == to_host:
        return []
    shape = tuple(value.aval.shape)
    if split is not None and not local:
        shape = tuple(-(-size // pieces) for size, pieces in zip(shape, split, strict=True))
    kind = TO_HOST if to_host else TO_DEVICE
    return [Copy(kind, (), value.aval.dtype.name, shape, whole=split is None and not local)]


def lies_on_host(value: Any) -> bool:
    """Return whether a variable of a program lies in host memory."""
    return getattr(value.aval, "memory_space", None) == HOST


def _jit(equation: JaxprEqn, given: list[Split], local: bool) -> Seen:
    params = equation.params
    inside = _divided(params["in_shardings"], equation.invars, given)
    found, results = _region(params["jaxpr"].jaxpr, inside, local)
    return found, _divided(params["out_shardings"], equation.outvars, results)


def _scan(equation: JaxprEqn, given: list[Split], local: bool) -> Seen:
    """Return the copies of a scan: over the rows of what is neither constant nor carried."""
    constants, carried = parts_of_scan(equation)
    row = lambda split: split[1:] if split and split[0] == 1 else None
    stack = lambda split: None if split is None else (1, *split)
    whole, stacks = given[: constants + carried], given[constants + carried :]
    body = equation.params["jaxpr"].jaxpr
    found, results = _region(body, [*whole, *map(row, stacks)], local)
    after = [*results[:carried], *map(stack, results[carried:])]
    return hlo.loop(equation.params["length"], found, []), after


def _while(equation: JaxprEqn, given: list[Split], local: bool) -> Seen:
    params = equation.params
    tests, constants = params["cond_nconsts"], params["body_nconsts"]
    carried = given[tests + constants :]
    body, condition = params["body_jaxpr"].jaxpr, params["cond_jaxpr"].jaxpr
    found, results = _region(body, [*given[tests : tests + constants], *carried], local)
    tested, _ = _region(condition, [*given[:tests], *carried], local)
    return hlo.loop(None, found, tested), results


def _cond(equation: JaxprEqn, given: list[Split], local: bool) -> Seen:
    seen = [_region(branch.jaxpr, given[1:], local) for branch in equation.params["branches"]]
    return hlo.heaviest([found for found, _ in seen]), seen[0][1]


def _shard_map(equation: JaxprEqn, given: list[Split], local: bool) -> Seen:
    """Return the copies of a shard_map; over all axes its shapes are those of one device."""
    params = equation.params
    body, mesh = params["jaxpr"], params["mesh"]
    manual = params.get("newly_manual_axes", params.get("manual_axes", mesh.axis_names))
    local = local or all(n == 1 for axis, n in mesh.shape.items() if axis not in manual)
    shapes = lambda values: [tuple(v.aval.shape) for v in values]
    pairs = zip(given, shapes(equation.invars), shapes(body.invars), strict=True)
    found, results = _region(body, [_entered(*x) for x in pairs], local)
    pairs = zip(results, shapes(body.outvars), shapes(equation.outvars), strict=True)
    return found, [_left(*x) for x in pairs]


_READ = {
    "device_put": _placed,
    "jit": _jit,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "shard_map": _shard_map,
}


# -- how values are split ---------------------------------------------------------------------


def _divided(shardings: Sequence[Any], values: Sequence[Any], old: Sequence[Split]) -> list[Split]:
    """Return how values of these shardings are split."""
    triples = zip(shardings, values, old, strict=True)
    return [_constrained(sharding, v.aval.ndim, split) for sharding, v, split in triples]


def _constrained(sharding: Any, ndim: int, old: Split, free: Collection[int] = ()) -> Split:
    """Return how a sharding splits; `free` dimensions stay as they were.

    Of others than those of a mesh all dimensions do.
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


def _entered(split: Split, outer: Shape, inner: Shape) -> Split:
    """Return how what enters a shard_map is split further in there, along its other axes.

    >>> _entered((2, 4), (8, 8), (4, 8)), _entered(None, (8,), (4,))
    ((1, 4), None)
    """
    if split is None or 0 in inner:
        return None
    manual = (a // b for a, b in zip(outer, inner, strict=True))
    return tuple(max(pieces // own, 1) for pieces, own in zip(split, manual, strict=True))


def _left(split: Split, inner: Shape, outer: Shape) -> Split:
    """Return how what leaves a shard_map is split, along all axes.

    >>> _left((1, 4), (4, 8), (8, 8))
    (2, 4)
    """
    if split is None or 0 in inner:
        return None
    return tuple(p * (b // a) for p, a, b in zip(split, inner, outer, strict=True))


def _followed(operands: Sequence[Any], splits: Sequence[Split], shape: Shape) -> Split:
    """Return how a result is split: as the first operand of which it is a copy, slice or view."""
    pairs = zip(splits, operands, strict=True)
    found = (_viewed(split, tuple(v.aval.shape), shape) for split, v in pairs)
    return next((split for split in found if split is not None), None)


def _viewed(split: Split, old: Shape, new: Shape) -> Split:
    """Return how a view or slice of an array is split, None if that cannot be told.

    >>> _viewed((1, 4), (6, 8), (1, 8)), _viewed((1, 4), (1, 8), (8,)), _viewed((4,), (8,), (2,))
    ((1, 4), (4,), None)
    """
    if split is None or not old:
        return None
    if len(old) == len(new):
        pairs = zip(old, new, split, strict=True)
        return split if all(a == b or pieces == 1 for a, b, pieces in pairs) else None
    kept = [(size, pieces) for size, pieces in zip(old, split, strict=True) if size > 1]
    if [size for size, _ in kept] != [size for size in new if size > 1]:
        return None
    pieces = iter(pieces for _, pieces in kept)
    return tuple(next(pieces) if size > 1 else 1 for size in new)
