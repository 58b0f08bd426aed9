"""How parts of a model, and the loss, see the rows of all devices while each runs on its own.

What they are given, and what one hands to the next, are values (parallel/spmd/placements.py): an
array is the same on all devices, of a `Part` each has its rows, of a `Sum` its share. On one
device, and where each device is to see its own rows only (rows="own"), they are plain arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from hfjax.parallel.spmd.nested import Along, InnerSides, many_times
from hfjax.parallel.spmd.partition_context import Join, bytes_of
from hfjax.parallel.spmd.placements import (
    ROWS,
    SAME,
    Cut,
    Kind,
    Part,
    Side,
    Sum,
    is_value,
    kept_kinds,
    kind_of,
    of_kind,
)
from hfjax.utils.paths import Flat

# Names by which models and libraries call the logical axes of a parameter.
_NAMES_OF_AXES = ("axes", "out_sharding", "sharding_names", "sharding")


def per_row(variable: object) -> bool:
    """Return whether a variable holds one key for each row of the global batch."""
    return isinstance(variable, nnx.Variable) and bool(variable.get_metadata("per_row", False))


def axes_of(template: Any) -> tuple[str | None, ...]:
    """Return the names of a variable's dimensions, () if it has none.

    `axes` are ours and have to fit. Those of flax may be of a mesh of the user's own: what is not
    one name for each dimension is no name.
    """
    if not isinstance(template, nnx.Variable):
        return ()
    for key in _NAMES_OF_AXES:
        names = template.get_metadata(key, None)
        if names is None:
            continue
        if key == "axes":
            return tuple(names)
        if isinstance(names, tuple | list) and len(names) == len(template.shape):
            return tuple(name if isinstance(name, str) else None for name in names)
    return ()


def cut_of(variable: Any) -> Cut | None:
    """Return where a variable of a layer, or of the model, has the rows of a batch."""
    if per_row(variable):
        ndim = variable.get_raw_value().ndim  # in an evaluation no key is drawn for rows
        return Cut(ndim - 1) if ndim else None
    return ROWS if axes_of(variable)[:1] == ("batch",) else None


class Kinds(NamedTuple):
    """The kinds of what layers hand on, along rows and along each inner side."""

    rows: list[Kind]
    inner: list[list[Kind]] | None


@dataclass(frozen=True)
class OnRows:
    """Runs functions of all rows on the rows of this device.

    Attributes:
        side: The devices that have other rows.
        in_parts: (side, function, *values, told) -> values: runs a program in parts.
        inner: Runs them on parts of positions and widths besides, if devices have such.
        told: What joined rows, by the part of the model that was traced last.
        told_inner: What joined positions, or widths, the same.
        enters: The dtype of what enters the first layer; None: as it is.
    """

    side: Side
    in_parts: Callable
    inner: InnerSides | None = None
    told: dict[str, list[Join]] = field(default_factory=dict, compare=False)
    told_inner: dict[str, list[Join]] = field(default_factory=dict, compare=False)
    enters: Any = None

    @property
    def joins(self) -> list[Join]:
        """What joins rows, in the order in which the parts were first traced."""
        return [join for joins in self.told.values() for join in joins]

    @property
    def joins_inner(self) -> list[Join]:
        """What joins positions or widths, in the order in which the parts were first traced."""
        return [join for joins in self.told_inner.values() for join in joins]

    @property
    def alone(self) -> bool:
        """Whether this device has all rows, and the whole of each."""
        return self.side.size == 1 and self.inner is None

    def telling(self, part: str) -> list[Join]:
        """Return the list that is to be told what joins rows in a part of the model."""
        self.told[part] = []
        return self.told[part]

    def within(self, part: str, function: Callable) -> Callable:
        """Return what runs a function of whole rows on the part of each that is here."""
        if self.inner is None:
            return function
        told = self.told_inner[part] = []
        return self.inner.running(function, told)

    def run(self, part: str, function: Callable, *given: Any, times: int = 1) -> Any:
        """Return the values that a function of all rows makes of values; it runs so many times."""
        function = self.within(part, function)
        told = self.telling(part)
        if self.side.size == 1:
            found = function(*given)
        else:
            found = self.in_parts(self.side, function, *given, told=told)
        many_times(told, times)
        many_times(self.told_inner.get(part, []), times)
        return found

    def whole_rows(self, tree: Any) -> Any:
        """Return values with the whole of each row that is here."""
        return self.inner.whole(self.side, tree) if self.inner else tree

    def is_replicated(self, value: Any) -> bool:
        """Return whether all devices have the whole of a value."""
        return not isinstance(value, Along) and not is_value(value)

    def shares(self, tree: Any) -> Any:
        """Return this device's share of each value of a tree."""
        return self.side.shares(self.inner.shares(self.side, tree) if self.inner else tree)

    # -- values ---------------------------------------------------------------------------------

    def values(self, tree: Any) -> Any:
        """Return arrays that have a row for each row here as parts of those of all devices."""
        return tree if self.side.size == 1 else jax.tree.map(Part, tree)

    def of_variables(self, variables: Flat, templates: Mapping[str, Any]) -> Flat:
        """Return what variables of the model hold as values."""

        def value(path: str, x: Any) -> Any:
            template = templates[path]
            if not isinstance(template, nnx.Variable):
                return x
            if per_row(template):  # of stacked layers there is a key for each layer first
                return Part(x, Cut(template.ndim)) if x.ndim > template.ndim else x
            cut = cut_of(template)
            return x if cut is None else Part(x, cut)

        held = self.side.size > 1
        return {path: value(path, x) if held else x for path, x in variables.items()}

    def of_parameters(self, parameters: Any, templates: Any = None) -> Any:
        """Return parameters as this device holds them: a state of variables, or a dict by path."""
        inner = self.inner
        if inner is None or not inner.splits:
            return parameters
        if templates is not None:
            names = lambda path: axes_of(templates[path]) if path in templates else ()
            return {path: inner.parameter(names(path), x) for path, x in parameters.items()}
        value = lambda v: v.replace(inner.parameter(axes_of(v), v.get_raw_value()))
        flat = nnx.to_flat_state(parameters)
        return nnx.from_flat_state([(keys, value(v)) for keys, v in flat])

    def of_state(self, state: nnx.State) -> nnx.State:
        """Return a state of one layer that holds values."""
        if self.side.size == 1:
            return state

        def value(variable: nnx.Variable) -> nnx.Variable:
            x, cut = variable.get_raw_value(), cut_of(variable)
            return variable if cut is None else variable.replace(Part(x, cut))

        return nnx.from_flat_state([(keys, value(v)) for keys, v in nnx.to_flat_state(state)])

    def _tell(
        self, part: str, values: Sequence[Any], kinds: Sequence[Kind], times: int = 1
    ) -> None:
        """Take note of what is completed or gathered where no equation asks for it."""
        self.told[part] = [
            Join(f"({part})", "", "sum" if isinstance(v, Sum) else "gather", bytes_of(v.x), times)
            for v, kind in zip(values, kinds, strict=True)
            if is_value(v) and kind_of(v) != kind
        ]

    def state_here(self, state: nnx.State, part: str, times: int = 1) -> nnx.State:
        """Return a state that a layer has written, of values, as this device holds it."""
        flat = nnx.to_flat_state(state)
        values = self.whole_rows([variable.get_raw_value() for _, variable in flat])
        kinds = [ROWS if axes_of(v)[:1] == ("batch",) else SAME for _, v in flat]
        self._tell(part, values, kinds, times)
        pairs = zip(flat, values, kinds, strict=True)
        return nnx.from_flat_state(
            [(keys, v.replace(self.side.as_kind(x, kind))) for (keys, v), x, kind in pairs]
        )

    def first(self, tree: Any, begin: tuple[int, int]) -> Any:
        """Return this device's rows of outputs [microbatches, rows, …], which are values."""

        def rows(value: Any) -> Any:
            x = value.x if is_value(value) else value
            if x.shape[:2] != begin or (self.side.size > 1 and kind_of(value) != ROWS):
                raise ValueError(
                    f"an output of a microbatch, {list(self._form(value)[0][1:])}, does not begin "
                    "with its rows, as each does in a pipeline. Return what belongs to rows; a "
                    "number for all rows is a metric of eval_step's loss."
                )
            return x

        return jax.tree.map(rows, tree, is_leaf=is_value)

    def written(self, before: Flat, after: Flat, part: str) -> Flat:
        """Return what variables hold on this device, given their values before and after."""
        after = self.whole_rows(after)
        new = [path for path, old in before.items() if after[path] is not old]
        kinds = [kind_of(before[path]) for path in new]
        self._tell(f"variables of {part}", [after[path] for path in new], kinds)

        def here(path: str, old: Any) -> Any:
            new = after[path]
            if new is not old:
                self._check_written(path, old, new)
                return self.side.as_kind(new, kind_of(old))
            return old.x if isinstance(old, Part) else old

        return {path: here(path, old) for path, old in before.items()}

    def _check_written(self, path: str, old: Any, new: Any) -> None:
        """Refuse what a variable does not hold from step to step."""
        (shape, dtype), (held, kept) = self._form(new), self._form(old)
        if (shape, dtype) != (held, kept):
            raise ValueError(
                f"{path} {held} {kept}: the model writes {shape} {dtype} to it. What a variable "
                "holds keeps its shape and dtype from step to step."
            )

    def _form(self, value: Any) -> tuple[tuple[int, ...], Any]:
        x = value.x if is_value(value) else jnp.asarray(value)
        split = isinstance(value, Part)
        return self.side.whole_shape(x.shape, value.cut) if split else x.shape, x.dtype

    # -- what layers hand on --------------------------------------------------------------------

    def kinds(self, body: Callable, x: Any) -> Kinds | None:
        """Return the kinds of x that `body(x)`, which returns something like x, keeps."""
        if self.alone:
            return None
        inner = self.inner.kept(self.side, body, x) if self.inner else None
        x = jax.eval_shape(lambda x: self._inner_kinds(x, inner), x)
        rows = [SAME if isinstance(v, Sum) else kind_of(v) for v in _leaves(x)]

        def run(rows: list[Kind]) -> list[Kind]:
            def turn(x: Any) -> Any:
                return self._inner_kinds(body(self.as_kinds(x, Kinds(rows, inner))), inner)

            return list(map(kind_of, _leaves(jax.eval_shape(turn, x))))

        return Kinds(kept_kinds(rows, run) if self.side.size > 1 else rows, inner)

    def _inner_kinds(self, x: Any, kinds: Sequence[Sequence[Kind]] | None) -> Any:
        return (
            x if self.inner is None or kinds is None else self.inner.as_kinds(self.side, x, kinds)
        )

    def as_kinds(self, x: Any, kinds: Kinds | None, part: str = "", times: int = 1) -> Any:
        """Return a tree of values in these kinds; `part` says where, for what is told."""
        if kinds is None:
            return x
        if part and self.inner and kinds.inner is not None:
            self.told_inner[part] = self.inner.joins(part, x, kinds.inner, times)
        x = self._inner_kinds(x, kinds.inner)
        leaves, form = jax.tree.flatten(x, is_leaf=is_value)
        if len(leaves) != len(kinds.rows):
            return x
        if part:
            self._tell(part, leaves, kinds.rows, times)
        pairs = zip(leaves, kinds.rows, strict=True)
        return form.unflatten([of_kind(self.side.as_kind(v, k), k) for v, k in pairs])


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_value)


def devices_along(axis: str) -> int:
    """Return over how many devices a collective along a mesh axis goes: 1 outside of a step."""
    try:
        return lax.axis_size(axis)
    except NameError:  # it is not bound here
        return 1
