"""Whether a program is linear in some of its inputs: read from its equations, none is run."""

from collections.abc import Sequence
from enum import IntEnum

import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn

from hfjax.parallel.jaxprs.primitives import LINEAR_MAPS, PRODUCTS, SUMS
from hfjax.parallel.jaxprs.walk import called_body, interpret_jaxpr, name_of


class Linearity(IntEnum):
    """How a value depends on the inputs in question."""

    ZERO = 0
    LINEAR = 1
    CONSTANT = 2  # it does not, and is not known to be zero
    OTHER = 3


ZERO, LINEAR, CONSTANT, OTHER = Linearity
_LINEAR = LINEAR_MAPS.union(["convert_element_type"])


def is_linear(jaxpr: Jaxpr, inputs: Sequence[bool]) -> bool:
    """Return whether all outputs are linear in the inputs for which `inputs` is true.

    What is not understood, a loop for instance, counts as not linear.

    Example:
        >>> import jax
        >>> linear = lambda f: is_linear(jax.make_jaxpr(f)(2.0, 3.0).jaxpr, [False, True])
        >>> linear(lambda x, g: x * x * g - 2 * g), linear(lambda x, g: g + 1), linear(jax.lax.max)
        (True, False, False)
    """
    outputs = _classify_program(jaxpr, [LINEAR if is_input else CONSTANT for is_input in inputs])
    return all(output in (ZERO, LINEAR) for output in outputs)


def _classify_program(jaxpr: Jaxpr, inputs: Sequence[Linearity]) -> list[Linearity]:
    """Return the linearity of each output of a program."""
    constants = [CONSTANT] * len(jaxpr.constvars)
    constant = lambda number: CONSTANT if np.any(number) else ZERO
    return interpret_jaxpr(jaxpr, constants, inputs, _classify_equation, constant=constant)


def _classify_equation(equation: JaxprEqn, operands: list[Linearity]) -> list[Linearity]:
    """Return the linearity of each output of an equation."""
    name = name_of(equation)
    if body := called_body(equation):
        return _classify_program(body[0], operands)
    if name in _LINEAR and len(operands) == len(equation.outvars):
        is_integer = lambda out: not jnp.issubdtype(out.aval.dtype, jnp.inexact)
        pairs = zip(operands, equation.outvars, strict=True)
        return [
            OTHER if operand is LINEAR and is_integer(out) else operand for operand, out in pairs
        ]
    return [_classify_operation(name, operands)] * len(equation.outvars)


def _classify_operation(name: str, operands: list[Linearity]) -> Linearity:
    """Return the linearity of the one output of an operation."""
    operand_set = set(operands)
    if name in _LINEAR:
        return (
            operands[0]
            if operand_set.isdisjoint({LINEAR, OTHER}.difference(operands[:1]))
            else OTHER
        )
    if name in SUMS:
        summands = set(operands[SUMS[name]])
        rest = [
            operand
            for i, operand in enumerate(operands)
            if i not in range(len(operands))[SUMS[name]]
        ]
        if OTHER in operand_set or LINEAR in rest or {LINEAR, CONSTANT} <= summands:
            return OTHER
        return max(summands)
    if operand_set.isdisjoint({LINEAR, OTHER}):
        return CONSTANT
    if name in PRODUCTS and operands.count(LINEAR) == 1 and OTHER not in operand_set:
        return ZERO if ZERO in operand_set else LINEAR
    if name == "div" and operands == [LINEAR, CONSTANT]:
        return LINEAR
    return OTHER
