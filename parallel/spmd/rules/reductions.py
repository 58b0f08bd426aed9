"""Rules of equations in which entries meet: reductions, products, cumulative sums, convolutions."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn

from hfjax.parallel.spmd.partition_context import Scope, aval_of
from hfjax.parallel.spmd.placements import Part, Sum

Values = Sequence[Any]


def reduction(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Reduce a part: a sum over rows stays a sum, other reductions are completed."""
    (value,), axes = values, equation.params["axes"]
    value = scope.made(value)
    name = equation.primitive.name
    if isinstance(value, Sum) and name == "reduce_sum":
        return [Sum(x) for x in scope.bind(equation, [value.x])]
    if not isinstance(value, Part):
        return scope.bind(equation, [scope.whole(value)])
    cut = value.cut
    if cut.dim not in axes:
        left = cut.dim - sum(a < cut.dim for a in axes)
        return scope.parts(cut.moved(left), equation, [value.x])
    if name == "reduce_sum":
        return [Sum(x) for x in scope.bind(equation, [value.x])]
    over = _OVER.get(name)
    if over is None:
        return None
    how, run = over
    found = run(scope, equation, value)
    if found is None:
        return None
    scope.tell(how, found)
    return [found]


def _extreme(scope: Scope, equation: JaxprEqn, value: Part) -> jax.Array:
    """Return the greatest or least of all rows; ties, on whatever device, share the derivative."""
    side, axes = scope.side, equation.params["axes"]
    complete = side.greatest if equation.primitive.name == "reduce_max" else side.least
    local = lambda x: scope.bind(equation, [x])[0]
    if not jnp.issubdtype(value.x.dtype, jnp.inexact):
        return complete(local(value.x))
    extreme = jax.custom_jvp(lambda x: complete(local(x)))

    @extreme.defjvp
    def _shares(primals: Any, tangents: Any) -> Any:
        (x,), (dx,) = primals, tangents
        found = complete(local(lax.stop_gradient(x)))
        ties = (x == jnp.expand_dims(found, axes)).astype(x.dtype)
        count = side.total(ties.sum(axes))
        return found, side.total((dx * ties).sum(axes)) / count

    return extreme(value.x)


def _of_each(scope: Scope, equation: JaxprEqn, value: Part) -> Any:
    """Reduce what each device makes of its own: a product, or bits."""
    here = scope.side.stacked(scope.bind(equation, [value.x])[0])
    return scope.bind(equation, [here], axes=(0,))[0]


def _position(scope: Scope, equation: JaxprEqn, value: Part) -> jax.Array | None:
    """Return where the greatest or least of all rows is: the first one, as on one device."""
    (dim,), side = equation.params["axes"], scope.side
    if value.cut.outer > 1:
        return None
    (here,) = scope.bind(equation, [value.x])
    best = jnp.take_along_axis(value.x, jnp.expand_dims(here, dim), dim).squeeze(dim)
    numbers = side.numbers(scope.shape(value)[dim], 1, here.dtype)
    where, bests = side.stacked(numbers[here]), side.stacked(best)
    if side.pieces:  # of equals the first
        in_order = where.argsort(0)
        where, bests = (jnp.take_along_axis(x, in_order, 0) for x in (where, bests))
    (device,) = scope.bind(equation, [bests], axes=(0,))
    return jnp.take_along_axis(where, device[None], 0)[0]


_OVER: dict[str, tuple[str, Callable]] = {
    "reduce_max": ("greatest", _extreme),
    "reduce_min": ("least", _extreme),
    "reduce_or": ("gather", _of_each),
    "reduce_and": ("gather", _of_each),
    "reduce_xor": ("gather", _of_each),
    "reduce_prod": ("gather", _of_each),
    "argmax": ("greatest", _position),
    "argmin": ("least", _position),
}


