"""How the components of a model, and the loss, see the global batch while devices run on shards.

Their inputs and outputs are values (parallel/spmd/placements.py): an array is replicated, of a
`ShardedValue` each device holds its examples, of a `PartialValue` its term. On one device, and
where each device is to see its own examples only (batch_view="local"), they are plain arrays.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from hfjax.parallel.jaxprs.model_mesh import call_or_trace
from hfjax.parallel.spmd.axes import logical_axes
from hfjax.parallel.spmd.nested import InnerAxes, Nested, scale_times
from hfjax.parallel.spmd.partition_context import CommEvent, bytes_of
from hfjax.parallel.spmd.placements import (
    BATCH_SPLIT,
    REPLICATED,
    AxisGroup,
    PartialValue,
    Placement,
    ShardedValue,
    Split,
    from_local,
    is_distributed,
    loop_placements,
    placement_of,
)
from hfjax.utils.paths import Flat


def per_example(variable: object) -> bool:
    """Return whether a variable holds one key for each example of the global batch."""
    return isinstance(variable, nnx.Variable) and bool(variable.get_metadata("per_example", False))


def variable_split(variable: Any) -> Split | None:
    """Return the split of a variable's batch dimension, if it has one."""
    if per_example(variable):
        ndim = variable.get_raw_value().ndim  # in evaluation no key is drawn per example
        return Split(ndim - 1) if ndim else None
    return BATCH_SPLIT if logical_axes(variable)[:1] == ("batch",) else None


class Placements(NamedTuple):
    """The placements of what layers pass on, along the batch and along each inner group."""

    batch: list[Placement]
    inner: list[list[Placement]] | None


