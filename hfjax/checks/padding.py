"""What an optimizer makes of entries that are 0: whether more of them would change a total.

It is a number that is known, NUMBER (one that the program is given: finite, and not 0), unknown
(None), or what a number of the program (its term) chooses.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

NUMBER = "number"
AtZero = float | str | tuple[int, tuple["AtZero", ...]] | None
Moved = frozenset[tuple[int, int]]  # where more zeros move a value: a number, and its choice
ALWAYS = (-1, -1)

_SAME = ("convert_element_type", "copy", "copy_p", "real", "stop_gradient", "reduce_precision")
_MOVES = ("broadcast_in_dim", "reshape", "squeeze", "transpose", "rev", "reduce_max", "reduce_min")
_COMPUTED: dict[str, Callable] = {
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


def at_zero_of(
    name: str, given: Sequence[AtZero], params: Mapping[str, Any], alike: bool = False
) -> AtZero:
    """Return what an operation makes of operands that are this; `alike`: all are the same."""
    if choice := next((x for x in given if isinstance(x, tuple)), None):
        by, cases = choice
        each = [[_of_choice(x, by, i) for x in given] for i in range(len(cases))]
        return _choice(by, [at_zero_of(name, values, params, alike) for values in each])
    if name in ("ne", "lt", "gt") and alike:
        return 0.0
    if name == "select_n":
        return given[1] if len(set(given[1:])) == 1 else None
    if name in _SAME or name in _MOVES or (name == "reduce_sum" and given[0] == 0):
        return given[0]
    if all(isinstance(x, float) for x in given):
        return _computed(name, given, params)
    known = [x for x in given if x is not None]
    if len(known) < len(given):
        return None
    return _beside_a_number(name, given)


def _computed(name: str, given: Sequence[Any], params: Mapping[str, Any]) -> AtZero:
    """Return what an operation makes of numbers that are known; None if that is not finite."""
    with np.errstate(all="ignore"):
        if name == "integer_pow":
            found = np.float64(given[0]) ** params["y"]
        elif name == "dot_general":
            found = 0.0 if 0.0 in given else np.nan
        elif name in _COMPUTED:
            found = _COMPUTED[name](*map(np.float64, given))
        else:
            return None
    return float(found) if np.isfinite(found) else None


def _beside_a_number(name: str, given: Sequence[AtZero]) -> AtZero:
    """Return what an operation makes where some operand is a number that is not known."""
    zero = [x == 0 for x in given]
    if name == "mul" and any(zero):
        return 0.0
    if name == "div":
        return 0.0 if zero[0] else None if zero[1] else NUMBER
    if name == "add" and any(zero):
        return NUMBER
    return NUMBER if name in ("mul", "sqrt", "square", "abs", "neg", "rsqrt") else None


def chosen_at_zero(by: int, cases: Sequence[AtZero]) -> AtZero:
    """Return what a number chooses where arrays are 0."""
    return _choice(by, [_of_choice(x, by, i) for i, x in enumerate(cases)])


def _choice(by: int, cases: Sequence[AtZero]) -> AtZero:
    return cases[0] if len(set(cases)) == 1 else (by, tuple(cases))


def _of_choice(at_zero: AtZero, by: int, case: int) -> AtZero:
    return at_zero[1][case] if isinstance(at_zero, tuple) and at_zero[0] == by else at_zero


def moved_unless(at_zero: AtZero, neutral: float | None) -> Moved:
    """Return where a total over entries like this one is moved by more of them."""
    if isinstance(at_zero, tuple):
        by, cases = at_zero
        return frozenset((by, i) for i, case in enumerate(cases) if moved_unless(case, neutral))
    return frozenset() if at_zero == neutral and neutral is not None else frozenset((ALWAYS,))


def other_choices(by: int, case: int) -> Moved:
    """Return the other choices of a number, of the first 8."""
    return frozenset((by, i) for i in range(8) if i != case)
