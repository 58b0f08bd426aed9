"""What the tensors of a program are: which operation made them, and how they were named."""

from collections.abc import Iterable, Mapping
from typing import Any

from jax.extend.core import Var

from hfjax.parallel.offload import Tensor
from hfjax.parallel.program import Piece, bytes_of

# What hands a tensor on in another form: the one that made it is further back.
_SAME = (
    "reshape",
    "transpose",
    "squeeze",
    "expand_dims",
    "copy",
    "convert_element_type",
    "name",
    "sharding_constraint",
    "reduce_precision",
    "optimization_barrier",
)


def tensors_of(program: Piece, kept: Iterable[Var]) -> list[Tensor]:
    """Return a description of each of these variables of a program."""
    makes = {v: e for e in program.equations for v in e.outvars}
    names = _names(program)
    return [_tensor(v, makes, names) for v in kept]


def _tensor(v: Var, makes: Mapping, names: Mapping[Var, set[str]]) -> Tensor:
    back, named = v, set(names.get(v, ()))
    while back in makes and makes[back].primitive.name in _SAME:
        back = makes[back].invars[0]
        named |= names.get(back, set())
    what = makes[back].primitive.name if back in makes else "input"
    aval: Any = v.aval
    return Tensor(what, aval.shape, str(aval.dtype), bytes_of([aval]), frozenset(named))


def _names(program: Piece) -> dict[Var, set[str]]:
    """Return the names that tensors were given by `checkpoint_name`, before and after it."""
    names: dict[Var, set[str]] = {}
    for equation in program.equations:
        if equation.primitive.name == "name":
            for v in (*equation.invars, *equation.outvars):
                if isinstance(v, Var):
                    names.setdefault(v, set()).add(equation.params["name"])
    return names


def packed(avals: Iterable[Any]) -> list[Tensor]:
    """Return a description of arrays into which several tensors are packed."""
    return [Tensor("packed", a.shape, str(a.dtype), bytes_of([a])) for a in avals]
