"""What of a program does not keep the entries of one dimension apart: a whitelist of operations.

A program is traced with a length that divides no other dimension, so that each dimension of an
array tells whether entries lie along it. What contracts, shifts, sums or counts along such a
dimension is found, and so is what is not known to keep entries apart. Whether a program is the same
for every length, the traces of two lengths tell.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from numbers import Number
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal

from hfjax.parallel.autodiff.program import CALLS
from hfjax.parallel.autodiff.varying_state import bodies, closed_bodies


def mixes(
    jaxpr: Any, length: int, in_loss: bool, place: str = "", outer: bool = False
) -> Iterator[tuple[str, str]]:
    """Yield (what, where) of each equation that does not keep positions apart.

    Args:
        jaxpr: The equations.
        length: What divides the size of a dimension along which positions lie, and of no other.
        in_loss: Whether sums over positions are allowed.
        place: The line around.
        outer: Whether a reshape may cut a dimension, if positions are the outer part of it before
            and after; then they may not become the inner part.
    """
    along = lambda size: isinstance(size, int) and size > 0 and size % length == 0
    for equation in jaxpr.eqns:
        line = source_info_util.summarize(equation.source_info) or place
        inner = list(bodies(equation))
        shapes = [_shape(v) for v in (*equation.invars, *equation.outvars)]
        if any(sum(map(along, _shape(v))) > 1 for v in equation.outvars):
            yield "pairs", line
        if any(along(size) for shape in shapes for size in shape) or equation.primitive.name in (
            "iota",
            "scan",
        ):
            what = _mixed(equation, along, in_loss, outer)
            if what:
                yield what, line
        for body in inner:
            yield from mixes(body, length, in_loss, line, outer)


def constants_along(program: Any, length: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes of arrays that a program closes over and that have an entry per position."""
    for x in getattr(program, "consts", ()):
        if any(n and n % length == 0 for n in x.shape) and (
            isinstance(x, Tracer) or len(np.unique(_numbers(x))) > 1
        ):
            yield x.shape
    for equation in program.eqns:
        for body in closed_bodies(equation):
            yield from constants_along(body, length)


def differences(
    one: Any, two: Any, lengths: Sequence[tuple[Any, Any]], place: str = "an array"
) -> Iterator[tuple[str, str]]:
    """Yield (what, where) for all that traces of two lengths do not do alike.

    They are the same program if all is equal but dimensions, which may grow with the length: one of
    these pairs says how long it is in either trace.
    """
    alike = partial(_in_proportion, lengths)
    given = [getattr(program, "consts", ()) for program in (one, two)]
    if len(given[0]) != len(given[1]) or not all(map(_equal_constants, *given)):
        yield NUMBERS, place
    one, two = (getattr(program, "jaxpr", program) for program in (one, two))
    twins = dict(zip((*one.constvars, *one.invars), (*two.constvars, *two.invars), strict=False))
    same = lambda v, w: isinstance(v, Literal) or twins.get(v) is w
    for a, b in zip_longest(one.eqns, two.eqns):
        line = source_info_util.summarize((a or b).source_info) or place
        if a is None or b is None or not _same_operation(a, b, alike):
            yield OTHER, line
            return
        if not all(map(same, a.invars, b.invars)):
            yield OTHER, line
        twins.update(zip(a.outvars, b.outvars, strict=True))
        pairs = zip(a.invars, b.invars, strict=True)
        literals = all(_equal(v.val, w.val) for v, w in pairs if isinstance(v, Literal))
        if not literals or not all(alike(a.params[name], b.params.get(name)) for name in a.params):
            yield NUMBERS, line
        for body, other in zip(closed_bodies(a), closed_bodies(b), strict=True):
            yield from differences(body, other, lengths, line)
    if not all(map(same, one.outvars, two.outvars)):
        yield OTHER, place


NUMBERS = "computes with the number of"
OTHER = "does something else with another number of"


