"""Whether a program is linear in some of its inputs: read from its equations, none is run."""

from collections.abc import Sequence
from enum import IntEnum

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from hfjax.parallel.jaxprs.program import CALLS, body_of


class Form(IntEnum):
    """How a value follows from the inputs in question."""

    ZERO = 0
    LINEAR = 1
    CONSTANT = 2  # it does not, and is not known to be zero
    OTHER = 3


ZERO, LINEAR, CONSTANT, OTHER = Form

# Linear in each operand, or in the first: the others are indices.
VIEWS = frozenset(
    """all_gather all_to_all broadcast_in_dim convert_element_type copy copy_p cumsum dynamic_slice
    expand_dims gather imag name neg optimization_barrier ppermute psum psum_invariant real
    reduce_scatter reduce_sum reshape reshard rev sharding_constraint slice squeeze
    transpose""".split()
)
# Linear in these operands together.
SUMS = {
    **dict.fromkeys(("add", "add_any", "sub", "pad", "dynamic_update_slice"), slice(2)),
    "concatenate": slice(None),
    "scatter-add": slice(0, None, 2),
    "select_n": slice(1, None),
}
PRODUCTS = ("mul", "dot_general", "conv_general_dilated")  # linear in each operand


def is_linear(jaxpr: Jaxpr, inputs: Sequence[bool]) -> bool:
    """Return whether all outputs are linear in those inputs for which this is true.

    What is not understood, a loop for instance, counts as not linear.

    Example:
        >>> import jax
        >>> linear = lambda f: is_linear(jax.make_jaxpr(f)(2.0, 3.0).jaxpr, [False, True])
        >>> linear(lambda x, g: x * x * g - 2 * g), linear(lambda x, g: g + 1), linear(jax.lax.max)
        (True, False, False)
    """
    forms = _forms(jaxpr, [LINEAR if mine else CONSTANT for mine in inputs])
    return all(form in (ZERO, LINEAR) for form in forms)


def _forms(jaxpr: Jaxpr, inputs: Sequence[Form]) -> list[Form]:
    """Return the forms of what a program returns."""
    known = dict.fromkeys(jaxpr.constvars, CONSTANT) | dict(zip(jaxpr.invars, inputs, strict=True))

    def read(v) -> Form:
        if isinstance(v, Literal):
            return CONSTANT if np.any(v.val) else ZERO
        return known[v]

    for equation in jaxpr.eqns:
        forms = _of_equation(equation, list(map(read, equation.invars)))
        known.update(zip(equation.outvars, forms, strict=True))
    return list(map(read, jaxpr.outvars))


def _of_equation(equation: JaxprEqn, given: list[Form]) -> list[Form]:
    """Return the forms of what an equation returns."""
    name, body = equation.primitive.name, body_of(equation)
    if name in CALLS and body and len(body[0].invars) == len(given):
        return _forms(body[0], given)
    if name in VIEWS and len(given) == len(equation.outvars):
        whole = lambda out: not jnp.issubdtype(out.aval.dtype, jnp.inexact)
        pairs = zip(given, equation.outvars, strict=True)
        return [OTHER if form is LINEAR and whole(out) else form for form, out in pairs]
    return [_form(name, given)] * len(equation.outvars)


def _form(name: str, given: list[Form]) -> Form:
    """Return the form of the one result of an operation."""
    seen = set(given)
    if name in VIEWS:
        return given[0] if seen.isdisjoint({LINEAR, OTHER}.difference(given[:1])) else OTHER
    if name in SUMS:
        summed = set(given[SUMS[name]])
        rest = [form for i, form in enumerate(given) if i not in range(len(given))[SUMS[name]]]
        if OTHER in seen or LINEAR in rest or {LINEAR, CONSTANT} <= summed:
            return OTHER
        return max(summed)
    if seen.isdisjoint({LINEAR, OTHER}):
        return CONSTANT
    if name in PRODUCTS and given.count(LINEAR) == 1 and OTHER not in seen:
        return ZERO if ZERO in seen else LINEAR
    if name == "div" and given == [LINEAR, CONSTANT]:
        return LINEAR
    return OTHER
