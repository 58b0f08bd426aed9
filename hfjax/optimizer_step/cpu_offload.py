"""The update of a state that is partly in host memory: streamed through the device in units.

The optimizer's program is traced once and cut into units that update one parameter each, or one
layer of stacked layers. What a unit needs is copied to the device, updated there and copied back
before the next unit comes.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P

from hfjax.optimizer_step.gradients import Gradients
from hfjax.optimizer_step.update import UpdatableState, UpdateAfterGradients
from hfjax.optimizers.transforms import params_from_master
from hfjax.parallel.execution import guard
from hfjax.parallel.jaxprs.program import FlatProgram, trace_flat
from hfjax.parallel.mesh import PIPE_AXIS
from hfjax.parallel.offload.host_memory import is_on_host, to_device, to_host
from hfjax.parallel.param_specs import ParamSpecs, entries_of
from hfjax.utils.paths import Flat, Index, flatten, nest

Key = tuple[str, str]  # GRADIENT or PARAMETER and a path, or OPTIMIZER and a name
Arrays = dict[Key, Any]
GRADIENT, PARAMETER, OPTIMIZER = "gradient", "parameter", "kept"


@dataclass(frozen=True, eq=False)
class StreamedUpdate(UpdateAfterGradients):
    """The update of a layout whose state is partly in host memory (HOST_OPTIMIZER).

    Used where `layout.host_memory` is true, unless the optimizer runs in the backward pass: then
    `parallel/layerwise` unshards and updates layer by layer.
    """

    is_layerwise: Callable[[], bool]  # whether the optimizer updates each layer independently

    def __post_init__(self) -> None:
        assert self._units, "tried out here, since no number is known inside of a trace"

    def apply(
        self,
        gradients: Gradients,
        mean: Callable[[Flat], Flat],
        params: Flat,
        old_state: UpdatableState,
        finite: jax.Array,
    ) -> UpdatableState:
        """Return the state after the step.

        Streamed arrays, new or old, are selected unit by unit: no branch holds the state twice, and
        nothing can be selected in host memory.
        """
        keep = partial(guard, self.engine.context.execution.on_nonfinite)
        updater = _UnitUpdater(self, mean, keep, finite)
        new = self._update_params(updater, gradients.sums, old_state)
        return UpdatableState(*new, keep(finite, gradients.variables, old_state.variables))

    def _update_params(
        self, updater: "_UnitUpdater", gradients: Flat, old_state: UpdatableState
    ) -> tuple[Flat, Any]:
        """Return new parameters and optimizer state, each where the layout has it."""
        leaves = dict(zip(self.parts.leaves, jax.tree.leaves(old_state.optimizer), strict=True))
        old = _add_kind(GRADIENT, gradients) | _add_kind(PARAMETER, old_state.parameters)
        old |= _add_kind(OPTIMIZER, leaves)
        new: Arrays = {}
        for unit in self._units:
            new |= updater.update(unit, _wait_for_copies(old, unit, new))
        select = lambda kind: {name: x for (key_kind, name), x in new.items() if key_kind == kind}
        return old_state.parameters | select(PARAMETER), self.parts.join(
            old_state.optimizer, select(OPTIMIZER)
        )

    @cached_property
    def host_keys(self) -> frozenset[Key]:
        """The keys of the arrays in host memory."""
        host_memory = self.layout.host_memory
        parameters = self.layout.param_specs if host_memory.parameters else ()
        names = {(OPTIMIZER, name) for name in host_memory.optimizer}
        return frozenset(names | {(PARAMETER, path) for path in parameters})

    def owner(self, key: Key) -> ParamSpecs | None:
        """Return the parameter to which an array belongs; None: to none."""
        kind, name = key
        if kind != OPTIMIZER:
            return self.layout.param_specs[name]
        return self.layout.parameter_of(*self.parts.leaves[name])

    @cached_property
    def _keys(self) -> list[Key]:
        """The keys of everything that is updated."""
        parameters = [(PARAMETER, path) for path in self.layout.param_specs]
        return parameters + [(OPTIMIZER, name) for name in self.parts.leaves]

    @cached_property
    def _units(self) -> list["_UpdateUnit"]:
        """The units of the update, one after the other."""
        stacks = self._stacks if self._updates_layers else {}
        stacked_keys = [key for group in stacks.values() for key in group]
        keys_by_path: dict[str, list[Key]] = {}
        rest: list[Key] = []
        for key in [key for key in self._keys if key not in stacked_keys]:
            p = self.owner(key)
            on_host = p is not None and not self.host_keys.isdisjoint(self._keys_of(p.path))
            (keys_by_path.setdefault(p.path, []) if p is not None and on_host else rest).append(key)
        stack_units = [
            _UpdateUnit(self._program, keys, stack_size) for stack_size, keys in stacks.items()
        ]
        other_units = [
            _UpdateUnit(self._program, keys) for keys in (*keys_by_path.values(), rest) if keys
        ]
        units = stack_units + other_units
        if not any(unit.reads & self.host_keys - set(unit.keys) for unit in units):
            return units
        warnings.warn(
            "this optimizer updates a parameter by what it keeps of others, so all that lies on "
            "the host is on the device at once while it is updated: it takes no less memory than "
            "without the strategy's column `memory`. Optimizers that work parameter by parameter "
            "(sgd, adam, adamw, lion, lamb …; max_grad_norm=1.0 of train_step) are updated part by "
            "part.",
            RuntimeWarning,
            stacklevel=2,
        )
        return [_UpdateUnit(self._full_program, self._keys)]

    def _keys_of(self, path: str) -> set[Key]:
        owner = lambda key: p.path if (p := self.owner(key)) is not None else None
        return {key for key in self._keys if owner(key) == path}

    @cached_property
    def _stacks(self) -> dict[int, list[Key]]:
        """Number of stacked layers -> keys of the arrays that stack so many."""
        stacks: dict[int, list[Key]] = {}
        for key in self._keys:
            if (p := self.owner(key)) is not None and p.stacked:
                stacks.setdefault(p.shape[0], []).append(key)
        return stacks

    @cached_property
    def _updates_layers(self) -> bool:
        """Whether each layer can be updated alone, and layers are in host memory."""
        if not any(key in self.host_keys for keys in self._stacks.values() for key in keys):
            return False
        return self.is_layerwise()

    @cached_property
    def _program(self) -> "_Program":
        return self._trace(1) if self._updates_layers else self._full_program

    @cached_property
    def _full_program(self) -> "_Program":
        return self._trace(None)

    def _trace(self, stack_size: int | None) -> "_Program":
        """Return the optimizer's program for stacks of so many layers (None: of all)."""
        shapes = self._shapes
        if stack_size is not None:
            resize = lambda x: jax.ShapeDtypeStruct((stack_size, *x.shape[1:]), x.dtype)
            is_stacked = lambda key: (p := self.owner(key)) is not None and p.stacked
            shapes = {key: resize(x) if is_stacked(key) else x for key, x in shapes.items()}
        inputs = list(shapes)

        def update(*arrays: Any) -> list[Any]:
            new = self._run_optimizer(dict(zip(inputs, arrays, strict=True)))
            return [new[key] for key in self._keys]

        return _Program(trace_flat(update, *shapes.values()), tuple(inputs), tuple(self._keys))

    @property
    def _shapes(self) -> Arrays:
        param_specs = self.layout.param_specs
        dtypes = {path: self.layout.working_dtype(path) for path in param_specs}
        shape = lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype)
        gradients = {
            path: shape(p, dtypes[path]) for path, p in param_specs.items() if not p.frozen
        }
        parameters = {path: shape(p, p.dtype) for path, p in param_specs.items()}
        leaves = {name: shape(leaf, leaf.dtype) for name, (_, leaf) in self.parts.leaves.items()}
        return (
            _add_kind(GRADIENT, gradients)
            | _add_kind(PARAMETER, parameters)
            | _add_kind(OPTIMIZER, leaves)
        )

    def _run_optimizer(self, old: Arrays) -> Arrays:
        """Run the optimizer on everything and return the new arrays."""
        select = lambda kind: {name: x for (key_kind, name), x in old.items() if key_kind == kind}
        params, leaves = select(PARAMETER), select(OPTIMIZER)
        gradients = {path: jnp.zeros_like(x) for path, x in params.items()} | select(GRADIENT)
        treedef = jax.tree.structure(self.layout.state_shapes.optimizer)
        state = treedef.unflatten([leaves[name] for name in self.parts.leaves])
        params_tree = nest(params)
        updates, state = self.layout.optimizer.update(nest(gradients), state, params_tree)
        new = params_from_master(
            flatten(cast(dict, optax.apply_updates(params_tree, updates))), state
        )
        new_leaves = dict(zip(self.parts.leaves, jax.tree.leaves(state), strict=True))
        return _add_kind(PARAMETER, new) | _add_kind(OPTIMIZER, new_leaves)


