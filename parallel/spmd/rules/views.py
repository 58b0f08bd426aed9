"""Rules of equations that move entries: broadcasts, reshapes, transposes, slices, concatenations.

A move says where a cut of what enters is found in what leaves, and the other way round. So it moves
a part as well as what is not made yet.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from hfjax.parallel.spmd.partition_context import Scope, aval_of
from hfjax.parallel.spmd.placements import Cut, Made, Part, Shape, Sum
from hfjax.parallel.spmd.rules.pointwise import is_fixed

Values = Sequence[Any]


class CutMove(NamedTuple):
    """How one equation moves a cut.

    Attributes:
        after: Cut of what enters -> that of what leaves, or None.
        before: Cut of what leaves -> that of what enters, or None.
        sizes: (shape of a part of what leaves, its cut) -> parameters of the equation for it.
        linear: Whether the move of a sum is the sum of moves, at no greater size.
    """

    after: Callable[[Cut], Cut | None]
    before: Callable[[Cut], Cut | None]
    sizes: Callable[[Shape, Cut], dict]
    linear: bool = True


def moved(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Move entries: a part stays one if a device has all it takes; a few are picked as a sum."""
    value, *rest = values
    out = aval_of(equation.outvars[0])
    move = MOVES[equation.primitive.name](scope, equation)
    larger = math.prod(out.shape) > math.prod(scope.shape(value))
    if isinstance(value, Part):
        cut = move.after(value.cut)
        if cut is None or not scope.side.divides(out.shape, cut):
            return _picked(scope, equation, value)
        local = scope.side.local(out.shape, cut)
        (found,) = scope.parts(cut, equation, [value.x, *rest], **move.sizes(local, cut))
        if larger or id(value) in scope.makes:  # the smaller one is gathered
            _, smaller = scope.makes.get(id(value), (None, value))
            scope.makes[id(found)] = found, _later(equation, move, smaller, rest)
        return [found]
    if isinstance(value, Sum) and move.linear and not scope.is_whole(value):
        return [Sum(x) for x in scope.bind(equation, [value.x, *rest])]
    if not (larger or isinstance(value, Made)) or scope.cut_of(out.shape) is None:
        return scope.bind(equation, [scope.whole(value), *rest])
    given = scope.whole(value) if isinstance(value, Sum) else value
    return [_later(equation, move, given, rest)]


def _later(equation: JaxprEqn, move: CutMove, given: Any, rest: Values) -> Made:
    """Return what a move makes of a value when it is asked for."""
    out = aval_of(equation.outvars[0])

    def make(scope: Scope, cut: Cut | None) -> Any:
        if cut is None:
            return scope.bind(equation, [scope.whole(given), *rest])[0]
        local, before = scope.side.local(out.shape, cut), move.before(cut)
        if before is None:
            return scope.taken(scope.bind(equation, [scope.whole(given), *rest])[0], cut)
        here = scope.whole(given) if before is WHOLE else scope.part(given, before)
        return scope.bind(equation, [here, *rest], **move.sizes(local, cut))[0]

    return Made(out.shape, out.dtype, make, not isinstance(given, Part) and is_fixed(given))


def _picked(scope: Scope, equation: JaxprEqn, value: Part) -> Values | None:
    """Return a slice of a few entries as a sum: who has an entry adds it, the others add zeros."""
    if equation.primitive.name != "slice" or value.cut.outer > 1:
        return None
    dim, p = value.cut.dim, equation.params
    size, each = scope.shape(value)[dim], value.x.shape[dim]
    strides = p["strides"] or (1,) * value.x.ndim
    wanted = np.arange(p["start_indices"][dim], p["limit_indices"][dim], strides[dim])
    if not 0 < len(wanted) <= each or jnp.issubdtype(value.x.dtype, jax.dtypes.prng_key):
        return None
    put = lambda values, x: (*values[:dim], x, *values[dim + 1 :])
    sizes = {
        "start_indices": put(p["start_indices"], 0),
        "limit_indices": put(p["limit_indices"], each),
        "strides": put(strides, 1),
    }
    (here,) = scope.bind(equation, [value.x], **sizes)
    numbers = scope.side.numbers(size, 1)
    found = numbers[None] == jnp.asarray(wanted, numbers.dtype)[:, None]  # [wanted, here]
    taken = jnp.take(here, found.argmax(1), axis=dim)
    shown = found.any(1).reshape(-1, *[1] * (here.ndim - dim - 1))
    return [Sum(jnp.where(shown[(None,) * dim], taken, jnp.zeros((), here.dtype)))]


WHOLE = Cut(-1)  # the part of a broadcast that needs all of what enters


