"""The update of a state that lies partly on the host: part after part passes through the device.

The optimizer's program is traced once and cut into the parts that update one parameter each, or
one layer of those that stack layers. What a part needs comes to the device, is updated there and
goes back before the next part comes.
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

from hfjax.optimizer_step.optimizer_parts import OptimizerParts
from hfjax.optimizer_step.update import Found, Gradients, Held, Update
from hfjax.optimizers.transforms import from_master
from hfjax.parallel.engine.reduce_gradients import mean_gradients
from hfjax.parallel.execution import guard
from hfjax.parallel.jaxprs.program import Piece, piece, variables
from hfjax.parallel.mesh import PIPE_AXIS
from hfjax.parallel.offload.host_memory import is_on_host, to_device, to_host
from hfjax.parallel.param_specs import Placed, entries_of
from hfjax.sharding.layout import State
from hfjax.utils.paths import Flat, Index, flatten, nest

Key = tuple[str, str]  # GRADIENT or PARAMETER and a path, or KEPT and a name
Arrays = dict[Key, Any]
GRADIENT, PARAMETER, KEPT = "gradient", "parameter", "kept"


@dataclass(frozen=True, eq=False)
class StreamedUpdate(Update):
    """The update of a layout whose state lies partly on the host (HOST_OPTIMIZER).

    Made where `layout.hosted` is true, unless the optimizer runs in the backward pass: then
    `parallel/layerwise` fetches and updates layer by layer.
    """

    layers_apart: Callable[[], bool]  # whether the optimizer updates each layer as if it were alone

    def __post_init__(self) -> None:
        assert self._parts, "tried out here, since no number is known inside of a trace"

    def __call__(self, state: State, batch: Any) -> Found:
        """Return what a pass over the batch finds.

        What is streamed is selected part by part: no branch holds the state twice, and on the host
        nothing can be selected.
        """
        gradients = Gradients.of(self.plane, state, batch)
        working = self.layout.working_dtypes
        scale = lambda summed: mean_gradients(summed, gradients.scale(), working)
        keep = partial(guard, self.plane.context.execution.nonfinite)

        def update(held: Held, finite: jax.Array) -> Held:
            new = self._updated(_Run(self, scale, keep, finite), gradients.summed, held)
            return Held(*new, keep(finite, gradients.variables, held.variables))

        return gradients.found(update)

    def _updated(self, run: "_Run", gradients: Flat, held: Held) -> tuple[Flat, Any]:
        """Return new parameters and optimizer state, each where the layout has it."""
        kept = dict(zip(self.parts.leaves, jax.tree.leaves(held.optimizer), strict=True))
        old = _named(GRADIENT, gradients) | _named(PARAMETER, held.parameters)
        old |= _named(KEPT, kept)
        new: Arrays = {}
        for part in self._parts:
            new |= run.part(part, _wait_for(old, part, new))
        of = lambda kind: {name: x for (what, name), x in new.items() if what == kind}
        return held.parameters | of(PARAMETER), self.parts.join(held.optimizer, of(KEPT))

    @cached_property
    def parts(self) -> OptimizerParts:
        """What the optimizer's state holds of which parameter."""
        return OptimizerParts(self.layout)

    @cached_property
    def on_host(self) -> frozenset[Key]:
        """What lies on the host."""
        hosted = self.layout.hosted
        parameters = self.layout.placed if hosted.parameters else ()
        names = {(KEPT, name) for name in hosted.optimizer}
        return frozenset(names | {(PARAMETER, path) for path in parameters})

    def owner(self, key: Key) -> Placed | None:
        """Return the parameter to which something belongs; None: to none."""
        kind, name = key
        if kind != KEPT:
            return self.layout.placed[name]
        return self.layout.parameter_of(*self.parts.leaves[name])

    @cached_property
    def _keys(self) -> list[Key]:
        """Everything that is updated."""
        parameters = [(PARAMETER, path) for path in self.layout.placed]
        return parameters + [(KEPT, name) for name in self.parts.leaves]

    @cached_property
    def _parts(self) -> list["_Part"]:
        """The parts of the update, one after the other."""
        stacks = self._stacks if self._layer_by_layer else {}
        looped = [key for group in stacks.values() for key in group]
        single: dict[str, list[Key]] = {}
        rest: list[Key] = []
        for key in [key for key in self._keys if key not in looped]:
            p = self.owner(key)
            on_host = p is not None and not self.on_host.isdisjoint(self._of(p.path))
            (single.setdefault(p.path, []) if p is not None and on_host else rest).append(key)
        loops = [_Part(self._program, keys, rows) for rows, keys in stacks.items()]
        alone = [_Part(self._program, keys) for keys in (*single.values(), rest) if keys]
        found = loops + alone
        if not any(part.reads & self.on_host - set(part.keys) for part in found):
            return found
        warnings.warn(
            "this optimizer updates a parameter by what it keeps of others, so all that lies on "
            "the host is on the device at once while it is updated: it takes no less memory than "
            "without the strategy's column `memory`. Optimizers that work parameter by parameter "
            "(sgd, adam, adamw, lion, lamb …; clip=1.0 of train_step) are updated part by part.",
            RuntimeWarning,
            stacklevel=2,
        )
        return [_Part(self._whole, self._keys)]

    def _of(self, path: str) -> set[Key]:
        owner = lambda key: p.path if (p := self.owner(key)) is not None else None
        return {key for key in self._keys if owner(key) == path}

    @cached_property
    def _stacks(self) -> dict[int, list[Key]]:
        """Number of rows -> all that is stacked so."""
        stacks: dict[int, list[Key]] = {}
        for key in self._keys:
            if (p := self.owner(key)) is not None and p.stacked:
                stacks.setdefault(p.shape[0], []).append(key)
        return stacks

    @cached_property
    def _layer_by_layer(self) -> bool:
        """Whether each layer can be updated alone, and there is one to fetch."""
        if not any(key in self.on_host for keys in self._stacks.values() for key in keys):
            return False
        return self.layers_apart()

    @cached_property
    def _program(self) -> "_Program":
        return self._trace(1) if self._layer_by_layer else self._whole

    @cached_property
    def _whole(self) -> "_Program":
        return self._trace(None)

    def _trace(self, rows: int | None) -> "_Program":
        """Return the optimizer's program, of so many rows of what is stacked (None: of all)."""
        shapes = self._shapes
        if rows is not None:
            few = lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
            stacked = lambda key: (p := self.owner(key)) is not None and p.stacked
            shapes = {key: few(x) if stacked(key) else x for key, x in shapes.items()}
        inputs = list(shapes)

        def update(*arrays: Any) -> list[Any]:
            new = self._update(dict(zip(inputs, arrays, strict=True)))
            return [new[key] for key in self._keys]

        return _Program(piece(update, *shapes.values()), tuple(inputs), tuple(self._keys))

    @property
    def _shapes(self) -> Arrays:
        placed = self.layout.placed
        master = {path: self.layout.working_dtype(path) for path in placed}
        shape = lambda x, dtype: jax.ShapeDtypeStruct(x.shape, dtype)
        gradients = {path: shape(p, master[path]) for path, p in placed.items() if not p.frozen}
        parameters = {path: shape(p, p.dtype) for path, p in placed.items()}
        kept = {name: shape(leaf, leaf.dtype) for name, (_, leaf) in self.parts.leaves.items()}
        return _named(GRADIENT, gradients) | _named(PARAMETER, parameters) | _named(KEPT, kept)

    def _update(self, old: Arrays) -> Arrays:
        """Return what the optimizer makes of everything."""
        of = lambda kind: {name: x for (what, name), x in old.items() if what == kind}
        params, kept = of(PARAMETER), of(KEPT)
        gradients = {path: jnp.zeros_like(x) for path, x in params.items()} | of(GRADIENT)
        form = jax.tree.structure(self.layout.state_shapes.optimizer)
        state = form.unflatten([kept[name] for name in self.parts.leaves])
        given = nest(params)
        updates, state = self.layout.optimizer.update(nest(gradients), state, given)
        new = from_master(flatten(cast(dict, optax.apply_updates(given, updates))), state)
        named = dict(zip(self.parts.leaves, jax.tree.leaves(state), strict=True))
        return _named(PARAMETER, new) | _named(KEPT, named)


