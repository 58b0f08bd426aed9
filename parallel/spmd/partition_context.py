"""A program that is being run in parts: how its values become whole, parts or sums; what is told.

Each program inside of another (a loop, a branch, a rematerialised function) has a scope of its own,
since what is made in one may not be used outside of it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import JaxprEqn, Literal, Var

from hfjax.parallel.jaxprs.program import bind
from hfjax.parallel.spmd.placements import SUM, Cut, Kind, Later, Made, Part, Shape, Side, Sum
from hfjax.utils.paths import Shaped


@dataclass(frozen=True)
class Join:
    """What devices did because an equation joins rows.

    Attributes:
        line: Where the user's program joins them.
        operation: JAX's name of the operation.
        how: "sum", "greatest", "least", "gather"; "average" (of what is of own rows);
            "draw" (random numbers for all rows, or a part of them);
            "cut" (the rows here of what is known for all rows, by their number);
            "alone" (a collective of the user's own that sees one device);
            "rule" (the rule of a derivative that is not linear in the cotangent).
        bytes: The size of what is made: of a sum, or of the whole that is gathered.
        times: How often in each run of the program.
        known: Whether a rule asks for it; else everything is gathered since no rule knows better.
    """

    line: str
    operation: str
    how: str
    bytes: int
    times: int = 1
    known: bool = True


def _none_later(stored: Any) -> NoReturn:
    raise AssertionError(f"{stored}: no parameter is to be gathered later")


def _ignore(values: Sequence[Any]) -> None:
    """Take no note of parameters that a loop is to slice."""


@dataclass
class Scope:
    """One program that is being run.

    Attributes:
        side: The devices.
        told: What joined rows, in the order of the program.
        sizes: The sizes of dimensions that were split, each with the cut of the first.
        run: (scope, jaxpr, constants, values) -> values: runs a program in a scope.
        equation: The one that is being run.
        times: How often this program runs.
        known: Whether a rule knows the equation.
        place: Where it lies, of the user's, where the equation does not say so.
        later: Makes of what is stored of a parameter the parameter, to be gathered later.
        watch: Is told which parameters a loop is to slice.
        pieces: Of a value that was concatenated along a dimension that is not split: of what.
        makes: Of a part that a smaller one became: the same, not made yet, for another cut or none.
    """

    side: Side
    told: list[Join]
    sizes: dict[int, Cut]
    run: Callable
    equation: JaxprEqn | None = None
    times: int = 1
    known: bool = True
    place: Any = None
    later: Callable = _none_later
    watch: Callable = _ignore
    pieces: dict[int, tuple[Any, Sequence[Any]]] = field(default_factory=dict)
    makes: dict[int, tuple[Any, Made]] = field(default_factory=dict)
    _done: dict[int, tuple[Any, dict]] = field(default_factory=dict)

    def inside(self, times: int = 1, told: list[Join] | None = None) -> "Scope":
        """Return the scope of a program inside, which runs so often each time."""
        told, new = self.told if told is None else told, {"pieces": {}, "makes": {}, "_done": {}}
        times = self.times * times
        return replace(self, told=told, times=times, known=True, place=self.where, **new)

    # -- values as they are wanted ---------------------------------------------------------------

    def as_kind(self, value: Any, kind: Kind) -> jax.Array:
        """Return what a device holds of a value where it is of this kind."""
        if isinstance(kind, Cut):
            return self.part(value, kind)
        return self.sum(value) if kind == SUM else self.whole(value)

    def whole(self, value: Any) -> Any:
        """Return the whole of a value."""
        if isinstance(value, Part):
            return self._once(value, "whole", lambda: self._join(value))
        if isinstance(value, Sum):
            return self._once(value, "whole", lambda: self._complete(value))
        if isinstance(value, Made):
            return self._once(value, "whole", lambda: value.make(self, None))
        return value.whole() if isinstance(value, Later) else value

    def part(self, value: Any, cut: Cut) -> jax.Array:
        """Return this device's part of a value that is split so."""
        if isinstance(value, Part) and value.cut == cut:
            return value.x
        if isinstance(value, Made):
            return self._once(value, cut, lambda: value.make(self, cut))
        if isinstance(value, Sum) and not self.is_whole(value):
            return self._once(value, cut, lambda: self._scatter(value, cut))
        if id(value) in self.makes:
            return self.part(self.makes[id(value)][1], cut)
        return self._once(value, cut, lambda: self.taken(self.whole(value), cut))

    def sum(self, value: Any) -> jax.Array:
        """Return this device's share of a value."""
        if isinstance(value, Sum):
            return value.x
        return self.side.shared(jnp.asarray(self.whole(value)))

    def beside(self, value: Any, cut: Cut) -> Any:
        """Return a value as it stands beside a part: a number, or one of size 1 there, as it is."""
        shape = self.shape(value)
        if not shape or shape[cut.dim] == 1:
            return self.whole(value)
        return self.part(value, cut)

    def is_whole(self, value: object) -> bool:
        """Return whether the whole of a value is known already."""
        return not isinstance(value, Part | Sum | Made) or "whole" in self._of(value)

    def made(self, value: Any) -> Any:
        """Return a value that is not made yet as a part, if it has a dimension as rows have."""
        if not isinstance(value, Made):
            return value
        cut = self.cut_of(value.shape)
        return self.whole(value) if cut is None else Part(self.part(value, cut), cut)

    def settled(self, value: Any) -> Any:
        """Return a value as an array, a `Part` or a `Sum`."""
        if isinstance(value, Part | Sum):
            return value
        return self.made(value) if isinstance(value, Made) else jnp.asarray(self.whole(value))

    def cut_of(self, shape: Shape) -> Cut | None:
        """Return a cut of a dimension with the size of one that was split: of that one, if any."""
        cuts = [self.sizes[n].moved(d) for d, n in enumerate(shape) if n in self.sizes]
        fits = [cut for cut in cuts if self.side.divides(shape, cut)]
        return min(fits, key=lambda cut: cut != self.sizes[shape[cut.dim]], default=None)

    def note(self, value: Any) -> None:
        """Take note of the size of a dimension that is split."""
        if isinstance(value, Part):
            self.sizes.setdefault(self.shape(value)[value.cut.dim], value.cut)

    def _of(self, value: Any) -> dict:
        return self._done.get(id(value), (value, {}))[1]

    def _once(self, value: Any, kind: Any, make: Callable[[], Any]) -> Any:
        found = self._done.setdefault(id(value), (value, {}))[1]  # the value stays, so does its id
        if kind not in found:
            found[kind] = make()
        return found[kind]

    def taken(self, x: jax.Array, cut: Cut) -> jax.Array:
        """Return this device's part of a whole array, of which it is told."""
        found = self.side.cut(jnp.asarray(x), cut)
        self.tell("cut", found)
        return found

    def _join(self, value: Part) -> jax.Array:
        if id(value) in self.makes:
            return self.makes[id(value)][1].make(self, None)
        found = self.side.joined(value.x, value.cut)
        self.tell("gather", found)
        return found

    def _complete(self, value: Sum) -> jax.Array:
        self.tell("sum", value.x)
        return self.side.total(value.x)

    def _scatter(self, value: Sum, cut: Cut) -> jax.Array:
        self.tell("sum", value.x)
        return self.side.scattered(value.x, cut)

    def shape(self, value: Any) -> Shape:
        """Return the shape of the whole."""
        if isinstance(value, Part):
            return self.side.whole_shape(value.x.shape, value.cut)
        if isinstance(value, Made):
            return value.shape
        if isinstance(value, Later):
            return value.stored.full_shape.shape
        return jnp.shape(value.x if isinstance(value, Sum) else value)

    # -- equations -------------------------------------------------------------------------------

    def bind(self, equation: JaxprEqn, values: Sequence[Any], **sizes: Any) -> Sequence[Any]:
        """Return what an equation gives for these arrays, its parameters changed so."""
        if sizes:
            equation = equation.replace(params={**equation.params, **sizes})
        return bind(equation, values)

    def parts(
        self, cut: Cut, equation: JaxprEqn, values: Sequence[Any], **sizes: Any
    ) -> list[Part]:
        """Return what an equation gives for these arrays as parts that are cut so."""
        return [Part(x, cut) for x in self.bind(equation, values, **sizes)]

    def tell(self, how: str, x: jax.Array) -> None:
        """Take note that rows were joined."""
        name = self.equation.primitive.name if self.equation else "result"
        if self.equation and (kept := getattr(self.equation.params.get("name"), "call", None)):
            name = kept.function.__name__
        self.told.append(Join(self.line, name, how, bytes_of(x), self.times, self.known))

    @property
    def where(self) -> Any:
        """Where in the user's program the equation lies that is being run."""
        known = self.equation and source_info_util.summarize(self.equation.source_info)
        return self.equation.source_info if self.equation and known else self.place

    @property
    def line(self) -> str:
        """The user's line of the equation that is being run."""
        return source_info_util.summarize(self.where) if self.where else ""


def aval_of(variable: Var | Literal) -> Any:
    """Return shape and dtype of a variable of a program."""
    return variable.aval


def bytes_of(x: Shaped) -> int:
    """Return the bytes of an array."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    each = 4 * 4 if is_key else x.dtype.itemsize
    return math.prod(x.shape) * each


_RECORDING: ContextVar[bool] = ContextVar("named calls are kept", default=False)


@contextmanager
def recording(on: bool = True) -> Iterator[None]:
    """Keep named calls in what is traced meanwhile."""
    before = _RECORDING.set(on)
    try:
        yield
    finally:
        _RECORDING.reset(before)


def is_recording() -> bool:
    """Return whether a program is being traced that will be run in parts."""
    return _RECORDING.get()


def traced_whole(side: Side, function: Callable, *shapes: Any) -> tuple[Any, Any]:
    """Return the program of a function of whole arrays, and the shapes of what it returns.

    It keeps named calls, also in the rule of a derivative, which JAX traces late. A collective of
    the user's own, over an axis along which rows are split, sees one device.
    """
    alone = [(axis, 1) for axis in side.axes]
    anew = lambda *arguments: function(*arguments)  # no trace of before, whose constants are gone
    with recording():
        return jax.make_jaxpr(anew, axis_env=alone, return_shape=True)(*shapes)
