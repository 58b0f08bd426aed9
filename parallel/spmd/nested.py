"""Several sides at once: devices that have other rows, and of these rows other parts.

The table of rules knows one side. So a program of whole rows, whole positions and whole widths is
run for each side in turn: on parts of the first inner side, while it is traced whole along the
others; what that makes is a program, and is run on parts of the next, and last of the rows. Outside
of programs a value of which devices have parts along an inner side is `Along`: around what they
have of it along the sides that come after.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.parallel.spmd.partition_context import Join, bytes_of
from hfjax.parallel.spmd.placements import (
    SAME,
    SUM,
    Cut,
    Kind,
    Side,
    is_value,
    kept_kinds,
    kind_of,
    of_kind,
)


@partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["kind", "side"])
@dataclass(frozen=True, eq=False)
class Along:
    """What a device holds of a value along an inner side, by its name: an array, or a value."""

    x: Any
    kind: Kind
    side: str


def _is_leaf(value: object) -> bool:
    return isinstance(value, Along) or is_value(value)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_leaf)


@dataclass(frozen=True)
class InnerSides:
    """Runs functions on parts of the inner sides, within what is run on parts of the rows.

    Attributes:
        sides: The devices along each; programs are run on parts of the first first.
        in_parts: (side, function, *values, told) -> values: runs a program in parts.
        splits: Name of a dimension of parameters -> the side that has parts of it.
    """

    sides: tuple[Side, ...]
    in_parts: Callable
    splits: Mapping[str, str] = field(default_factory=dict, hash=False)

    def running(self, function: Callable, told: list[Join]) -> Callable:
        """Return the function of values of the inner sides that runs a function of the whole."""
        return self._through(self.sides, function, told)

    def _through(self, sides: Sequence[Side], function: Callable, told: list[Join]) -> Callable:
        for side in sides:
            function = partial(self._run, side, function, told)
        return function

    def _run(self, side: Side, function: Callable, told: list[Join], *given: Any) -> Any:
        mine = lambda v: isinstance(v, Along) and v.side == side.name
        value = lambda v: of_kind(v.x, v.kind) if mine(v) else v
        values = jax.tree.map(value, given, is_leaf=mine)
        found = self.in_parts(side, function, *values, told=told)
        again = lambda v: Along(v.x, kind_of(v), side.name) if is_value(v) else v
        return jax.tree.map(again, found, is_leaf=is_value)

    # -- what comes in ----------------------------------------------------------------------------

    def mine(self, x: jax.Array, cut: Cut) -> Along:
        """Return what this device holds of a whole array along the one side that there is."""
        (side,) = self.sides
        return Along(side.cut(x, cut), cut, side.name)

    def parameter(self, names: Sequence[str | None], x: Any) -> jax.Array | Along:
        """Return what this device holds of a parameter, by the names of its dimensions."""
        more = jnp.ndim(x) - len(names)  # of stacked layers all, or one
        names = [*[None] * more, *names[max(0, -more) :]]
        for side in reversed(self.sides):
            dims = [d for d, name in enumerate(names) if self.splits.get(name or "") == side.name]
            x = Along(x, Cut(dims[0]), side.name) if dims else x
        return x

    # -- other kinds ------------------------------------------------------------------------------

    def _kind(self, level: int, value: object) -> Kind:
        while isinstance(value, Along):
            if value.side == self.sides[level].name:
                return value.kind
            value = value.x
        return SAME

    def _turned(self, level: int, rows: Side, turn: Callable, value: Any) -> Any:
        """Return a value with `turn(kind, array)` of what is held along a side."""
        side, inner = self.sides[level], [side.name for side in self.sides[:level]]
        if isinstance(value, Along) and value.side in inner:
            return replace(value, x=self._turned(level, rows, turn, value.x))
        kind = self._kind(level, value)
        x = value.x if isinstance(value, Along) and value.side == side.name else value
        function = self._through(self.sides[level + 1 :], partial(turn, kind), [])
        return self.in_parts(rows, function, x) if rows.size > 1 else function(x)

    def _as_kind(self, level: int, rows: Side, kind: Kind, value: Any) -> Any:
        if self._kind(level, value) == kind:
            return value
        side = self.sides[level]

        def turn(before: Kind, x: Any) -> Any:
            found = side.as_kind(of_kind(x, before), kind)
            return found if kind == SAME else Along(found, kind, side.name)

        return self._turned(level, rows, turn, value)

    def whole(self, rows: Side, tree: Any) -> Any:
        """Return the whole of each value along the inner sides; what is whole is itself."""

        def whole(value: Any) -> Any:
            for level in range(len(self.sides)):
                value = self._as_kind(level, rows, SAME, value)
            return value

        return jax.tree.map(whole, tree, is_leaf=_is_leaf)

    def shares(self, rows: Side, tree: Any) -> Any:
        """Return this device's share of each value; the shares add up to it."""

        def share(value: Any) -> Any:
            for level, side in enumerate(self.sides):
                turn = lambda kind, x, side=side: side.shares(of_kind(jnp.asarray(x), kind))
                value = self._turned(level, rows, turn, value)
            return value

        return jax.tree.map(share, tree, is_leaf=_is_leaf)

    def as_kinds(self, rows: Side, tree: Any, kinds: Sequence[Sequence[Kind]]) -> Any:
        """Return a tree of values in these kinds, along each side."""
        for level, wanted in enumerate(kinds):
            leaves, form = jax.tree.flatten(tree, is_leaf=_is_leaf)
            if len(leaves) != len(wanted):
                return tree
            pairs = zip(leaves, wanted, strict=True)
            tree = form.unflatten([self._as_kind(level, rows, kind, v) for v, kind in pairs])
        return tree

    def joins(
        self, part: str, tree: Any, kinds: Sequence[Sequence[Kind]], times: int
    ) -> list[Join]:
        """Return what is completed or gathered where values are taken in these kinds."""
        found: list[Join] = []
        leaves = _leaves(tree)
        for level, wanted in enumerate(kinds):
            if len(leaves) != len(wanted):
                return found
            for value, kind in zip(leaves, wanted, strict=True):
                now = self._kind(level, value)
                if now not in (kind, SAME):
                    size = sum(map(bytes_of, jax.tree.leaves(value)))
                    how = "sum" if now == SUM else "gather"
                    found.append(Join(f"({part})", "", how, size, times))
        return found

    def kept(self, rows: Side, body: Callable, x: Any) -> list[list[Kind]]:
        """Return the kinds of x that `body(x)`, which returns something like x, keeps."""
        known: list[list[Kind]] = []
        for level in range(len(self.sides)):

            def run(kinds: list[Kind], level: int = level) -> list[Kind]:
                turn = lambda x: body(self.as_kinds(rows, x, [*known, kinds]))
                found = jax.eval_shape(turn, x)
                return [self._kind(level, v) for v in _leaves(found)]

            first = [self._kind(level, v) for v in _leaves(x)]
            known.append(kept_kinds([SAME if kind == SUM else kind for kind in first], run))
        return known


def many_times(joins: list[Join], times: int) -> None:
    """Let what was told of a program be told of so many runs of it."""
    joins[:] = [replace(join, times=join.times * times) for join in joins]
