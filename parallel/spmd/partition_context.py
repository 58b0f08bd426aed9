"""The context of a partitioned program: it redistributes values and records communication.

Each inner program (a loop, a branch, a rematerialised function) has a context of its own, since
values that are made inside may not be used outside.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var

from hfjax.parallel.jaxprs.bind import bind, plain_constant
from hfjax.parallel.jaxprs.model_mesh import trace_under_mesh
from hfjax.parallel.jaxprs.walk import name_of
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
from hfjax.utils.trace_context import set_value


@dataclass(frozen=True)
class CommEvent:
    """What devices did for an equation that works across shards.

    Attributes:
        line: The line of the user's program.
        operation: JAX's name of the operation.
        action: "sum", "greatest", "least", "gather"; "average" (of per-device results);
            "draw" (random numbers for the global batch, or a shard of it);
            "cut" (this device's slice, by index, of what is known for the global batch);
            "alone" (a user's collective that sees one device);
            "rule" (the rule of a derivative that is not linear in the cotangent).
        bytes: The size of the result: of a sum, or of the gathered array.
        times: How often in each run of the program.
        has_rule: Whether a rule asks for it; else it is a gather since no rule knows better.
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
    """Ignore the parameters that a loop will slice."""


@dataclass
class PartitionContext:
    """One partitioned program while it runs.

    Attributes:
        group: The devices.
        comms: The recorded events, in program order.
        split_sizes: The sizes of dimensions that were split, each with the split of the first.
        run: (context, jaxpr, constants, values) -> values: runs a program in a context.
        equation: The current equation.
        times: How often this program runs.
        has_rule: Whether a rule knows the equation.
        outer_source: The user's source of the enclosing equation, if the current one has none.
        make_ungathered: Stored parameter -> `Ungathered`.
        on_sliced_params: Called with the parameters that a loop will slice.
        concat_operands: Of a value concatenated along a dimension that is not split: its operands.
        lazy_values: Of a sharded value that was made from a smaller one: the same as a `LazyValue`,
            for another split or none.
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
        """Return the context of an inner program, which runs so often in each run of this one."""
        return replace(
            self,
            comms=self.comms if comms is None else comms,
            times=self.times * times,
            has_rule=True,
            outer_source=self.source_info,
            concat_operands={},
            lazy_values={},
            _cache={},
        )

    # -- values by placement ---------------------------------------------------------------------

    def redistribute(self, value: Any, placement: Placement) -> jax.Array:
        """Return this device's array of a value, redistributed to this placement."""
        if isinstance(placement, Split):
            return self.shard(value, placement)
        return self.as_partial(value) if placement == PARTIAL else self.replicate(value)

    def replicate(self, value: Any) -> Any:
        """Return the full array of a value."""
        if isinstance(value, ShardedValue):
            return self._memoize(value, "whole", lambda: self._all_gather(value))
        if isinstance(value, PartialValue):
            return self._memoize(value, "whole", lambda: self._all_reduce(value))
        if isinstance(value, LazyValue):
            return self._memoize(value, "whole", lambda: value.make(self, None))
        return value.unshard() if isinstance(value, Ungathered) else value

    def shard(self, value: Any, split: Split) -> jax.Array:
        """Return this device's shard of a value that is split so."""
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
        """Return this device's term of a value as a partial sum."""
        if isinstance(value, PartialValue):
            return value.x
        return self.group.as_partial(jnp.asarray(self.replicate(value)))

    def shard_for_broadcast(self, value: Any, split: Split) -> Any:
        """Return a value to combine with shards: a scalar, or one of size 1 there, in full."""
        shape = self.shape(value)
        if not shape or shape[split.dim] == 1:
            return self.replicate(value)
        return self.shard(value, split)

    def is_replicated(self, value: object) -> bool:
        """Return whether the full array of a value is known already."""
        return not isinstance(
            value, ShardedValue | PartialValue | LazyValue
        ) or "whole" in self._cache_of(value)

    def evaluate_lazy(self, value: Any) -> Any:
        """Compute a `LazyValue`: as a shard if a dimension has the size of a split one."""
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
        """Return a split of a dimension that has the size of a split one: of that one, if any."""
        splits = [
            self.split_sizes[n].with_dim(d) for d, n in enumerate(shape) if n in self.split_sizes
        ]
        candidates = [split for split in splits if self.group.divides(shape, split)]
        return min(
            candidates, key=lambda split: split != self.split_sizes[shape[split.dim]], default=None
        )

    def track_dim(self, value: Any) -> None:
        """Record the size of a dimension that is split."""
        if isinstance(value, ShardedValue):
            self.split_sizes.setdefault(self.shape(value)[value.split.dim], value.split)

    def _cache_of(self, value: Any) -> dict:
        return self._cache.get(id(value), (value, {}))[1]

    def _memoize(self, value: Any, key: Any, make: Callable[[], Any]) -> Any:
        cached = self._cache.setdefault(id(value), (value, {}))[
            1
        ]  # the value is kept, and so its id
        if key not in cached:
            cached[key] = make()
        return cached[key]

    def slice_local(self, x: jax.Array, split: Split) -> jax.Array:
        """Return this device's shard of a replicated array, and record it."""
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
        """Return the global shape of a value."""
        if isinstance(value, ShardedValue):
            return self.group.global_shape(value.x.shape, value.split)
        if isinstance(value, LazyValue):
            return value.shape
        if isinstance(value, Ungathered):
            return value.param.full_shape.shape
        return jnp.shape(value.x if isinstance(value, PartialValue) else value)

    # -- equations -------------------------------------------------------------------------------

    def bind(self, equation: JaxprEqn, values: Sequence[Any], **params: Any) -> Sequence[Any]:
        """Return the outputs of an equation for these arrays, with these parameters replaced."""
        if params:
            equation = equation.replace(params={**equation.params, **params})
        return bind(equation, values)

    def bind_sharded(
        self, split: Split, equation: JaxprEqn, values: Sequence[Any], **params: Any
    ) -> list[ShardedValue]:
        """Return the outputs of an equation for these arrays, as values with this split."""
        return [ShardedValue(x, split) for x in self.bind(equation, values, **params)]

    def record(self, action: str, x: jax.Array) -> None:
        """Record an event of the current equation."""
        name = name_of(self.equation) if self.equation else "result"
        if self.equation and (call := getattr(self.equation.params.get("name"), "call", None)):
            name = call.function.__name__
        self.comms.append(
            CommEvent(self.line, name, action, bytes_of(x), self.times, self.has_rule)
        )

    @property
    def source_info(self) -> Any:
        """Where in the user's program the current equation is."""
        summary = self.equation and source_info_util.summarize(self.equation.source_info)
        return self.equation.source_info if self.equation and summary else self.outer_source

    @property
    def line(self) -> str:
        """The user's line of the current equation."""
        return source_info_util.summarize(self.source_info) if self.source_info else ""


def aval_of(variable: Var | Literal) -> Any:
    """Return the shape and dtype of a variable of a program."""
    return variable.aval


def bytes_of(x: Shaped) -> int:
    """Return the bytes of an array."""
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    itemsize = 4 * 4 if is_key else x.dtype.itemsize
    return math.prod(x.shape) * itemsize


_RECORDING: ContextVar[bool] = ContextVar("named calls are kept", default=False)


def record_calls(on: bool = True) -> AbstractContextManager:
    """Keep calls with a rule (`RuleCall`) in programs that are traced meanwhile."""
    return set_value(_RECORDING, on)


def is_recording() -> bool:
    """Return whether the program that is being traced will run partitioned."""
    return _RECORDING.get()


@dataclass(frozen=True)
class PureFunction:
    """A function that is equal to another if both compute the same: a step traces it once."""


_PROGRAMS: ContextVar[dict | None] = ContextVar("programs that are traced already", default=None)


def reuse_programs() -> AbstractContextManager:
    """Trace each `PureFunction` once, for arguments of the same shapes, meanwhile."""
    return set_value(_PROGRAMS, {})


def forget_programs() -> None:
    """Trace every function again: what a module has asked for has another answer now."""
    if programs := _PROGRAMS.get():
        programs.clear()


def trace_global(group: AxisGroup, function: Callable, *shapes: Any) -> tuple[Any, Any]:
    """Return the program of a function of global arrays, and the shapes of what it returns.

    It keeps calls with a rule, also in the rule of a derivative, which JAX traces late. A user's
    collective over an axis of the group sees one device.
    """
    programs, key = _PROGRAMS.get(), _program_key(function, shapes)
    if programs is None or key is None:
        return _trace(group, function, shapes)
    if key not in programs:
        program, out_shapes = _trace(group, function, shapes)
        if any(isinstance(x, Tracer) for x in program.consts):  # of the program around it
            return program, out_shapes
        programs[key] = program, out_shapes
    return programs[key]


def _program_key(function: object, shapes: Any) -> Any:
    """Return what tells a program from others; None: it is not kept."""
    if not isinstance(function, PureFunction):
        return None
    leaves, treedef = jax.tree.flatten(shapes)
    avals = tuple((x.shape, x.dtype, x.weak_type) for x in leaves)
    key = function, treedef, avals, jax.sharding.get_abstract_mesh()
    try:
        hash(key)
    except TypeError:  # a module has an attribute without a hash
        return None
    return key


class Partitioned(partial):
    """A function that runs a program partitioned: the model in it is traced by itself."""


def _trace(group: AxisGroup, function: Callable, shapes: Any) -> tuple[Any, Any]:
    axis_env = [(axis, 1) for axis in group.axes]
    wrapper = lambda *arguments: function(*arguments)  # no earlier trace, whose constants are gone
    trace = jax.make_jaxpr(wrapper, axis_env=axis_env, return_shape=True)
    with record_calls():
        if isinstance(function, Partitioned):
            program, out_shapes = trace(*shapes)
        else:
            program, out_shapes = trace_under_mesh(trace, *shapes)
    return ClosedJaxpr(program.jaxpr, list(map(plain_constant, program.consts))), out_shapes