class _Program(NamedTuple):
    """The optimizer's program, its inputs and outputs by name."""

    whole: Piece
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]


@dataclass(frozen=True, eq=False)
class _Part:
    """What is updated together; with rows, row by row."""

    program: _Program
    keys: Sequence[Key]
    rows: int | None = None

    @cached_property
    def _piece(self) -> Piece:
        at = dict(zip(self.program.outputs, self.program.whole.outputs, strict=True))
        return self.program.whole.part([at[key] for key in self.keys])

    @cached_property
    def reads(self) -> frozenset[Key]:
        """What the new arrays depend on."""
        used = set(variables(self._piece.outputs))
        for equation in self._piece.equations:
            used.update(variables(equation.invars))
        pairs = zip(self.program.inputs, self.program.whole.inputs, strict=True)
        return frozenset(key for key, variable in pairs if variable in used)

    def compute(self, old: Arrays) -> Arrays:
        """Return the new arrays of this part; what it does not read may be missing."""
        given = [old.get(key) if key in self.reads else None for key in self.program.inputs]
        return dict(zip(self.keys, self._piece(*given), strict=True))


@dataclass(frozen=True, eq=False)
class _Run:
    """One update, in a trace."""

    streamed: StreamedUpdate
    scale: Callable  # divides summed gradients by the weight of the loss, and clips them
    keep: Callable  # (finite, new, old) -> what there is after the step
    finite: jax.Array  # whether the step is

    def part(self, part: _Part, old: Arrays) -> Arrays:
        """Return what a part becomes."""
        old = {key: x for key, x in old.items() if key in part.reads or key in part.keys}
        if part.rows is None:
            return self._new(part, old, part.keys)
        return self._row_by_row(part, old)

    def _row_by_row(self, part: _Part, old: Arrays) -> Arrays:
        """Return stacks whose rows are updated in place, on each stage its own."""
        carried = {key: old[key] for key in part.keys}
        fixed = {key: x for key, x in old.items() if key not in carried}
        home = lambda key: P(*self._home(key)) if key in carried or key[0] == GRADIENT else P()
        specs = [{key: home(key) for key in flat} for flat in (carried, fixed)]

        def device(carried: Arrays, fixed: Arrays, finite: jax.Array) -> Arrays:
            run = replace(self, finite=finite)
            here = len(next(iter(carried.values())))
            body = lambda i, stacks: run._row(part, stacks, fixed, i)
            return lax.fori_loop(0, here, body, carried)

        mesh = self.streamed.layout.mesh
        # The program was traced elsewhere, without marks of what differs between stages.
        places = {"in_specs": (*specs, P()), "out_specs": specs[0]}
        run = jax.shard_map(device, mesh=mesh, axis_names={PIPE_AXIS}, check_vma=False, **places)
        return run(carried, fixed, self.finite)

    def _home(self, key: Key) -> tuple:
        p = self.streamed.owner(key)
        return (PIPE_AXIS,) if p is not None and PIPE_AXIS in p.stays else ()

    def _row(self, part: _Part, stacks: Arrays, fixed: Arrays, i: Index) -> Arrays:
        """Return the stacks with one row updated."""
        row = lambda x: lax.dynamic_slice_in_dim(x, i, 1)
        of_row = {key: row(x) if key[0] == GRADIENT else x for key, x in fixed.items()}
        new = self._new(part, of_row | {key: row(x) for key, x in stacks.items()}, part.keys)
        put = lambda x, of: lax.dynamic_update_slice(x, of, (i,) + (0,) * (x.ndim - 1))
        return {key: put(x, new[key]) for key, x in stacks.items()}

    def _new(self, part: _Part, old: Arrays, keys: Sequence[Key]) -> Arrays:
        """Return new arrays, each in the memory where the old one is."""
        there = {key: self._place(key, to_device(x), "moment") for key, x in old.items()}
        gradients = {key[1]: x for key, x in there.items() if key[0] == GRADIENT}
        there |= _named(GRADIENT, self.scale(gradients))
        new = part.compute(there)
        for key in keys:
            new[key] = self.keep(self.finite, new[key], there[key])
            if is_on_host(old[key]):
                new[key] = to_host(
                    self._place(key, new[key], "parameter" if key[0] == PARAMETER else "moment")
                )
        return new

    def _place(self, key: Key, x: jax.Array, column: str) -> jax.Array:
        """Return an array, or a row of it, split over devices as a column says."""
        p = self.streamed.owner(key)
        if p is None or not x.ndim:
            return x
        spec = getattr(p, column)
        inside = jax.sharding.get_abstract_mesh()
        if inside.empty or not inside.manual_axes:
            return lax.with_sharding_constraint(x, NamedSharding(p.mesh, spec))
        return lax.with_sharding_constraint(x, P(None, *entries_of(spec, x.ndim)[1:]))


def _named(kind: str, flat: Flat) -> Arrays:
    return {(kind, name): x for name, x in flat.items()}


def _wait_for(old: Arrays, part: _Part, done: Arrays) -> Arrays:
    """Return the arrays, those of this part on the host tied to the copies back of parts before.

    Otherwise all parts could be on the device at the same time.
    """
    mine = {key: old[key] for key in part.keys if is_on_host(old[key])}
    before = {key: x for key, x in done.items() if is_on_host(x)}
    if not mine or not before:
        return old
    return old | lax.optimization_barrier((mine, before))[0]