def _broadcast(scope: Scope, equation: JaxprEqn) -> CutMove:
    dims, shape = equation.params["broadcast_dimensions"], equation.params["shape"]
    before = aval_of(equation.invars[0]).shape

    def enters(cut: Cut) -> Cut:
        at = dims.index(cut.dim) if cut.dim in dims else None
        return WHOLE if at is None or before[at] != shape[cut.dim] else cut.moved(at)

    sizes = lambda local, cut: {"shape": local}
    alike = math.prod(before) == math.prod(shape)
    return CutMove(lambda cut: cut.moved(dims[cut.dim]), enters, sizes, linear=alike)


def through_reshape(before: Shape, cut: Cut, after: Shape, pieces: int) -> Cut | None:
    """Return the cut, of an array that is reshaped, of which each device has the same entries."""
    blocks = math.prod(before[: cut.dim]) * cut.outer
    for dim, size in enumerate(after):
        ahead = math.prod(after[:dim])
        if size > 1 and blocks % ahead == 0 and size % (blocks // ahead * pieces) == 0:
            return Cut(dim, blocks // ahead)
    return None


def _reshape(scope: Scope, equation: JaxprEqn) -> CutMove:
    shape, before = equation.params["new_sizes"], aval_of(equation.invars[0]).shape
    if equation.params["dimensions"] is not None:
        nowhere = lambda cut: None
        return CutMove(nowhere, nowhere, lambda local, cut: {})
    through = lambda a, b: lambda cut: through_reshape(a, cut, b, scope.side.count)
    sizes = lambda local, cut: {"new_sizes": local}
    return CutMove(through(before, shape), through(shape, before), sizes)


def _transpose(scope: Scope, equation: JaxprEqn) -> CutMove:
    order = equation.params["permutation"]
    after = lambda cut: cut.moved(order.index(cut.dim))
    return CutMove(after, lambda cut: cut.moved(order[cut.dim]), lambda local, cut: {})


def _squeeze(scope: Scope, equation: JaxprEqn) -> CutMove:
    ndim = len(aval_of(equation.invars[0]).shape)
    left = [d for d in range(ndim) if d not in {d % ndim for d in equation.params["dimensions"]}]
    after = lambda cut: cut.moved(left.index(cut.dim)) if cut.dim in left else None
    return CutMove(after, lambda cut: cut.moved(left[cut.dim]), lambda local, cut: {})


def _rev(scope: Scope, equation: JaxprEqn) -> CutMove:
    same = lambda cut: None if cut.dim in equation.params["dimensions"] else cut
    return CutMove(same, same, lambda local, cut: {})


def _slice(scope: Scope, equation: JaxprEqn) -> CutMove:
    start, stop = equation.params["start_indices"], equation.params["limit_indices"]
    strides = equation.params["strides"] or (1,) * len(start)
    whole, devices = aval_of(equation.invars[0]).shape, scope.side.size

    def after(cut: Cut) -> Cut | None:
        d, size = cut.dim, whole[cut.dim]
        block, each = size // cut.outer, size // cut.outer // scope.side.count
        if stop[d] == start[d] or not each:
            return None
        if strides[d] == 1 and start[d] % block == 0 and stop[d] % block == 0:
            return Cut(d, (stop[d] - start[d]) // block)
        count = -(-(stop[d] - start[d]) // strides[d])
        every = each % strides[d] == 0 and start[d] < strides[d] and count * strides[d] == size
        return cut if every else None

    def before(cut: Cut) -> Cut | None:
        d = cut.dim
        return cut if (start[d], stop[d], strides[d]) == (0, whole[d], 1) else None

    def sizes(local: Shape, cut: Cut) -> dict:
        d = cut.dim
        first = start[d] // devices if strides[d] == 1 else start[d]
        last = first + (local[d] - 1) * strides[d] + 1
        put = lambda values, x: (*values[:d], x, *values[d + 1 :])
        return {"start_indices": put(start, first), "limit_indices": put(stop, last)}

    return CutMove(after, before, sizes)


def _tile(scope: Scope, equation: JaxprEqn) -> CutMove:
    times = equation.params["reps"]
    before = lambda cut: cut if times[cut.dim] == 1 else None
    return CutMove(
        lambda cut: Cut(cut.dim, cut.outer * times[cut.dim]), before, lambda local, cut: {}, False
    )


MOVES: dict[str, Callable[[Scope, JaxprEqn], CutMove]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _squeeze,
    "rev": _rev,
    "slice": _slice,
    "tile": _tile,
}


def iota(scope: Scope, equation: JaxprEqn, values: Values) -> Values:
    """Return numbers that are made for the part that is asked for."""
    shape, dim = equation.params["shape"], equation.params["dimension"]
    out = aval_of(equation.outvars[0])

    def make(scope: Scope, cut: Cut | None) -> Any:
        if cut is None:
            return scope.bind(equation, values)[0]
        local = scope.side.local(shape, cut)
        if cut.dim != dim:
            return scope.bind(equation, values, shape=local)[0]
        numbers = scope.side.numbers(shape[dim], cut.outer).astype(out.dtype)
        scope.tell("cut", numbers)
        return lax.broadcast_in_dim(numbers, local, (dim,))

    if scope.cut_of(shape) is None:
        return scope.bind(equation, values)
    return [Made(out.shape, out.dtype, make, fixed=True)]


def concatenate(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Concatenate parts beside the split dimension, or blocks of one size along it."""
    dim, parts = equation.params["dimension"], [v for v in values if isinstance(v, Part)]
    if not parts:
        if any(isinstance(v, Sum) for v in values):
            return [Sum(x) for x in scope.bind(equation, list(map(scope.sum, values)))]
        return [_joined(scope, equation, values)]
    cut = parts[0].cut
    if cut.dim != dim:
        (found,) = scope.parts(cut, equation, [scope.part(v, cut) for v in values])
        scope.pieces[id(found)] = (found, values)
        return [found]
    block = scope.shape(parts[0])[dim] // cut.outer
    values = [v for v in values if scope.shape(v)[dim]]
    sizes = [scope.shape(v)[dim] for v in values]
    if any(size % block for size in sizes):
        return None
    cuts = [Cut(dim, size // block) for size in sizes]
    if any(isinstance(v, Part) and v.cut != c for v, c in zip(values, cuts, strict=True)):
        return None
    here = [scope.part(v, c) for v, c in zip(values, cuts, strict=True)]
    return scope.parts(Cut(dim, sum(sizes) // block), equation, here)


def stack(scope: Scope, equation: JaxprEqn, values: Values) -> Values:
    """Stack parts beside each other, along a new dimension."""
    axis, cut = equation.params["axis"], next((v.cut for v in values if isinstance(v, Part)), None)
    if cut is None:
        if any(isinstance(v, Sum) for v in values):
            return [Sum(x) for x in scope.bind(equation, list(map(scope.sum, values)))]
        return scope.bind(equation, list(map(scope.whole, values)))
    at = cut.moved(cut.dim + (axis <= cut.dim))
    return scope.parts(at, equation, [scope.part(v, cut) for v in values])


def unstack(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Take what was stacked apart, along another dimension than the split one."""
    (x,), axis = values, equation.params["axis"]
    if not isinstance(x, Part) or x.cut.dim == axis:
        return None
    return scope.parts(x.cut.moved(x.cut.dim - (axis < x.cut.dim)), equation, [x.x])


def _joined(scope: Scope, equation: JaxprEqn, values: Values) -> Any:
    """Return what is concatenated when it is asked for, if some of it is not made yet."""
    out, dim = aval_of(equation.outvars[0]), equation.params["dimension"]
    if not any(isinstance(v, Made) for v in values) or scope.cut_of(out.shape) is None:
        return scope.bind(equation, list(map(scope.whole, values)))[0]

    def make(scope: Scope, cut: Cut | None) -> Any:
        if cut is None or cut.dim == dim:
            found = scope.bind(equation, list(map(scope.whole, values)))[0]
            return found if cut is None else scope.taken(found, cut)
        return scope.bind(equation, [scope.part(v, cut) for v in values])[0]

    found = Made(out.shape, out.dtype, make, all(map(is_fixed, values)))
    scope.pieces[id(found)] = (found, values)
    return found


def pad(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Pad other dimensions than the split one."""
    x, filling = scope.made(values[0]), values[1]
    if not isinstance(x, Part) or any(equation.params["padding_config"][x.cut.dim]):
        return None
    return scope.parts(x.cut, equation, [x.x, scope.whole(filling)])


def split(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Cut into pieces: along another dimension, or into whole blocks."""
    (x,), axis = values, equation.params["axis"]
    if not isinstance(x, Part):
        return None
    if axis != x.cut.dim:
        return [Part(piece, x.cut) for piece in scope.bind(equation, [x.x])]
    block = scope.shape(x)[axis] // x.cut.outer
    sizes = equation.params["sizes"]
    if any(size % block or not size for size in sizes):
        return None
    here = tuple(size // scope.side.size for size in sizes)
    pieces = scope.bind(equation, [x.x], sizes=here)
    return [Part(p, Cut(axis, n // block)) for p, n in zip(pieces, sizes, strict=True)]


def is_every_row(scope: Scope, value: object) -> bool:
    """Return whether a value is 0, 1, 2 … along its first dimension of some size, and that only."""
    if not isinstance(value, Made) or not value.fixed:
        return False
    with jax.ensure_compile_time_eval():
        numbers = np.asarray(value.make(scope.inside(told=[]), None)).reshape(-1)
    return bool((numbers == np.arange(numbers.size)).all())
