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
from hfjax.parallel.spmd.placements import (
    PARTIAL,
    AxisGroup,
    LazyValue,
    PartialValue,
    Placement,
    Shape,
    ShardedValue,
    Split,
    Ungathered,
)
from hfjax.utils.paths import Shaped


@dataclass(frozen=True)
class CommEvent:
    """What devices did because an equation joins rows.

    Attributes:
        line: Where the user's program joins them.
        operation: JAX's name of the operation.
        action: "sum", "greatest", "least", "gather"; "average" (of what is of own rows);
            "draw" (random numbers for all rows, or a part of them);
            "cut" (the rows here of what is known for all rows, by their number);
            "alone" (a collective of the user's own that sees one device);
            "rule" (the rule of a derivative that is not linear in the cotangent).
        bytes: The size of what is made: of a sum, or of the whole that is gathered.
        times: How often in each run of the program.
        has_rule: Whether a rule asks for it; else everything is gathered since no rule knows
            better.
    """

    line: str
    operation: str
    action: str
    bytes: int
    times: int = 1
    has_rule: bool = True


def _refuse_ungathered(param: Any) -> NoReturn:
    raise AssertionError(f"{param}: no parameter is to be gathered later")


def _ignore_sliced(values: Sequence[Any]) -> None:
    """Take no note of parameters that a loop is to slice."""


@dataclass
class PartitionContext:
    """One program that is being run.

    Attributes:
        group: The devices.
        comms: What joined rows, in the order of the program.
        split_sizes: The sizes of dimensions that were split, each with the cut of the first.
        run: (scope, jaxpr, constants, values) -> values: runs a program in a scope.
        equation: The one that is being run.
        times: How often this program runs.
        has_rule: Whether a rule knows the equation.
        outer_source: Where it lies, of the user's, where the equation does not say so.
        make_ungathered: Makes of what is stored of a parameter the parameter, to be gathered later.
        on_sliced_params: Is told which parameters a loop is to slice.
        concat_operands: Of a value that was concatenated along a dimension that is not split: of
            what.
        lazy_values: Of a part that a smaller one became: the same, not made yet, for another cut or
            none.
    """

    group: AxisGroup
    comms: list[CommEvent]
    split_sizes: dict[int, Split]
    run: Callable
    equation: JaxprEqn | None = None
    times: int = 1
    has_rule: bool = True
    outer_source: Any = None
    make_ungathered: Callable = _refuse_ungathered
    on_sliced_params: Callable = _ignore_sliced
    concat_operands: dict[int, tuple[Any, Sequence[Any]]] = field(default_factory=dict)
    lazy_values: dict[int, tuple[Any, LazyValue]] = field(default_factory=dict)
    _cache: dict[int, tuple[Any, dict]] = field(default_factory=dict)

    def child(self, times: int = 1, comms: list[CommEvent] | None = None) -> "PartitionContext":
        """Return the scope of a program inside, which runs so often each time."""
        comms, fresh = (
            self.comms if comms is None else comms,
            {"concat_operands": {}, "lazy_values": {}, "_cache": {}},
        )
        times = self.times * times
        return replace(
            self, comms=comms, times=times, has_rule=True, outer_source=self.source_info, **fresh
        )

    # -- values as they are wanted ---------------------------------------------------------------

    def redistribute(self, value: Any, placement: Placement) -> jax.Array:
        """Return what a device holds of a value where it is of this kind."""
        if isinstance(placement, Split):
            return self.shard(value, placement)
        return self.as_partial(value) if placement == PARTIAL else self.replicate(value)

    def replicate(self, value: Any) -> Any:
        """Return the whole of a value."""
        if isinstance(value, ShardedValue):
            return self._memoize(value, "whole", lambda: self._all_gather(value))
        if isinstance(value, PartialValue):
            return self._memoize(value, "whole", lambda: self._all_reduce(value))
        if isinstance(value, LazyValue):
            return self._memoize(value, "whole", lambda: value.make(self, None))
        return value.unshard() if isinstance(value, Ungathered) else value

    def shard(self, value: Any, split: Split) -> jax.Array:
        """Return this device's part of a value that is split so."""
        if isinstance(value, ShardedValue) and value.split == split:
            return value.x
        if isinstance(value, LazyValue):
            return self._memoize(value, split, lambda: value.make(self, split))
        if isinstance(value, PartialValue) and not self.is_replicated(value):
            return self._memoize(value, split, lambda: self._reduce_scatter(value, split))
        if id(value) in self.lazy_values:
            return self.shard(self.lazy_values[id(value)][1], split)
        return self._memoize(value, split, lambda: self.slice_local(self.replicate(value), split))

    def as_partial(self, value: Any) -> jax.Array:
        """Return this device's share of a value."""
        if isinstance(value, PartialValue):
            return value.x
        return self.group.as_partial(jnp.asarray(self.replicate(value)))

    def broadcast_to(self, value: Any, split: Split) -> Any:
        """Return a value as it stands beside a part: a number, or one of size 1 there, as it is."""
        shape = self.shape(value)
        if not shape or shape[split.dim] == 1:
            return self.replicate(value)
        return self.shard(value, split)

    def is_replicated(self, value: object) -> bool:
        """Return whether the whole of a value is known already."""
        return not isinstance(
            value, ShardedValue | PartialValue | LazyValue
        ) or "whole" in self._cache_of(value)

    def evaluate_lazy(self, value: Any) -> Any:
        """Return a value that is not made yet as a part, if it has a dimension as rows have."""
        if not isinstance(value, LazyValue):
            return value
        split = self.find_split(value.shape)
        return (
            self.replicate(value)
            if split is None
            else ShardedValue(self.shard(value, split), split)
        )

    def materialize(self, value: Any) -> Any:
        """Return a value as an array, a `ShardedValue` or a `PartialValue`."""
        if isinstance(value, ShardedValue | PartialValue):
            return value
        return (
            self.evaluate_lazy(value)
            if isinstance(value, LazyValue)
            else jnp.asarray(self.replicate(value))
        )

    def find_split(self, shape: Shape) -> Split | None:
        """Return a cut of a dimension with the size of one that was split: of that one, if any."""
        splits = [
            self.split_sizes[n].with_dim(d) for d, n in enumerate(shape) if n in self.split_sizes
        ]
        candidates = [split for split in splits if self.group.divides(shape, split)]
        return min(
            candidates, key=lambda split: split != self.split_sizes[shape[split.dim]], default=None
        )

    def track_dim(self, value: Any) -> None:
        """Take note of the size of a dimension that is split."""
        if isinstance(value, ShardedValue):
            self.split_sizes.setdefault(self.shape(value)[value.split.dim], value.split)

    def _cache_of(self, value: Any) -> dict:
        return self._cache.get(id(value), (value, {}))[1]

    def _memoize(self, value: Any, key: Any, make: Callable[[], Any]) -> Any:
        cached = self._cache.setdefault(id(value), (value, {}))[
            1
        ]  # the value stays, so does its id
        if key not in cached:
            cached[key] = make()
        return cached[key]

    def slice_local(self, x: jax.Array, split: Split) -> jax.Array:
        """Return this device's part of a whole array, of which it is told."""
        out = self.group.slice_local(jnp.asarray(x), split)
        self.record("cut", out)
        return out

    def _all_gather(self, value: ShardedValue) -> jax.Array:
        if id(value) in self.lazy_values:
            return self.lazy_values[id(value)][1].make(self, None)
        gathered = self.group.all_gather(value.x, value.split)
        self.record("gather", gathered)
        return gathered

    def _all_reduce(self, value: PartialValue) -> jax.Array:
        self.record("sum", value.x)
        return self.group.all_reduce(value.x)

    def _reduce_scatter(self, value: PartialValue, split: Split) -> jax.Array:
        self.record("sum", value.x)
        return self.group.reduce_scatter(value.x, split)

    def shape(self, value: Any) -> Shape:
        """Return the shape of the whole."""
        if isinstance(value, ShardedValue):
            return self.group.global_shape(value.x.shape, value.split)
        if isinstance(value, LazyValue):
            return value.shape
        if isinstance(value, Ungathered):
            return value.param.full_shape.shape
        return jnp.shape(value.x if isinstance(value, PartialValue) else value)

    # -- equations -------------------------------------------------------------------------------

    def bind(self, equation: JaxprEqn, values: Sequence[Any], **params: Any) -> Sequence[Any]:
        """Return what an equation gives for these arrays, its parameters changed so."""
        if params:
            equation = equation.replace(params={**equation.params, **params})
        return bind(equation, values)

    def bind_sharded(
        self, split: Split, equation: JaxprEqn, values: Sequence[Any], **params: Any
    ) -> list[ShardedValue]:
        """Return what an equation gives for these arrays as parts that are cut so."""
        return [ShardedValue(x, split) for x in self.bind(equation, values, **params)]

    def record(self, action: str, x: jax.Array) -> None:
        """Take note that rows were joined."""
        name = self.equation.primitive.name if self.equation else "result"
        if self.equation and (call := getattr(self.equation.params.get("name"), "call", None)):
            name = call.function.__name__
        self.comms.append(
            CommEvent(self.line, name, action, bytes_of(x), self.times, self.has_rule)
        )

    @property
    def source_info(self) -> Any:
        """Where in the user's program the equation lies that is being run."""
        summary = self.equation and source_info_util.summarize(self.equation.source_info)
        return self.equation.source_info if self.equation and summary else self.outer_source

    @property
    def line(self) -> str:
        """The user's line of the equation that is being run."""
        return source_info_util.summarize(self.source_info) if self.source_info else ""