def cumulative(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Run beside the split dimension; a sum along it begins with what earlier devices have."""
    (value,) = values
    axis, name = equation.params["axis"], equation.primitive.name
    if isinstance(value, Sum) and name == "cumsum":
        return [Sum(x) for x in scope.bind(equation, [value.x])]
    if not isinstance(value, Part):
        return scope.bind(equation, [scope.whole(value)])
    if value.cut.dim != axis:
        return scope.parts(value.cut, equation, [value.x])
    if name != "cumsum" or value.cut.outer > 1:
        return None
    side, backward = scope.side, equation.params["reverse"]
    number = len(side.held[0])
    pieces = value.x.reshape(*value.x.shape[:axis], number, -1, *value.x.shape[axis + 1 :])
    (here,) = scope.bind(equation, [pieces], axis=axis + 1)
    totals = jnp.moveaxis(pieces.sum(axis + 1, dtype=here.dtype), axis, 0)
    totals = side.stacked(totals)  # [devices, pieces of each, ...]
    scope.tell("gather", totals)
    of_all, mine = jnp.asarray(side.held), side.held_here
    later = of_all[None] > mine[:, None, None]
    before = later if backward else of_all[None] < mine[:, None, None]
    before = before.reshape(*before.shape, *[1] * (totals.ndim - 2))
    first = jnp.where(before, totals[None], 0).sum((1, 2))
    first = jnp.expand_dims(jnp.moveaxis(first, 0, axis), axis + 1)
    return [Part((here + first.astype(here.dtype)).reshape(value.x.shape), value.cut)]


def dot_general(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Multiply: over rows it is a sum; of rows of both the smaller is gathered."""
    a, b = values
    (over_a, over_b), (batch_a, batch_b) = equation.params["dimension_numbers"]
    bind = lambda *arrays: scope.bind(equation, arrays)[0]
    if isinstance(a, Part) and isinstance(b, Part) and not _aligned(a, b, over_a, over_b):
        if not _aligned(a, b, batch_a, batch_b):
            keep_a = a.x.size >= b.x.size
            a, b = (a, scope.whole(b)) if keep_a else (scope.whole(a), b)
    part, first = (a, True) if isinstance(a, Part) else (b, False)
    if not isinstance(part, Part):
        return _dot_of_sums(scope, bind, a, b)
    over, other_over = (over_a, over_b) if first else (over_b, over_a)
    batch, other_batch = (batch_a, batch_b) if first else (batch_b, batch_a)
    other, cut = (b, part.cut) if first else (a, part.cut)
    ordered = lambda mine, others: bind(mine, others) if first else bind(others, mine)
    if cut.dim in over:
        at = cut.moved(other_over[over.index(cut.dim)])
        return [Sum(ordered(part.x, scope.part(other, at)))]
    if cut.dim in batch:
        at = cut.moved(other_batch[batch.index(cut.dim)])
        return [Part(ordered(part.x, scope.part(other, at)), cut.moved(batch.index(cut.dim)))]
    free = [d for d in range(part.x.ndim) if d not in over and d not in batch]
    ahead = len(batch)
    if not first:
        ahead += len(scope.shape(a)) - len(over_a) - len(batch_a)
    found = ordered(part.x, scope.whole(other))
    return [Part(found, cut.moved(ahead + free.index(cut.dim)))]


def _aligned(a: Part, b: Part, dims_a: Sequence[int], dims_b: Sequence[int]) -> bool:
    pairs = zip(dims_a, dims_b, strict=True)
    return any(a.cut.dim == x and b.cut == a.cut.moved(y) for x, y in pairs)


def _dot_of_sums(scope: Scope, bind: Callable, a: Any, b: Any) -> Values:
    if isinstance(a, Sum) and isinstance(b, Sum):
        a, b = (scope.whole(a), b) if a.x.size <= b.x.size else (a, scope.whole(b))
    if isinstance(a, Sum) and not scope.is_whole(a):
        return [Sum(bind(a.x, scope.whole(b)))]
    if isinstance(b, Sum) and not scope.is_whole(b):
        return [Sum(bind(scope.whole(a), b.x))]
    return [bind(scope.whole(a), scope.whole(b))]


def convolution(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Convolve rows with a whole kernel, of width 1 along them; with a kernel of rows: a sum."""
    x, kernel = values
    numbers, groups = equation.params["dimension_numbers"], equation.params["batch_group_count"]
    of_x, of_kernel, of_out = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    if groups != 1 or not isinstance(x, Part):
        return None
    if x.cut.dim == of_x[0]:
        return scope.parts(x.cut.moved(of_out[0]), equation, [x.x, scope.whole(kernel)])
    if x.cut.dim in of_x[2:] and _stays(equation, of_x[2:].index(x.cut.dim)):
        at = of_out[2:][of_x[2:].index(x.cut.dim)]
        return scope.parts(x.cut.moved(at), equation, [x.x, scope.whole(kernel)])
    if x.cut.dim == of_x[1] and equation.params["feature_group_count"] == 1:
        here = scope.part(kernel, x.cut.moved(of_kernel[1]))
        return [Sum(x) for x in scope.bind(equation, [x.x, here])]
    return None


def _stays(equation: JaxprEqn, place: int) -> bool:
    """Return whether a convolution leaves the positions along a spatial dimension as they are."""
    p = equation.params
    kernel = aval_of(equation.invars[1]).shape[p["dimension_numbers"].rhs_spec[2:][place]]
    how = p["window_strides"][place], p["lhs_dilation"][place], tuple(p["padding"][place])
    return kernel == 1 and how == (1, 1, (0, 0))


# What works on some of the last dimensions, and on whatever is before them alike.
def trailing(count: Callable[[JaxprEqn], int]) -> Callable:
    """Return the rule of an equation that works on so many of its last dimensions."""

    def rule(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
        """Work on the last dimensions, where another one is split."""
        parts = [v for v in values if isinstance(v, Part)]
        if not parts:
            return None
        cut, inner = parts[0].cut, count(equation)
        if cut.dim >= len(scope.shape(values[0])) - inner:
            return None
        found = scope.bind(equation, [scope.part(v, cut) for v in values])
        return [Part(x, cut) for x in found]

    return rule


def windows(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Pool, or reduce windows of, other dimensions than the split one."""
    parts = [v for v in values if isinstance(v, Part)]
    if not parts:
        return None
    cut, p = parts[0].cut, equation.params
    ones = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    flat = all(p[name][cut.dim] == 1 for name in ones if p.get(name) is not None)
    if not flat or any(p["padding"][cut.dim]):
        return None
    part = lambda v: scope.part(v, cut) if scope.shape(v) else scope.whole(v)
    return [Part(x, cut) for x in scope.bind(equation, list(map(part, values)))]


def sort(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Sort, or take the greatest few, along another dimension than the split one."""
    cut, p = next((v.cut for v in values if isinstance(v, Part)), None), equation.params
    dim = p["axis"] if equation.primitive.name == "top_k" else p["dimension"]
    if cut is None or cut.dim == dim % len(scope.shape(values[0])):
        return None
    return [Part(x, cut) for x in scope.bind(equation, [scope.part(v, cut) for v in values])]


RULES: dict[str, Callable] = {
    **dict.fromkeys(
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split(),
        reduction,
    ),
    "reduce_xor": reduction,
    **dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp".split(), cumulative),
    "dot_general": dot_general,
    "conv_general_dilated": convolution,
    "sort": sort,
    "top_k": sort,
    "fft": trailing(lambda equation: len(equation.params["fft_lengths"])),
    **dict.fromkeys(
        "cholesky eigh eig lu qr geqrf householder_product svd triangular_solve schur".split(),
        trailing(lambda equation: 2),
    ),
    **dict.fromkeys(
        (
            "reduce_window reduce_window_max reduce_window_min reduce_window_sum "
            "select_and_gather_add select_and_scatter_add"
        ).split(),
        windows,
    ),
}
