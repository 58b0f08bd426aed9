"""What an optimizer computes from entries that are 0: whether more of them would change a total.

A zero value is a known number, NUMBER (one that the program is given: finite, and not 0), unknown
(None), or the choice of a number of the program (its term).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hfjax.parallel.jaxprs.primitives import CASTS, VIEWS

NUMBER = "number"
ZeroValue = float | str | tuple[int, tuple["ZeroValue", ...]] | None
ZeroEffects = frozenset[tuple[int, int]]  # where more zeros change a value: a number, its case
ALWAYS = (-1, -1)

# What has the value of its operand, where all entries of that are equal.
_MOVES = VIEWS.union(CASTS, "broadcast_in_dim real reduce_max reduce_min rev stop_gradient".split())
_NUMPY_FUNCTIONS: dict[str, Callable] = {
    **{name: getattr(np, name) for name in ("abs", "sign", "sqrt", "square", "cbrt", "exp")},
    **{name: getattr(np, name) for name in ("log", "log1p", "expm1", "tanh", "sin", "cos", "tan")},
    **{name: getattr(np, name) for name in ("floor", "ceil", "isfinite")},
    **{"add": np.add, "add_any": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide},
    **{"max": np.maximum, "min": np.minimum, "neg": np.negative, "pow": np.power},
    **{"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal},
    **{"gt": np.greater, "ge": np.greater_equal, "and": np.logical_and, "or": np.logical_or},
    **{"not": np.logical_not, "is_finite": np.isfinite},
    **{"rsqrt": lambda x: 1 / np.sqrt(x), "logistic": lambda x: 1 / (1 + np.exp(-x))},
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
}


def zero_value_of(
    name: str,
    operands: Sequence[ZeroValue],
    params: Mapping[str, Any],
    are_operands_same: bool = False,
) -> ZeroValue:
    """Return the result of an operation; `are_operands_same`: all have the same value."""
    if choice := next((x for x in operands if isinstance(x, tuple)), None):
        selector, cases = choice
        case_operands = [
            [_resolve_choice(x, selector, i) for x in operands] for i in range(len(cases))
        ]
        return _make_choice(
            selector,
            [zero_value_of(name, values, params, are_operands_same) for values in case_operands],
        )
    if name in ("ne", "lt", "gt") and are_operands_same:
        return 0.0
    if name == "select_n":
        return operands[1] if len(set(operands[1:])) == 1 else None
    if name in _MOVES or (name == "reduce_sum" and operands[0] == 0):
        return operands[0]
    if all(isinstance(x, float) for x in operands):
        return _evaluate(name, operands, params)
    known_operands = [x for x in operands if x is not None]
    if len(known_operands) < len(operands):
        return None
    return _evaluate_symbolic(name, operands)


def _evaluate(name: str, operands: Sequence[Any], params: Mapping[str, Any]) -> ZeroValue:
    """Return the result of an operation on known numbers; None if it is not finite."""
    with np.errstate(all="ignore"):
        if name == "integer_pow":
            number = np.float64(operands[0]) ** params["y"]
        elif name == "dot_general":
            number = 0.0 if 0.0 in operands else np.nan
        elif name in _NUMPY_FUNCTIONS:
            number = _NUMPY_FUNCTIONS[name](*map(np.float64, operands))
        else:
            return None
    return float(number) if np.isfinite(number) else None


def _evaluate_symbolic(name: str, zero_values: Sequence[ZeroValue]) -> ZeroValue:
    """Return the result of an operation where some operand is an unknown number."""
    is_zero = [x == 0 for x in zero_values]
    if name == "mul" and any(is_zero):
        return 0.0
    if name == "div":
        return 0.0 if is_zero[0] else None if is_zero[1] else NUMBER
    if name == "add" and any(is_zero):
        return NUMBER
    return NUMBER if name in ("mul", "sqrt", "square", "abs", "neg", "rsqrt") else None


def select_zero_value(selector: int, cases: Sequence[ZeroValue]) -> ZeroValue:
    """Return the choice of a number among cases, where arrays are 0."""
    return _make_choice(selector, [_resolve_choice(x, selector, i) for i, x in enumerate(cases)])


def _make_choice(selector: int, cases: Sequence[ZeroValue]) -> ZeroValue:
    return cases[0] if len(set(cases)) == 1 else (selector, tuple(cases))


def _resolve_choice(zero_value: ZeroValue, selector: int, case: int) -> ZeroValue:
    return (
        zero_value[1][case]
        if isinstance(zero_value, tuple) and zero_value[0] == selector
        else zero_value
    )


def zero_effects_unless(zero_value: ZeroValue, neutral: float | None) -> ZeroEffects:
    """Return where more entries like this one would change a total over them."""
    if isinstance(zero_value, tuple):
        selector, cases = zero_value
        return frozenset(
            (selector, i) for i, case in enumerate(cases) if zero_effects_unless(case, neutral)
        )
    return frozenset() if zero_value == neutral and neutral is not None else frozenset((ALWAYS,))


def other_choices(selector: int, case: int) -> ZeroEffects:
    """Return the other choices of a number, of the first 8."""
    return frozenset((selector, i) for i in range(8) if i != case)