def _same_operation(a: JaxprEqn, b: JaxprEqn, alike: Callable) -> bool:
    """Return whether two equations are of one kind, on arrays of one form."""
    if a.primitive.name != b.primitive.name or len(list(bodies(a))) != len(list(bodies(b))):
        return False
    ones, twos = (*a.invars, *a.outvars), (*b.invars, *b.outvars)
    return len(ones) == len(twos) and all(
        isinstance(v, Literal) == isinstance(w, Literal) and alike(_shape(v), _shape(w))
        for v, w in zip(ones, twos, strict=True)
    )


def _in_proportion(
    lengths: Sequence[tuple[Any, Any]], a: Any, b: Any, inside: bool = False
) -> bool:
    """Return whether parameters of an operation are equal; numbers in tuples may be dimensions."""
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        pairs = list(zip(a, b, strict=False))
        return len(a) == len(b) and all(_in_proportion(lengths, v, w, True) for v, w in pairs)
    if inside and isinstance(a, int) and isinstance(b, int):
        return a == b or any(a * two == b * one for one, two in lengths)
    return not isinstance(a, Number) or _equal(a, b)


def _equal(a: Any, b: Any) -> bool:
    a, b = np.asarray(a), np.asarray(b)
    return a.shape == b.shape and bool(np.all((a == b) | (a != a) & (b != b)))  # or no numbers


def _equal_constants(a: Any, b: Any) -> bool:
    """Return whether closed-over arrays have the same numbers, each once where shapes differ."""
    if isinstance(a, Tracer) or isinstance(b, Tracer):
        return a is b
    a, b = map(_numbers, (a, b))
    return _equal(a, b) if a.shape == b.shape else _equal(np.unique(a), np.unique(b))


def _numbers(x: Any) -> np.ndarray:
    held = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if held else x)


def _shape(v: Any) -> tuple[int, ...]:
    return getattr(v.aval, "shape", ())


def _mixed(
    equation: JaxprEqn, along: Callable[[Any], bool], in_loss: bool, outer: bool
) -> str | None:
    """Return what an equation does along the sequence, None if it keeps positions apart."""
    name, params = equation.primitive.name, equation.params
    shapes, outs = map(_shape, equation.invars), [_shape(v) for v in equation.outvars]
    shapes = list(shapes)
    if name == "iota":
        return "counts" if along(params["shape"][params["dimension"]]) else None
    if name == "scan":
        return "runs a loop over" if along(params["length"]) else None
    if name in MOVES:
        whole = shapes[0] if name == "dynamic_update_slice" else outs[0]
        parts = [shape for shape in shapes if len(shape) == len(whole)]
        pairs = [(a, b) for part in parts for a, b in zip(part, whole, strict=True) if a != b]
        return "cuts or joins" if any(along(a) or along(b) for a, b in pairs) else None
    if name == "reshape":
        keeps = _stays_outer if outer else _keeps_order
        return None if keeps(shapes[0], outs[0], along) else "rearranges"
    if name in ALONG:
        verb, dims = ALONG[name]
        allowed = in_loss and name == "reduce_sum"
        found = any(along(shapes[0][d]) for d in dims(params, shapes))
        found |= name == "conv_general_dilated" and any(map(along, shapes[1]))
        return verb if found and not allowed else None
    # What they run is looked at by itself, and what is printed changes nothing.
    inside = name in (*CALLS, "cond", "while", "shard_map", "debug_print", "debug_callback")
    drawn = name.startswith(("random_", "psum", "pmax", "pmin"))
    known = inside or drawn or name in ELEMENTWISE
    return None if known else f"does what hfjax does not know ({name}) with"


def _keeps_order(before: Sequence[int], after: Sequence[int], along: Callable) -> bool:
    """Return whether a reshape leaves positions in one dimension, perhaps beside other numbers."""
    for i, size in enumerate(before):
        if not along(size):
            continue
        stride = math.prod(before[i + 1 :])
        steps = [(math.prod(after[j + 1 :]), n) for j, n in enumerate(after) if along(n)]
        if not any(stride % s == 0 and (s * n) % (stride * size) == 0 for s, n in steps if s):
            return False
    return True


