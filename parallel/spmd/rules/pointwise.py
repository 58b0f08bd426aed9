"""Rules of equations that treat each entry by itself, and of those that are linear in sums."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.extend.core import JaxprEqn

from hfjax.parallel.spmd.partition_context import Scope, aval_of
from hfjax.parallel.spmd.placements import Cut, Made, Part, Sum, is_value, kind_of, of_kind

Values = Sequence[Any]

POINTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos
    cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min
    mul mulhi name ne neg nextafter not one_minus_square or polygamma population_count pow
    random_gamma_grad real reduce_precision reshard regularized_incomplete_beta
    rem round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 xor
    zeta""".split()
)
# Linear in their one operand, and in sums: they keep the shape.
_LINEAR = frozenset(
    "neg copy copy_p name real imag conj sharding_constraint stop_gradient reshard".split()
)
_ADDS = frozenset("add add_any sub".split())


def pointwise(scope: Scope, equation: JaxprEqn, values: Values) -> Values | None:
    """Run on parts, or put off what is not made yet; sums stay sums where that is linear."""
    parts = [v for v in values if isinstance(v, Part)]
    name = equation.primitive.name
    if not parts and any(not scope.is_whole(v) for v in values if isinstance(v, Sum)):
        linear = _in_sums(scope, equation, name, values)
        if linear is not None:
            return linear
    if parts:
        cut = max(parts, key=lambda v: v.x.size * v.x.dtype.itemsize).cut
        if cut.dim >= len(aval_of(equation.outvars[0]).shape):  # bits along it become one number
            return None
        given = [scope.beside(v, cut) for v in values]
        return [Part(x, cut) for x in scope.bind(equation, given)]
    if any(isinstance(v, Made) for v in values):
        return _put_off(
            scope, equation, [scope.whole(v) if isinstance(v, Sum) else v for v in values]
        )
    return scope.bind(equation, list(map(scope.whole, values)))


def barrier(scope: Scope, equation: JaxprEqn, values: Values) -> Values:
    """Hold values back together, each as it is here."""
    given = list(map(scope.settled, values))
    found = scope.bind(equation, [v.x if is_value(v) else v for v in given])
    return [of_kind(x, kind_of(v)) for x, v in zip(found, given, strict=True)]


def _put_off(scope: Scope, equation: JaxprEqn, values: Values) -> Values:
    """Return what is made of values when it is asked for; at once where one is there, as large."""
    shape = aval_of(equation.outvars[0]).shape
    there = any(not isinstance(v, Made) and jnp.shape(v) == shape for v in values)
    if there or scope.cut_of(shape) is None:
        return scope.bind(equation, list(map(scope.whole, values)))

    def make(number: int) -> Callable:
        def run(scope: Scope, cut: Cut | None) -> Any:
            as_wanted = scope.whole if cut is None else lambda v: scope.beside(v, cut)
            return scope.bind(equation, list(map(as_wanted, values)))[number]

        return run

    fixed = all(is_fixed(v) for v in values)
    return [
        Made(out.shape, out.dtype, make(i), fixed)
        for i, out in enumerate(map(aval_of, equation.outvars))
    ]


def is_fixed(value: Any) -> bool:
    """Return whether a value follows from nothing but numbers that the program holds."""
    return value.fixed if isinstance(value, Made) else jnp.ndim(value) == 0 and known(value)


def known(x: Any) -> bool:
    """Return whether a number is known while the program is traced."""
    return not isinstance(x, Tracer) and not is_value(x)


def _in_sums(scope: Scope, equation: JaxprEqn, name: str, values: Values) -> Values | None:
    """Return sums of what is linear in sums; None: they have to be completed."""
    bind = lambda *arrays: [Sum(x) for x in scope.bind(equation, arrays)]
    if name in _LINEAR or (name == "convert_element_type" and keeps(equation)):
        return bind(values[0].x)
    if name in _ADDS:
        return bind(*map(scope.sum, values))
    if name == "mul":
        a, b = values
        first = not isinstance(a, Sum) or (isinstance(b, Sum) and not scope.is_whole(b))
        whole, kept = (a, b) if first else (b, a)
        whole = scope.whole(whole)
        endless = known(whole) and not np.isfinite(whole).all()  # it makes NaN of a share of 0
        if endless or scope.is_whole(kept):  # both were completed, or are one
            return None
        return bind(whole, kept.x) if first else bind(kept.x, whole)
    real = jnp.issubdtype(aval_of(equation.outvars[0]).dtype, jnp.inexact)
    if name == "div" and real and isinstance(values[0], Sum) and not scope.is_whole(values[0]):
        return bind(values[0].x, scope.whole(values[1]))
    if name == "select_n" and not isinstance(values[0], Sum):
        return bind(scope.whole(values[0]), *map(scope.sum, values[1:]))
    return None


def keeps(equation: JaxprEqn) -> bool:
    """Return whether a conversion of a sum's terms is that of the sum."""
    old, new = aval_of(equation.invars[0]).dtype, aval_of(equation.outvars[0]).dtype
    if not jnp.issubdtype(old, jnp.inexact):  # counts; small and unsigned ones wrap around
        counts = jnp.issubdtype(old, jnp.signedinteger) and old.itemsize >= 4
        return counts and (jnp.issubdtype(new, jnp.inexact) or new.itemsize >= old.itemsize)
    return jnp.issubdtype(new, jnp.inexact) and new.itemsize >= old.itemsize