@dataclass(frozen=True)
class GlobalBatch:
    """Runs functions of the global batch on this device's examples.

    Attributes:
        group: The devices that shard the batch.
        run_partitioned: (group, function, *values, comms) -> values: runs a partitioned program.
        inner: Partitions functions over positions and widths besides, if devices shard these.
        component_comms: The events across examples, by component of the model, as traced last.
        inner_component_comms: The same across positions, or widths.
        input_dtype: The dtype of the input of the first layer; None: as it is.
    """

    group: AxisGroup
    run_partitioned: Callable
    inner: InnerAxes | None = None
    component_comms: dict[str, list[CommEvent]] = field(default_factory=dict, compare=False)
    inner_component_comms: dict[str, list[CommEvent]] = field(default_factory=dict, compare=False)
    input_dtype: Any = None

    @property
    def comms(self) -> list[CommEvent]:
        """The events across examples, in the order in which the components were first traced."""
        return [comm for comms in self.component_comms.values() for comm in comms]

    @property
    def inner_comms(self) -> list[CommEvent]:
        """The events across positions or widths, in the order of `comms`."""
        return [comm for comms in self.inner_component_comms.values() for comm in comms]

    @property
    def is_unsharded(self) -> bool:
        """Whether this device holds all examples, in full."""
        return self.group.size == 1 and self.inner is None

    def start_comms(self, component: str) -> list[CommEvent]:
        """Return a new list for the events across examples in a component of the model."""
        self.component_comms[component] = []
        return self.component_comms[component]

    def wrap_inner(self, component: str, function: Callable) -> Callable:
        """Return what runs a function of full examples on this device's shard of each."""
        if self.inner is None:
            return function
        comms = self.inner_component_comms[component] = []
        return self.inner.wrap(function, comms)

    def run(self, component: str, function: Callable, *args: Any, times: int = 1) -> Any:
        """Return the outputs of a function of the global batch; it runs so many times."""
        function = self.wrap_inner(component, function)
        comms = self.start_comms(component)
        if self.group.size == 1:
            run_traced = partial(self.run_partitioned, self.group, function, comms=comms)
            outs = call_or_trace(function, run_traced, *args)
        else:
            outs = self.run_partitioned(self.group, function, *args, comms=comms)
        scale_times(comms, times)
        scale_times(self.inner_component_comms.get(component, []), times)
        return outs

    def replicate_inner(self, tree: Any) -> Any:
        """Return values replicated along the inner groups: each local example in full."""
        return self.inner.replicate(self.group, tree) if self.inner else tree

    def is_replicated(self, value: Any) -> bool:
        """Return whether a value is replicated."""
        return not isinstance(value, Nested) and not is_distributed(value)

    def as_partial(self, tree: Any) -> Any:
        """Return this device's term of each value of a tree as a partial sum."""
        return self.group.as_partial_tree(
            self.inner.as_partial(self.group, tree) if self.inner else tree
        )

    # -- values ---------------------------------------------------------------------------------

    def as_sharded(self, tree: Any) -> Any:
        """Return arrays of local examples as shards of those of the global batch."""
        return tree if self.group.size == 1 else jax.tree.map(ShardedValue, tree)

    def variable_values(self, variables: Flat, templates: Mapping[str, Any]) -> Flat:
        """Return the arrays of the model's variables as values."""

        def to_value(path: str, x: Any) -> Any:
            template = templates[path]
            if not isinstance(template, nnx.Variable):
                return x
            if per_example(template):  # of stacked layers: a key for each layer first
                return ShardedValue(x, Split(template.ndim)) if x.ndim > template.ndim else x
            split = variable_split(template)
            return x if split is None else ShardedValue(x, split)

        is_sharded = self.group.size > 1
        return {path: to_value(path, x) if is_sharded else x for path, x in variables.items()}

    def parameter_values(self, parameters: Any, templates: Any = None) -> Any:
        """Return parameters as values of this device: a state of variables, or a dict by path."""
        inner = self.inner
        if inner is None or not inner.dim_groups:
            return parameters
        if templates is not None:
            names = lambda path: logical_axes(templates[path]) if path in templates else ()
            return {path: inner.wrap_param(names(path), x) for path, x in parameters.items()}
        to_value = lambda v: v.replace(inner.wrap_param(logical_axes(v), v.get_raw_value()))
        flat = nnx.to_flat_state(parameters)
        return nnx.from_flat_state([(keys, to_value(v)) for keys, v in flat])

    def state_values(self, state: nnx.State) -> nnx.State:
        """Return a state of one layer that holds values."""
        if self.group.size == 1:
            return state

        def to_value(variable: Any) -> Any:
            if (split := variable_split(variable)) is None:
                return variable
            return variable.replace(ShardedValue(_raw(variable), split))

        return nnx.from_flat_state([(keys, to_value(v)) for keys, v in nnx.to_flat_state(state)])

    def _record(
        self, component: str, values: Sequence[Any], placements: Sequence[Placement], times: int = 1
    ) -> None:
        """Record the sums and gathers that no equation asks for."""
        self.component_comms[component] = [
            CommEvent(
                f"({component})",
                "",
                "sum" if isinstance(v, PartialValue) else "gather",
                bytes_of(v.x),
                times,
            )
            for v, placement in zip(values, placements, strict=True)
            if is_distributed(v) and placement_of(v) != placement
        ]

    def local_state(self, state: nnx.State, component: str, times: int = 1) -> nnx.State:
        """Return a state that a layer has written, of values, as this device's arrays."""
        flat = nnx.to_flat_state(state)
        values = self.replicate_inner([_raw(variable) for _, variable in flat])
        placements = [
            BATCH_SPLIT if logical_axes(v)[:1] == ("batch",) else REPLICATED for _, v in flat
        ]
        self._record(component, values, placements, times)
        pairs = zip(flat, values, placements, strict=True)
        return nnx.from_flat_state(
            [
                (keys, _replace_raw(v, self.group.redistribute(x, placement)))
                for (keys, v), x, placement in pairs
            ]
        )

    def local_variables(self, before: Flat, after: Flat, component: str) -> Flat:
        """Return this device's arrays of variables, given their values before and after."""
        after = self.replicate_inner(after)
        changed_paths = [path for path, old in before.items() if after[path] is not old]
        placements = [placement_of(before[path]) for path in changed_paths]
        self._record(
            f"variables of {component}", [after[path] for path in changed_paths], placements
        )

        def local_value(path: str, old: Any) -> Any:
            new = after[path]
            if new is not old:
                self._check_shape_dtype(path, old, new)
                return self.group.redistribute(new, placement_of(old))
            return old.x if isinstance(old, ShardedValue) else old

        return {path: local_value(path, old) for path, old in before.items()}

    def _check_shape_dtype(self, path: str, old: Any, new: Any) -> None:
        """Refuse a new value of a variable that has another shape or dtype."""
        (shape, dtype), (old_shape, old_dtype) = self.shape_dtype(new), self.shape_dtype(old)
        if (shape, dtype) != (old_shape, old_dtype):
            raise ValueError(
                f"{path} {old_shape} {old_dtype}: the model writes {shape} {dtype} to it. What a "
                "variable holds keeps its shape and dtype from step to step."
            )

    def shape_dtype(self, value: Any) -> tuple[tuple[int, ...], Any]:
        """Return the global shape of a value, and its dtype."""
        x = value.x if is_distributed(value) else jnp.asarray(value)
        is_split = isinstance(value, ShardedValue)
        return self.group.global_shape(x.shape, value.split) if is_split else x.shape, x.dtype

    # -- values between layers ------------------------------------------------------------------

    def carry_placements(self, body: Callable, x: Any) -> Placements | None:
        """Return the placements of x that `body(x)`, which returns something like x, keeps."""
        if self.is_unsharded:
            return None
        inner = self.inner.carry_placements(self.group, body, x) if self.inner else None
        x = jax.eval_shape(lambda x: self._redistribute_inner(x, inner), x)
        initial = [
            REPLICATED if isinstance(v, PartialValue) else placement_of(v) for v in _leaves(x)
        ]

        def next_placements(placements: list[Placement]) -> list[Placement]:
            def step(x: Any) -> Any:
                return self._redistribute_inner(
                    body(self.redistribute(x, Placements(placements, inner))), inner
                )

            return list(map(placement_of, _leaves(jax.eval_shape(step, x))))

        return Placements(
            loop_placements(initial, next_placements) if self.group.size > 1 else initial, inner
        )

    def _redistribute_inner(self, x: Any, placements: Sequence[Sequence[Placement]] | None) -> Any:
        return (
            x
            if self.inner is None or placements is None
            else self.inner.redistribute(self.group, x, placements)
        )

    def redistribute(
        self, x: Any, placements: Placements | None, component: str = "", times: int = 1
    ) -> Any:
        """Return a tree of values in these placements; `component` says where, for the events."""
        if placements is None:
            return x
        if component and self.inner and placements.inner is not None:
            self.inner_component_comms[component] = self.inner.find_comms(
                component, x, placements.inner, times
            )
        x = self._redistribute_inner(x, placements.inner)
        leaves, treedef = jax.tree.flatten(x, is_leaf=is_distributed)
        if len(leaves) != len(placements.batch):
            return x
        if component:
            self._record(component, leaves, placements.batch, times)
        pairs = zip(leaves, placements.batch, strict=True)
        return treedef.unflatten(
            [from_local(self.group.redistribute(v, placement), placement) for v, placement in pairs]
        )


def _raw(variable: Any) -> Any:
    """Return what a variable holds; an array that a module keeps in none itself."""
    return variable.get_raw_value() if isinstance(variable, nnx.Variable) else variable


def _replace_raw(variable: Any, x: Any) -> Any:
    return variable.replace(x) if isinstance(variable, nnx.Variable) else x


def _leaves(tree: Any) -> list[Any]:
    return jax.tree.leaves(tree, is_leaf=is_distributed)
