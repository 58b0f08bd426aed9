"""Reads the copies between device and host out of a jaxpr, where each value says where it lies."""

from collections.abc import Collection, Iterator, Sequence
from math import prod
from typing import Any

import jax
from jax.extend.core import Literal, Var
from jax.interpreters import partial_eval

from hfjax.analysis import hlo
from hfjax.analysis.memory_copies import Copy, Placement, Shape, constrained, entered, follow, left

HOST = jax.memory.Space.Host
Known = dict[Var, Shape | None]  # how what lies outside of a shard_map is split
Seen = tuple[list[Copy], list[Shape | None]]


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


def _meshes(jaxpr: Any) -> Iterator[Any]:
    """Yield the meshes that a program names."""
    for equation in jaxpr.eqns:
        for value in jax.tree.leaves(list(equation.params.values())):
            mesh = getattr(value, "mesh", value)
            if isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
                yield mesh
        for body in bodies_of(equation):
            yield from _meshes(body)


def _region(jaxpr: Any, splits: Sequence[Shape | None], local: bool) -> Seen:
    """Return what one run through a jaxpr copies, and how its results are split."""
    known: Known = dict(zip(jaxpr.invars, splits, strict=True))
    found: list[Copy] = []
    for equation in jaxpr.eqns:
        given = [_split(v, known) for v in equation.invars]
        copies, results = _visit(equation, given, local)
        found += copies
        known.update(zip(equation.outvars, results, strict=True))
    return found, [_split(v, known) for v in jaxpr.outvars]


def _split(value: Any, known: Known) -> Shape | None:
    return None if isinstance(value, Literal) else known.get(value)


def _visit(equation: Any, given: list[Shape | None], local: bool) -> Seen:
    name, results = equation.primitive.name, equation.outvars
    if name == "device_put":
        return _placed(equation, given, local)
    if name == "scan":
        return _scan(equation, given, local)
    if name == "while":
        return _while(equation, given, local)
    if name == "cond":
        seen = [_region(branch.jaxpr, given[1:], local) for branch in equation.params["branches"]]
        return hlo.heaviest([found for found, _ in seen]), seen[0][1]
    if name == "jit":
        shardings = equation.params["in_shardings"], equation.params["out_shardings"]
        inside = _divided(shardings[0], equation.invars, given)
        found, after = _region(equation.params["jaxpr"].jaxpr, inside, local)
        return found, _divided(shardings[1], results, after)
    if name == "shard_map":
        return _shard_map(equation, given, local)
    if name == "sharding_constraint" and not local:
        sharding, free = equation.params["sharding"], equation.params["unconstrained_dims"]
        return [], [_constrained(sharding, results[0].aval.ndim, given[0], free)]
    if name == "optimization_barrier":
        return [], given
    bodies = list(bodies_of(equation))
    if len(bodies) == 1 and len(bodies[0].invars) == len(given):
        return _region(bodies[0], given, local)
    found = [c for body in bodies for c in _region(body, [None] * len(body.invars), local)[0]]
    shapes = [v.aval.shape for v in equation.invars]
    operands = [(Placement(split=s), shape) for s, shape in zip(given, shapes, strict=True)]
    return found, [follow(operands, v.aval.shape).split for v in results]


def _divided(
    shardings: Sequence[Any], values: Sequence[Any], old: Sequence[Shape | None]
) -> list[Shape | None]:
    """Return how values of these shardings are split."""
    triples = zip(shardings, values, old, strict=True)
    return [_constrained(sharding, v.aval.ndim, split) for sharding, v, split in triples]


def _constrained(
    sharding: Any, ndim: int, old: Shape | None, free: Collection[int] = ()
) -> Shape | None:
    """Return how a sharding splits; others than those of a mesh leave it as it was."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return old
    sizes = sharding.mesh.shape
    count = lambda entry: prod(sizes[a] for a in (entry if isinstance(entry, tuple) else (entry,)))
    entries = [*sharding.spec, *(None,) * (ndim - len(sharding.spec))]
    counted = lambda entry: 1 if entry is None else count(entry)
    pieces = [None if i in free else counted(entry) for i, entry in enumerate(entries)]
    return constrained(pieces, old)


def _shard_map(equation: Any, given: list[Shape | None], local: bool) -> Seen:
    """Return the copies of a shard_map; over all axes its shapes are those of one device."""
    params = equation.params
    body, mesh = params["jaxpr"], params["mesh"]
    manual = params.get("newly_manual_axes", params.get("manual_axes", mesh.axis_names))
    local = local or all(n == 1 for axis, n in mesh.shape.items() if axis not in manual)
    shapes = lambda values: [tuple(v.aval.shape) for v in values]
    pairs = zip(given, shapes(equation.invars), shapes(body.invars), strict=True)
    found, results = _region(body, [entered(*x) for x in pairs], local)
    pairs = zip(results, shapes(body.outvars), shapes(equation.outvars), strict=True)
    return found, [left(*x) for x in pairs]


def bodies_of(equation: Any) -> Iterator[Any]:
    """Yield the programs that an equation calls: once each, whatever it hands them."""
    if equation.primitive.name == "pallas_call":
        return
    for value in equation.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(body, "jaxpr", None), "eqns"):
                yield body.jaxpr
            elif hasattr(body, "eqns"):
                yield body


def _placed(equation: Any, given: list[Shape | None], local: bool) -> Seen:
    splits = _divided(equation.params["devices"], equation.invars, given)
    triples = zip(equation.invars, equation.outvars, splits, strict=True)
    return [
        c for old, new, split in triples for c in _sent(old, lies_on_host(new), split, local)
    ], splits


def _sent(value: Any, to_host: bool, split: Shape | None, local: bool) -> list[Copy]:
    shape = tuple(value.aval.shape)
    lies = Placement(lies_on_host(value), (1,) * len(shape) if local else split)
    return lies.copied(to_host, value.aval.dtype.name, shape)[1]


def lies_on_host(value: Any) -> bool:
    """Return whether a variable of a program lies in host memory."""
    return getattr(value.aval, "memory_space", None) == HOST


def _scan(equation: Any, given: list[Shape | None], local: bool) -> Seen:
    """Return the copies of a scan; a stack that it goes over has a dimension more than its rows."""
    body = equation.params["jaxpr"].jaxpr
    stacked = lambda outer, inner: outer.aval.ndim > inner.aval.ndim
    row = lambda split: split[1:] if split and split[0] == 1 else None
    pairs = zip(equation.invars, body.invars, given, strict=True)
    inside = [row(split) if stacked(outer, inner) else split for outer, inner, split in pairs]
    found, results = _region(body, inside, local)
    stack = lambda split: None if split is None else (1, *split)
    pairs = zip(equation.outvars, body.outvars, results, strict=True)
    after = [stack(split) if stacked(outer, inner) else split for outer, inner, split in pairs]
    return hlo.loop(equation.params["length"], found, []), after


def _while(equation: Any, given: list[Shape | None], local: bool) -> Seen:
    params = equation.params
    tests, constants = params["cond_nconsts"], params["body_nconsts"]
    carried = given[tests + constants :]
    body, condition = params["body_jaxpr"].jaxpr, params["cond_jaxpr"].jaxpr
    found, results = _region(body, [*given[tests : tests + constants], *carried], local)
    tested, _ = _region(condition, [*given[:tests], *carried], local)
    return hlo.loop(None, found, tested), results
