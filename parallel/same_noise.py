"""Where a model draws random numbers that are the same on every device and in every step.

A key that a model closes over, or makes of a constant, gives all rows of all devices one mask. The
program of the model tells: nothing that differs goes into the key.
"""

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import Literal

DRAWS = "random_bits"


def warn_of_same_noise(jaxpr: Any, differs: Sequence[bool]) -> None:
    """Warn of random numbers into which none of the inputs goes that differ between devices."""
    if not any(_draws(jaxpr)):
        return
    found = set[str]()
    _follow(jaxpr, differs, "", found)
    if found:
        warnings.warn(
            "random numbers are the same on every device and in every step: "
            f"{'; '.join(sorted(found))}. Their key is a constant, or a variable that holds no "
            "typed key. Let the step give one: forward(model, batch, key), or row_keys (one for "
            "each row), in hfjax.layout(…, forward=…). Numbers that are to stay the same belong "
            "into model_init.",
            UserWarning,
            stacklevel=2,
        )


def _bodies(equation: Any) -> Iterator[Any]:
    """Yield the programs inside of an equation."""
    for value in equation.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(body, "jaxpr", body)
            if hasattr(inner, "eqns"):
                yield inner


def _draws(jaxpr: Any) -> Iterator[bool]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name == DRAWS
        for body in _bodies(equation):
            yield from _draws(body)


def _follow(jaxpr: Any, differs: Sequence[bool], place: str, found: set[str]) -> list[bool]:
    """Return which outputs differ; lines that draw from keys that do not are added to `found`.

    `place` is the line around, for what JAX itself has compiled.
    """
    apart = {v for v, yes in zip(jaxpr.invars, differs, strict=True) if yes}
    is_apart = lambda v: not isinstance(v, Literal) and v in apart
    for equation in jaxpr.eqns:
        given = [is_apart(v) for v in equation.invars]
        line = source_info_util.summarize(equation.source_info) or place
        if equation.primitive.name == DRAWS and not any(given):
            found.add(line)
        outputs = _outputs(equation, given, line, found)
        apart.update(v for v, yes in zip(equation.outvars, outputs, strict=True) if yes)
    return [is_apart(v) for v in jaxpr.outvars]


def _outputs(equation: Any, given: list[bool], line: str, found: set[str]) -> list[bool]:
    """Return which results of an equation differ."""
    bodies, count = list(_bodies(equation)), len(equation.outvars)
    if equation.primitive.name == "scan":
        given = _settled(equation, given, bodies[0])
    for body in bodies:
        fits = len(body.invars) == len(given)  # else: all of them differ, if one does
        inside = given if fits else [any(given)] * len(body.invars)
        outputs = _follow(body, inside, line, found)
        if fits and len(bodies) == 1 and len(outputs) == count:
            return outputs
    return [any(given)] * count


def _settled(equation: Any, given: list[bool], body: Any) -> list[bool]:
    """Return which inputs of a scan differ in some turn of it."""
    first, carry = equation.params["num_consts"], equation.params["num_carry"]
    while True:
        outputs = _follow(body, given, "", set())[:carry]
        now = [a or b for a, b in zip(given[first : first + carry], outputs, strict=True)]
        if now == given[first : first + carry]:
            return given
        given = [*given[:first], *now, *given[first + carry :]]
