"""Two sides at once: devices that have other rows, and other positions of the same rows.

The table of rules knows one side. So a program of whole rows and whole positions is run twice: on
parts of the positions first, while it is traced with all rows; what that makes is a program of all
rows, and is run on parts of those. Outside of programs a value of which devices have parts of
positions is `Along`: around whatever they have of its rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.parallel.in_parts.kinds import (
    SAME,
    SUM,
    Kind,
    Side,
    is_value,
    kept_kinds,
    kind_of,
    of_kind,
)
from hfjax.parallel.in_parts.scope import Join, bytes_of


@partial(jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["kind"])
@dataclass(frozen=True, eq=False)
class Along:
    """What a device holds of a value along the inner side: an array, or a value of rows."""

    x: Any
    kind: Kind


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Along) or is_value(value)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_leaf)


def _kind(value: Any) -> Kind:
    return value.kind if isinstance(value, Along) else SAME


@dataclass(frozen=True)
class InnerSide:
    """Runs functions on parts of the inner side, within what is run on parts of the rows.

    Attributes:
        side: The devices that have other parts.
        in_parts: (side, function, *values, told) -> values: runs a program in parts.
    """

    side: Side
    in_parts: Callable

    def running(self, function: Callable, told: list[Join]) -> Callable:
        """Return the function of values of the inner side that runs a function of the whole."""

        def value(v: Any) -> Any:
            return of_kind(v.x, v.kind) if isinstance(v, Along) else v

        def run(*given: Any) -> Any:
            values = jax.tree.map(value, given, is_leaf=lambda v: isinstance(v, Along))
            found = self.in_parts(self.side, function, *values, told=told)
            again = lambda v: Along(v.x, kind_of(v)) if is_value(v) else v
            return jax.tree.map(again, found, is_leaf=is_value)

        return run

    def mine(self, x: jax.Array, kind: Kind) -> Along:
        """Return what this device holds of a whole array."""
        return Along(self.side.as_kind(x, kind), kind)

    def _on_rows(self, rows: Side, function: Callable, value: Any) -> Any:
        """Return what a function of a value over all rows makes of what is here of these."""
        return self.in_parts(rows, function, value) if rows.size > 1 else function(value)

    def _whole(self, value: Along) -> jax.Array:
        return self.side.whole_of(of_kind(value.x, value.kind))

    def whole(self, rows: Side, tree: Any) -> Any:
        """Return the whole of each value along the inner side; what is whole is itself."""
        whole = partial(self._on_rows, rows, self._whole)
        of = lambda v: whole(v) if isinstance(v, Along) else v
        return jax.tree.map(of, tree, is_leaf=_is_leaf)

    def shares(self, rows: Side, tree: Any) -> Any:
        """Return this device's share of each value; the shares add up to it."""

        def share(value: Any) -> jax.Array:
            along = isinstance(value, Along)
            return self.side.shares(of_kind(value.x, value.kind) if along else jnp.asarray(value))

        return jax.tree.map(partial(self._on_rows, rows, share), tree, is_leaf=_is_leaf)

    def as_kinds(self, rows: Side, tree: Any, kinds: Sequence[Kind]) -> Any:
        """Return a tree of values in these kinds."""
        leaves, form = jax.tree.flatten(tree, is_leaf=_is_leaf)
        if len(leaves) != len(kinds):
            return tree

        def again(value: Any, kind: Kind) -> Any:
            x = value.x if isinstance(value, Along) else value
            found = self.side.as_kind(of_kind(x, _kind(value)), kind)
            return found if kind == SAME else Along(found, kind)

        turned = lambda v, kind: self._on_rows(rows, partial(again, kind=kind), v)
        pairs = zip(leaves, kinds, strict=True)
        return form.unflatten([v if _kind(v) == k else turned(v, k) for v, k in pairs])

    def joins(self, part: str, tree: Any, kinds: Sequence[Kind], times: int) -> list[Join]:
        """Return what is completed or gathered where values are taken in these kinds."""
        leaves = _leaves(tree)
        if len(leaves) != len(kinds):
            return []
        of = lambda v: "sum" if v.kind == SUM else "gather"
        size = lambda v: sum(map(bytes_of, jax.tree.leaves(v.x)))
        return [
            Join(f"({part})", "", of(v), size(v), times)
            for v, kind in zip(leaves, kinds, strict=True)
            if isinstance(v, Along) and v.kind != kind
        ]

    def kept(self, rows: Side, body: Callable, x: Any) -> list[Kind]:
        """Return the kinds of x that `body(x)`, which returns something like x, keeps."""

        def run(kinds: list[Kind]) -> list[Kind]:
            found = jax.eval_shape(lambda x: body(self.as_kinds(rows, x, kinds)), x)
            return list(map(_kind, _leaves(found)))

        first = [SAME if kind == SUM else kind for kind in map(_kind, _leaves(x))]
        return kept_kinds(first, run)


def many_times(joins: list[Join], times: int) -> None:
    """Let what was told of a program be told of so many runs of it."""
    joins[:] = [replace(join, times=join.times * times) for join in joins]
