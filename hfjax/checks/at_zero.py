"""What an optimizer makes of entries that are 0: whether more of them would change a total.

It is 0 or 1, unknown (None), or what a number of the program (its term) chooses.
"""

from collections.abc import Sequence

AtZero = int | tuple[int, tuple["AtZero", ...]] | None
Moved = frozenset[tuple[int, int]]  # where more zeros move a value: a number, and its choice
ALWAYS = (-1, -1)

# What is 0 where all operands are, where one is, or where the first is.
_ZERO_OF_ZEROS = frozenset(
    """abs add add_any broadcast_in_dim cbrt convert_element_type copy copy_p dot_general erf expm1
    integer_pow log1p max min neg real reduce_max reduce_min reduce_sum reshape sign sin sinh sqrt
    square squeeze stop_gradient sub tan tanh transpose""".split()
)
_ZERO_OF_ONE = frozenset(("mul", "dot_general"))


def at_zero_of(name: str, given: Sequence[AtZero], alike: bool = False) -> AtZero:
    """Return what an operation makes of operands that are this; `alike`: all are the same."""
    if choice := next((x for x in given if isinstance(x, tuple)), None):
        by, cases = choice
        each = [[_of_choice(x, by, i) for x in given] for i in range(len(cases))]
        return _choice(by, [at_zero_of(name, values, alike) for values in each])
    zeros = [x == 0 for x in given]
    if name in ("ne", "lt", "gt") and alike:
        return 0
    if name == "is_finite":
        return 1 if all(zeros) else None
    if name == "and":
        return 1 if all(x == 1 for x in given) else None
    if name in _ZERO_OF_ONE:
        return 0 if any(zeros) else None
    of = zeros[1:] if name == "select_n" else zeros[:1] if name == "div" else zeros
    known = name in _ZERO_OF_ZEROS or name in ("select_n", "div")
    return 0 if known and all(of) else None


def chosen_at_zero(by: int, cases: Sequence[AtZero]) -> AtZero:
    """Return what a number chooses where arrays are 0."""
    return _choice(by, [_of_choice(x, by, i) for i, x in enumerate(cases)])


def _choice(by: int, cases: Sequence[AtZero]) -> AtZero:
    return cases[0] if len(set(cases)) == 1 else (by, tuple(cases))


def _of_choice(at_zero: AtZero, by: int, case: int) -> AtZero:
    return at_zero[1][case] if isinstance(at_zero, tuple) and at_zero[0] == by else at_zero


def moved_unless(at_zero: AtZero, neutral: int | None) -> Moved:
    """Return where a total over entries like this one is moved by more of them."""
    if isinstance(at_zero, tuple):
        by, cases = at_zero
        return frozenset((by, i) for i, case in enumerate(cases) if moved_unless(case, neutral))
    return frozenset() if at_zero == neutral and neutral is not None else frozenset((ALWAYS,))


def other_choices(by: int, case: int, most: int = 8) -> Moved:
    """Return the other choices of a number."""
    return frozenset((by, i) for i in range(most) if i != case)
