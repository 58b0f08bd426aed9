"""Reads the copies between device and host out of a jaxpr, where each value says where it lies."""

from collections.abc import Iterator, Sequence
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


def copies(jaxpr: Any) -> list[Copy]:
    """Return the copies of one run of a jaxpr; what nothing reads is not counted."""
    jaxpr, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    return _region(jaxpr, [None] * len(jaxpr.invars), False)[0]


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
        return _placed(equation, given, local), given
    if name == "scan":
        return _scan(equation, given, local)
    if name == "while":
        return _while(equation, given, local)
    if name == "cond":
        seen = [_region(branch.jaxpr, given[1:], local) for branch in equation.params["branches"]]
        return hlo.heaviest([found for found, _ in seen]), seen[0][1]
    if name == "shard_map":
        return _shard_map(equation, given, local)
    if name == "sharding_constraint" and not local:
        return [], [_constrained(equation, given[0])]
    if name == "optimization_barrier":
        return [], given
    bodies = list(bodies_of(equation))
    if len(bodies) == 1 and len(bodies[0].invars) == len(given):
        return _region(bodies[0], given, local)
    found = [c for body in bodies for c in _region(body, [None] * len(body.invars), local)[0]]
    shapes = [v.aval.shape for v in equation.invars]
    operands = [(Placement(split=s), shape) for s, shape in zip(given, shapes, strict=True)]
    return found, [follow(operands, v.aval.shape).split for v in results]


def _constrained(equation: Any, old: Shape | None) -> Shape | None:
    """Return how a constraint splits; other shardings than those of a mesh leave it as it was."""
    sharding, free = equation.params["sharding"], equation.params["unconstrained_dims"]
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return old
    sizes = sharding.mesh.shape
    count = lambda entry: prod(sizes[a] for a in (entry if isinstance(entry, tuple) else (entry,)))
    ndim = equation.outvars[0].aval.ndim
    entries = [*sharding.spec, *(None,) * (ndim - len(sharding.spec))]
    known = enumerate(1 if entry is None else entry for entry in entries)
    pieces = [None if i in free else e if e == 1 else count(e) for i, e in known]
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


def _placed(equation: Any, given: list[Shape | None], local: bool) -> list[Copy]:
    found = []
    for old, new, split in zip(equation.invars, equation.outvars, given, strict=True):
        shape = tuple(new.aval.shape)
        lies = Placement(lies_on_host(old), (1,) * len(shape) if local else split)
        found += lies.copied(lies_on_host(new), new.aval.dtype.name, shape)[1]
    return found


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