def _stays_outer(before: Sequence[int], after: Sequence[int], along: Callable) -> bool:
    """Return whether a reshape leaves entries the outer part of a dimension: [p, 3] and [3 p].

    So a part of the entries, reshaped, is a part of what all of them become.
    """

    def spans(shape: Sequence[int]) -> list[int]:
        return [math.prod(shape[i:]) for i, size in enumerate(shape) if along(size)]

    return spans(before) == spans(after)


def _of_convolution(params: Any, shapes: Sequence[Any]) -> list[int]:
    """Return the dimensions of the operand that do not stay as they are: features never do."""
    numbers, kernel = params["dimension_numbers"], shapes[1]
    rows, features, *places = numbers.lhs_spec
    sizes = [kernel[d] for d in numbers.rhs_spec[2:]]
    steps = params["window_strides"], params["padding"], params["lhs_dilation"]
    moved = [d for d, *how in zip(places, sizes, *steps, strict=True) if how != STAYS]
    return [features, *moved, *([rows] if params["batch_group_count"] > 1 else [])]


def _of_window(params: Any, shapes: Sequence[Any]) -> list[int]:
    names = ("window_dimensions", "window_strides", "padding", "base_dilation")
    each = zip(*(params[name] for name in names), strict=True)
    return [d for d, how in enumerate(each) if list(how) != STAYS]


def _of_padding(params: Any, shapes: Sequence[Any]) -> list[int]:
    return [d for d, how in enumerate(params["padding_config"]) if tuple(how) != (0, 0, 0)]


STAYS = [1, 1, (0, 0), 1]  # a window (or kernel), its step, padding and dilation


def _of_gather(params: Any, shapes: Sequence[Any]) -> list[int]:
    """Return the dimensions of the operand from which parts are picked."""
    apart = getattr(params["dimension_numbers"], "operand_batching_dims", ())
    sizes = enumerate(zip(params["slice_sizes"], shapes[0], strict=True))
    return [d for d, (size, whole) in sizes if size != whole and d not in apart]


MOVES = ("slice", "dynamic_slice", "concatenate", "dynamic_update_slice")
_named = lambda name: lambda params, shapes: params[name]
_one = lambda name: lambda params, shapes: [params[name]]
_last = lambda params, shapes: [-1]
REDUCE = ("sum", "max", "min", "prod", "and", "or", "xor")
WINDOWS = ("", "_sum", "_max", "_min")
# An operation -> what it does, and along which dimensions of its first operand.
ALONG: dict[str, tuple[str, Callable]] = {
    "dot_general": ("contracts", lambda params, shapes: params["dimension_numbers"][0][0]),
    **{f"reduce_{name}": ("reduces", _named("axes")) for name in REDUCE},
    "reduce": ("reduces", _named("dimensions")),
    **{name: ("picks one of", _named("axes")) for name in ("argmax", "argmin")},
    **{f"cum{name}": ("accumulates", _one("axis")) for name in ("sum", "prod", "max", "min")},
    "cumlogsumexp": ("accumulates", _one("axis")),
    "sort": ("sorts", _one("dimension")),
    "top_k": ("sorts", _last),
    "split": ("cuts or joins", _one("axis")),
    "pad": ("cuts or joins", _of_padding),
    "rev": ("reverses", _named("dimensions")),
    "conv_general_dilated": ("convolves", _of_convolution),
    **{f"reduce_window{name}": ("pools", _of_window) for name in WINDOWS},
    "gather": ("picks from", _of_gather),
}
# Operations that leave each position where it is, by itself.
ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh axis_index bitcast_convert_type
    broadcast_in_dim cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
    device_put digamma div eq erf erf_inv erfc exp exp2 expand_dims expm1 floor ge gt imag
    integer_pow is_finite le lgamma log log1p log2 logistic lt max min mul name ne neg nextafter not
    one_minus_square
    optimization_barrier or polygamma population_count pow pvary real reduce_precision rem round
    mesh_cast reshard rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
    shift_right_logical sign
    sin sinh sqrt square squeeze stop_gradient sub tan tanh threefry2x32 transpose xor
    """.split()
)
