"""Several axis groups together: devices shard the batch, and other dimensions of its examples.

The table of rules knows one axis group. So a program at global shapes runs for one group after the
other: partitioned over the first inner group, while it is traced at global shapes along the others;
the result is a program, which is partitioned over the next group, and last over the batch's.
Outside of programs a value that is sharded or partial along an inner group is `Nested`: it wraps
what devices hold of it along the groups that come after.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from hfjax.parallel.spmd.partition_context import CommEvent, Partitioned, bytes_of
from hfjax.parallel.spmd.placements import (
    PARTIAL,
    REPLICATED,
    AxisGroup,
    Placement,
    Split,
    from_local,
    is_distributed,
    loop_placements,
    placement_of,
)


@partial(
    jax.tree_util.register_dataclass, data_fields=["x"], meta_fields=["placement", "group_name"]
)
@dataclass(frozen=True, eq=False)
class Nested:
    """What a device holds of a value along an inner group, by its name: an array, or a value."""

    x: Any
    placement: Placement
    group_name: str


def _is_leaf(value: object) -> bool:
    return isinstance(value, Nested) or is_distributed(value)


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=_is_leaf)


@dataclass(frozen=True)
class InnerAxes:
    """Partitions functions over the inner groups, within what is partitioned over the batch.

    Attributes:
        groups: The devices along each; programs are partitioned over the first one first.
        run_partitioned: (group, function, *values, comms) -> values: runs a partitioned program.
        dim_groups: Name of a dimension of parameters -> name of the group that shards it.
    """

    groups: tuple[AxisGroup, ...]
    run_partitioned: Callable
    dim_groups: Mapping[str, str] = field(default_factory=dict, hash=False)

    def wrap(self, function: Callable, comms: list[CommEvent]) -> Callable:
        """Return a function of values along the inner groups, from one of global arrays."""
        return self._wrap_groups(self.groups, function, comms)

    def _wrap_groups(
        self, groups: Sequence[AxisGroup], function: Callable, comms: list[CommEvent]
    ) -> Callable:
        for group in groups:
            function = Partitioned(self._run, group, function, comms)
        return function

    def _run(self, group: AxisGroup, function: Callable, comms: list[CommEvent], *args: Any) -> Any:
        is_own = lambda v: isinstance(v, Nested) and v.group_name == group.name
        unwrap = lambda v: from_local(v.x, v.placement) if is_own(v) else v
        values = jax.tree.map(unwrap, args, is_leaf=is_own)
        outs = self.run_partitioned(group, function, *values, comms=comms)
        rewrap = lambda v: Nested(v.x, placement_of(v), group.name) if is_distributed(v) else v
        return jax.tree.map(rewrap, outs, is_leaf=is_distributed)

    # -- inputs -----------------------------------------------------------------------------------

    def slice_local(self, x: jax.Array, split: Split) -> Nested:
        """Return this device's shard of a full array along the only group."""
        (group,) = self.groups
        return Nested(group.slice_local(x, split), split, group.name)

    def wrap_param(self, names: Sequence[str | None], x: Any) -> jax.Array | Nested:
        """Return this device's array of a parameter as a value, by the names of its dimensions."""
        extra_dims = jnp.ndim(x) - len(names)  # x: all stacked layers, or one
        names = [*[None] * extra_dims, *names[max(0, -extra_dims) :]]
        for group in reversed(self.groups):
            dims = [
                d for d, name in enumerate(names) if self.dim_groups.get(name or "") == group.name
            ]
            x = Nested(x, Split(dims[0]), group.name) if dims else x
        return x

    # -- redistribution ---------------------------------------------------------------------------

    def _placement(self, level: int, value: object) -> Placement:
        while isinstance(value, Nested):
            if value.group_name == self.groups[level].name:
                return value.placement
            value = value.x
        return REPLICATED

    def _map_level(
        self, level: int, batch_group: AxisGroup, transform: Callable, value: Any
    ) -> Any:
        """Return a value with `transform(placement, array)` of what is held along a group."""
        group, inner_names = self.groups[level], [group.name for group in self.groups[:level]]
        if isinstance(value, Nested) and value.group_name in inner_names:
            return replace(value, x=self._map_level(level, batch_group, transform, value.x))
        placement = self._placement(level, value)
        x = value.x if isinstance(value, Nested) and value.group_name == group.name else value
        function = self._wrap_groups(self.groups[level + 1 :], partial(transform, placement), [])
        return (
            self.run_partitioned(batch_group, function, x) if batch_group.size > 1 else function(x)
        )

    def _redistribute(
        self, level: int, batch_group: AxisGroup, placement: Placement, value: Any
    ) -> Any:
        if self._placement(level, value) == placement:
            return value
        group = self.groups[level]

        def transform(before: Placement, x: Any) -> Any:
            out = group.redistribute(from_local(x, before), placement)
            return out if placement == REPLICATED else Nested(out, placement, group.name)

        return self._map_level(level, batch_group, transform, value)

    def replicate(self, batch_group: AxisGroup, tree: Any) -> Any:
        """Return each value replicated along the inner groups; a replicated one as it is."""

        def replicate_value(value: Any) -> Any:
            for level in range(len(self.groups)):
                value = self._redistribute(level, batch_group, REPLICATED, value)
            return value

        return jax.tree.map(replicate_value, tree, is_leaf=_is_leaf)

    def as_partial(self, batch_group: AxisGroup, tree: Any) -> Any:
        """Return this device's term of each value; the terms of all devices add up to it."""

        def to_partial(value: Any) -> Any:
            for level, group in enumerate(self.groups):
                transform = lambda placement, x, group=group: group.as_partial_tree(
                    from_local(jnp.asarray(x), placement)
                )
                value = self._map_level(level, batch_group, transform, value)
            return value

        return jax.tree.map(to_partial, tree, is_leaf=_is_leaf)

    def redistribute(
        self, batch_group: AxisGroup, tree: Any, placements: Sequence[Sequence[Placement]]
    ) -> Any:
        """Return a tree of values in these placements, along each group."""
        for level, level_placements in enumerate(placements):
            leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_leaf)
            if len(leaves) != len(level_placements):
                return tree
            pairs = zip(leaves, level_placements, strict=True)
            tree = treedef.unflatten(
                [self._redistribute(level, batch_group, placement, v) for v, placement in pairs]
            )
        return tree

    def find_comms(
        self, component: str, tree: Any, placements: Sequence[Sequence[Placement]], times: int
    ) -> list[CommEvent]:
        """Return the sums and gathers that bring values into these placements."""
        comms: list[CommEvent] = []
        leaves = _leaves(tree)
        for level, level_placements in enumerate(placements):
            if len(leaves) != len(level_placements):
                return comms
            for value, placement in zip(leaves, level_placements, strict=True):
                current = self._placement(level, value)
                if current not in (placement, REPLICATED):
                    size = sum(map(bytes_of, jax.tree.leaves(value)))
                    action = "sum" if current == PARTIAL else "gather"
                    comms.append(CommEvent(f"({component})", "", action, size, times))
        return comms

    def carry_placements(
        self, batch_group: AxisGroup, body: Callable, x: Any
    ) -> list[list[Placement]]:
        """Return the placements of x that `body(x)`, which returns something like x, keeps."""
        outer_placements: list[list[Placement]] = []
        for level in range(len(self.groups)):

            def run(placements: list[Placement], level: int = level) -> list[Placement]:
                step = lambda x: body(
                    self.redistribute(batch_group, x, [*outer_placements, placements])
                )
                outs = jax.eval_shape(step, x)
                return [self._placement(level, v) for v in _leaves(outs)]

            initial = [self._placement(level, v) for v in _leaves(x)]
            outer_placements.append(
                loop_placements(
                    [REPLICATED if placement == PARTIAL else placement for placement in initial],
                    run,
                )
            )
        return outer_placements


def scale_times(comms: list[CommEvent], times: int) -> None:
    """Multiply how often each event happens by the number of runs of its program."""
    comms[:] = [replace(comm, times=comm.times * times) for comm in comms]
