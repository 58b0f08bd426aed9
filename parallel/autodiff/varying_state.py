"""What of a model's program differs between devices: whatever a row, or a key, goes into.

Random numbers should, and do not if the key is one that the model closes over. A flag or a count
that a step keeps should not.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal

from hfjax.parallel.autodiff.program import parts_of_scan

DRAWS = "random_bits"
AGREES = ("psum", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant")


class Differing(NamedTuple):
    """Which outputs of a program differ, and the lines that draw random numbers which do not."""

    outputs: list[bool]
    lines: set[str]


def differing(
    jaxpr: Any,
    inputs: Sequence[bool],
    axes: Sequence[str],
    drawn: Callable[[tuple[int, ...]], bool] = lambda shape: True,
) -> Differing:
    """Return what differs between devices along these axes, given which inputs do.

    Random numbers are looked at that are drawn in such a shape.
    """
    follow = _Follow(frozenset(axes), set(), drawn)
    return Differing(follow(jaxpr, inputs, ""), follow.lines)


def bodies(equation: JaxprEqn) -> Iterator[Any]:
    """Yield the programs inside of an equation."""
    yield from (getattr(body, "jaxpr", body) for body in closed_bodies(equation))


def closed_bodies(equation: JaxprEqn) -> Iterator[Any]:
    """Yield the programs inside of an equation, with the constants that they close over, if any."""
    for value in equation.params.values():
        for body in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(body, "jaxpr", body), "eqns"):
                yield body


@dataclass(frozen=True)
class _Follow:
    """Follows what differs between devices along these axes, and notes lines as it goes."""

    axes: frozenset[str]
    lines: set[str]  # that draw random numbers from keys which do not differ
    drawn: Callable[[tuple[int, ...]], bool]  # whether numbers of such a shape count

    def __call__(self, jaxpr: Any, inputs: Sequence[bool], place: str) -> list[bool]:
        """Return which outputs differ; `place` is the line around, for what JAX has compiled."""
        apart = {v for v, yes in zip(jaxpr.invars, inputs, strict=True) if yes}
        is_apart = lambda v: not isinstance(v, Literal) and v in apart
        for equation in jaxpr.eqns:
            given = [is_apart(v) for v in equation.invars]
            line = source_info_util.summarize(equation.source_info) or place
            draws = equation.primitive.name == DRAWS and self.drawn(equation.outvars[0].aval.shape)
            if draws and not any(given):
                self.lines.add(line)
            outputs = self._outputs(equation, given, line)
            apart.update(v for v, yes in zip(equation.outvars, outputs, strict=True) if yes)
        return [is_apart(v) for v in jaxpr.outvars]

    def _outputs(self, equation: JaxprEqn, given: list[bool], line: str) -> list[bool]:
        """Return which results of an equation differ."""
        kind, count = equation.primitive.name, len(equation.outvars)
        if kind == "axis_index":
            return [True]
        if kind in AGREES and self.axes <= _axes(equation):
            return [False] * count
        inner = list(bodies(equation))
        if kind == "scan":
            given = self._settled(equation, given, inner[0])
        for body in inner:
            fits = len(body.invars) == len(given)  # else: all of them differ, if one does
            inside = given if fits else [any(given)] * len(body.invars)
            outputs = self(body, inside, line)
            if fits and len(inner) == 1 and len(outputs) == count:
                return outputs
        return [any(given)] * count

    def _settled(self, equation: JaxprEqn, given: list[bool], body: Any) -> list[bool]:
        """Return which inputs of a scan differ in some turn of it."""
        first, carry = parts_of_scan(equation)
        while True:
            outputs = _Follow(self.axes, set(), self.drawn)(body, given, "")[:carry]
            now = [a or b for a, b in zip(given[first : first + carry], outputs, strict=True)]
            if now == given[first : first + carry]:
                return given
            given = [*given[:first], *now, *given[first + carry :]]


def _axes(equation: JaxprEqn) -> set[Any]:
    names = equation.params.get("axes", equation.params.get("axis_name", ()))
    return set(names) if isinstance(names, tuple | list) else {names}
