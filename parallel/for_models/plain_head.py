"""Whether a model's head is a plain one: then a step may make losses without its logits.

A model hands `kernels.outputs` the operands of its head, and a function that makes logits of them.
What takes the function's place (a kernel, a grid) makes x @ kernel.T, masked beyond the vocabulary.
So the function's program has to be just that.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal

from hfjax.parallel.autodiff.program import piece

# What leaves numbers as they are, a cast but for rounding.
LEAVES = (
    """convert_element_type copy copy_p mesh_cast name pvary reshape sharding_constraint""".split()
)
X, KERNEL, LOGITS, COLUMNS, FILL = "x", "kernel", "logits", "the numbers of columns", "a fill"
REAL, PADDING = "which columns count", "which columns are padding"
LEAST = -1e4  # what is masked is at most so much
OTHER = "it is another product"


class Known(NamedTuple):
    """What a variable of the program is known to be."""

    what: str
    dim: int = 0  # of x and of the kernel, the contracted one; of the numbers, their own


def not_plain(
    logits: Callable[[], jax.Array], x_BSD: Any, kernel_VD: Any, vocab: int, rows: int
) -> str | None:
    """Return what logits() does beside x @ kernel.T with a mask; None if nothing.

    Args:
        logits: The model's own function.
        x_BSD: What it multiplies.
        kernel_VD: By what.
        vocab: Rows of the kernel that count.
        rows: All of its rows.
    """
    program = piece(logits)
    at: dict[Any, Known] = {}
    for variable, value in program.constants.items():
        if value is not x_BSD and value is not kernel_VD:
            return "it reads another array than the two that are handed over"
        at[variable] = Known(X if value is x_BSD else KERNEL, value.ndim - 1)
    masked = False
    for equation in program.equations:
        known = _known(equation, at, vocab)
        if isinstance(known, str):
            return known
        at[equation.outvars[0]] = known
        masked |= equation.primitive.name == "select_n"
    (output,) = program.outputs
    shape = getattr(getattr(output, "aval", None), "shape", None)
    whole = shape == (*x_BSD.shape[:-1], kernel_VD.shape[0])
    if not whole or at.get(output, Known("")).what != LOGITS:
        return OTHER
    return None if masked or vocab == rows else f"it does not mask what follows the first {vocab}"


def _known(equation: JaxprEqn, at: dict[Any, Known], vocab: int) -> Known | str:
    """Return what an equation makes of what is known, or why it is no part of a plain head."""
    name, params = equation.primitive.name, equation.params
    given = [_of(v, at) for v in equation.invars]
    first = given[0] if given else Known("")
    if name == "dot_general":
        return _product(given, params["dimension_numbers"])
    if name == "iota":
        return Known(COLUMNS, params["dimension"] - len(params["shape"]))
    if name == "broadcast_in_dim" and first.what in (FILL, COLUMNS, REAL, PADDING):
        return first
    if name in ("lt", "ge") and first.what == COLUMNS and first.dim == -1:
        number = _number(equation)
        if number != vocab:
            return f"it masks from {number} on, and the vocabulary has {vocab}"
        return Known(REAL if name == "lt" else PADDING)
    if name == "select_n":
        wanted = {REAL: [FILL, LOGITS], PADDING: [LOGITS, FILL]}.get(first.what)
        kept = [known.what for known in given[1:]] == wanted
        return Known(LOGITS) if kept else "it masks otherwise than from the vocabulary's end on"
    if name == "transpose" and first.what in (X, KERNEL):
        return Known(first.what, params["permutation"].index(first.dim))
    to = params.get("new_dtype")
    if name not in LEAVES or (to is not None and not _stays(to, first)):
        return f"there is {name} in it"
    return Known(first.what, len(params["new_sizes"]) - 1) if name == "reshape" else first


def _product(given: list[Known], numbers: Any) -> Known | str:
    (mine, theirs), batch = numbers
    found = [(known.what, (known.dim,)) for known in given]
    ways = [[(X, mine), (KERNEL, theirs)], [(KERNEL, mine), (X, theirs)]]
    return OTHER if found not in ways or any(batch) else Known(LOGITS)


def _stays(dtype: Any, known: Known) -> bool:
    """Return whether a cast leaves numbers as they are but for rounding."""
    return known.what in (COLUMNS, FILL) or jnp.issubdtype(dtype, jnp.inexact)


def _of(v: Any, at: dict[Any, Known]) -> Known:
    if not isinstance(v, Literal):
        return at.get(v, Known(""))
    return Known(FILL if jnp.ndim(v.val) == 0 and float(v.val) <= LEAST else "")


def _number(equation: JaxprEqn) -> Any:
    return next((int(v.val) for v in equation.invars[1:] if isinstance(v, Literal)), None)