class _Program(NamedTuple):
    """The optimizer's program, its inputs and outputs by name."""

    body: FlatProgram
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]


@dataclass(frozen=True, eq=False)
class _UpdateUnit:
    """What is updated together; with `stack_size`, layer by layer."""

    program: _Program
    keys: Sequence[Key]
    stack_size: int | None = None

    @cached_property
    def _body(self) -> FlatProgram:
        at = dict(zip(self.program.outputs, self.program.body.outputs, strict=True))
        return self.program.body.subprogram([at[key] for key in self.keys])

    @cached_property
    def reads(self) -> frozenset[Key]:
        """The keys on which the new arrays depend."""
        read_vars = self._body.read_vars
        pairs = zip(self.program.inputs, self.program.body.inputs, strict=True)
        return frozenset(key for key, variable in pairs if variable in read_vars)

    def compute(self, old: Arrays) -> Arrays:
        """Return the new arrays of this unit; inputs that it does not read may be missing."""
        inputs = [old.get(key) if key in self.reads else None for key in self.program.inputs]
        return dict(zip(self.keys, self._body(*inputs), strict=True))


@dataclass(frozen=True, eq=False)
class _UnitUpdater:
    """One update, in a trace."""

    streamed: StreamedUpdate
    mean: Callable  # turns summed gradients into those of the mean, clipped
    keep: Callable  # (finite, new, old) -> the arrays after the step
    finite: jax.Array  # whether the step is finite

    def update(self, unit: _UpdateUnit, old: Arrays) -> Arrays:
        """Return the updated arrays of a unit."""
        old = {key: x for key, x in old.items() if key in unit.reads or key in unit.keys}
        if unit.stack_size is None:
            return self._update_arrays(unit, old, unit.keys)
        return self._update_stacks(unit, old)

    def _update_stacks(self, unit: _UpdateUnit, old: Arrays) -> Arrays:
        """Return stacks, their layers updated in place, on each stage its own."""
        carried = {key: old[key] for key in unit.keys}
        fixed = {key: x for key, x in old.items() if key not in carried}
        spec_of = lambda key: (
            P(*self._stage_axes(key)) if key in carried or key[0] == GRADIENT else P()
        )
        specs = [{key: spec_of(key) for key in flat} for flat in (carried, fixed)]

        def device(carried: Arrays, fixed: Arrays, finite: jax.Array) -> Arrays:
            updater = replace(self, finite=finite)
            num_layers = len(next(iter(carried.values())))
            body = lambda i, stacks: updater._update_layer(unit, stacks, fixed, i)
            return lax.fori_loop(0, num_layers, body, carried)

        mesh = self.streamed.layout.mesh
        # The program was traced elsewhere, without types of what varies over stages.
        shard_specs = {"in_specs": (*specs, P()), "out_specs": specs[0]}
        sharded_update = jax.shard_map(
            device, mesh=mesh, axis_names={PIPE_AXIS}, check_vma=False, **shard_specs
        )
        return sharded_update(carried, fixed, self.finite)

    def _stage_axes(self, key: Key) -> tuple:
        p = self.streamed.owner(key)
        return (PIPE_AXIS,) if p is not None and PIPE_AXIS in p.sharded_compute else ()

    def _update_layer(self, unit: _UpdateUnit, stacks: Arrays, fixed: Arrays, i: Index) -> Arrays:
        """Return the stacks with layer `i` updated."""
        slice_layer = lambda x: lax.dynamic_slice_in_dim(x, i, 1)
        layer_inputs = {
            key: slice_layer(x) if key[0] == GRADIENT else x for key, x in fixed.items()
        }
        new = self._update_arrays(
            unit, layer_inputs | {key: slice_layer(x) for key, x in stacks.items()}, unit.keys
        )
        put = lambda x, layer: lax.dynamic_update_slice(x, layer, (i,) + (0,) * (x.ndim - 1))
        return {key: put(x, new[key]) for key, x in stacks.items()}

    def _update_arrays(self, unit: _UpdateUnit, old: Arrays, keys: Sequence[Key]) -> Arrays:
        """Return new arrays, each in the memory of the old one."""
        arrays = {
            key: self._constrain(key, to_device(x), "optimizer_state") for key, x in old.items()
        }
        gradients = {key[1]: x for key, x in arrays.items() if key[0] == GRADIENT}
        arrays |= _add_kind(GRADIENT, self.mean(gradients))
        new = unit.compute(arrays)
        for key in keys:
            new[key] = self.keep(self.finite, new[key], arrays[key])
            if is_on_host(old[key]):
                new[key] = to_host(
                    self._constrain(
                        key, new[key], "parameter" if key[0] == PARAMETER else "optimizer_state"
                    )
                )
        return new

    def _constrain(self, key: Key, x: jax.Array, column: str) -> jax.Array:
        """Return an array, or a layer of it, with the sharding of a column."""
        p = self.streamed.owner(key)
        if p is None or not x.ndim:
            return x
        spec = getattr(p, column)
        abstract_mesh = jax.sharding.get_abstract_mesh()
        if abstract_mesh.empty or not abstract_mesh.manual_axes:
            return lax.with_sharding_constraint(x, NamedSharding(p.mesh, spec))
        return lax.with_sharding_constraint(x, P(None, *entries_of(spec, x.ndim)[1:]))


def _add_kind(kind: str, flat: Flat) -> Arrays:
    return {(kind, name): x for name, x in flat.items()}


def _wait_for_copies(old: Arrays, unit: _UpdateUnit, done: Arrays) -> Arrays:
    """Return the arrays; those of this unit on the host wait for the copies back of earlier units.

    Otherwise all units could be on the device at the same time.
    """
    host_arrays = {key: old[key] for key in unit.keys if is_on_host(old[key])}
    copies = {key: x for key, x in done.items() if is_on_host(x)}
    if not host_arrays or not copies:
        return old
    return old | lax.optimization_barrier((host_arrays, copies))[0]