def aval_of(variable: Var | Literal) -> Any:
    """Return shape and dtype of a variable of a program."""
    return variable.aval


def bytes_of(x: Shaped) -> int:
    """Return the bytes of an array."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    itemsize = 4 * 4 if is_key else x.dtype.itemsize
    return math.prod(x.shape) * itemsize


_RECORDING: ContextVar[bool] = ContextVar("named calls are kept", default=False)


@contextmanager
def record_calls(on: bool = True) -> Iterator[None]:
    """Keep named calls in what is traced meanwhile."""
    token = _RECORDING.set(on)
    try:
        yield
    finally:
        _RECORDING.reset(token)


def is_recording() -> bool:
    """Return whether a program is being traced that will be run in parts."""
    return _RECORDING.get()


def trace_global(group: AxisGroup, function: Callable, *shapes: Any) -> tuple[Any, Any]:
    """Return the program of a function of whole arrays, and the shapes of what it returns.

    It keeps named calls, also in the rule of a derivative, which JAX traces late. A collective of
    the user's own, over an axis along which rows are split, sees one device.
    """
    axis_env = [(axis, 1) for axis in group.axes]
    wrapper = lambda *arguments: function(
        *arguments
    )  # no trace of before, whose constants are gone
    with record_calls():
        return jax.make_jaxpr(wrapper, axis_env=axis_env, return_shape=True)(*shapes)
