"""Whether a model's head is a plain one: then a step may make losses without its logits.

A model hands `kernels.outputs` the operands of its head, and a function that makes logits of them.
What takes the function's place (a kernel, a grid) makes x @ kernel.T, masked beyond the vocabulary.
So the function's program has to be just that.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Literal

from hfjax.parallel.autodiff.program import Piece, piece

LEAVES = ("convert_element_type", "copy", "copy_p", "name", "pvary", "reshape", "mesh_cast")
COMPARES = ("lt", "ge")
MASKS = ("iota", "broadcast_in_dim", "select_n", *COMPARES)
X, KERNEL, LOGITS = "x", "kernel", "logits"


def not_plain(
    logits: Callable[[], jax.Array], x_BSD: Any, kernel_VD: Any, vocab: int
) -> str | None:
    """Return what logits() does beside x @ kernel.T with a mask; None if nothing.

    Args:
        logits: The model's own function.
        x_BSD: What it multiplies.
        kernel_VD: By what.
        vocab: Rows of the kernel that count.
    """
    program = piece(logits)
    known = {X: x_BSD, KERNEL: kernel_VD}
    # Where what is followed has its dimension D: variable -> (which of both, dimension).
    at: dict[Any, tuple[str, int]] = {}
    for variable, value in program.constants.items():
        name = next((name for name, array in known.items() if array is value), None)
        if name is None:
            return "it reads another array than the two that are handed over"
        at[variable] = name, value.ndim - 1
    for equation in program.equations:
        if why := _follow(equation, at, vocab):
            return why
    return None if _found(program, at) else "it is another product"


def _found(program: Piece, at: dict[Any, tuple[str, int]]) -> bool:
    (output,) = program.outputs
    return not isinstance(output, Literal) and at.get(output, ("", 0))[0] == LOGITS


def _follow(equation: JaxprEqn, at: dict[Any, tuple[str, int]], vocab: int) -> str | None:
    """Note what an equation makes of the operands; return why it is no part of a plain head."""
    name, (out, *_) = equation.primitive.name, equation.outvars
    given = [at.get(v) for v in equation.invars if not isinstance(v, Literal)]
    if name == "dot_general":
        (mine, theirs), batch = equation.params["dimension_numbers"]
        dims = [g and (g[0], (g[1],)) for g in given]
        pairs = [[(X, mine), (KERNEL, theirs)], [(KERNEL, mine), (X, theirs)]]
        if dims not in pairs or any(batch):
            return "it is another product"
        at[out] = LOGITS, 0
    elif name == "transpose" and given[0] is not None:
        at[out] = given[0][0], equation.params["permutation"].index(given[0][1])
    elif name in LEAVES and given and given[0] is not None:
        who, dim = given[0]
        at[out] = who, dim if name != "reshape" else len(equation.params["new_sizes"]) - 1
    elif name in COMPARES and _number(equation) != vocab:
        return f"it masks from {_number(equation)} on, and the vocabulary has {vocab}"
    elif name == "select_n":
        at[out] = next((g for g in given if g and g[0] == LOGITS), (LOGITS, 0))
    elif name not in (*MASKS, "sharding_constraint"):
        return f"there is {name} in it"
    elif given and given[0] is not None:
        at[out] = given[0]
    return None


def _number(equation: JaxprEqn) -> Any:
    return next((int(v.val) for v in equation.invars if isinstance(v, Literal)), None)
