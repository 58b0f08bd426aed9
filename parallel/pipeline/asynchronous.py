"""Asynchronous pipelines: each stage updates its own layers and keeps the versions still in use.

The columns F_version and B_version of a table say which weights a microbatch's passes use: both
the same, those that its forward found (weight stashing, PipeDream, arXiv:1806.03377; two versions,
PipeDream-2BW, arXiv:2006.09503). At the end of a tick whose U_version is a slot, the gradients
gathered since the last update are averaged over the batch axes, applied to the latest version
(L_version), and the new one goes to that slot. All stages run one program: each has as many slots
as the stage that needs most.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from hfjax.base.mean import Mean
from hfjax.base.paths import Flat, Index
from hfjax.parallel.autodiff.dissect import Dissected
from hfjax.parallel.engine.blueprint import LAYERS
from hfjax.parallel.engine.gradients import StepInputs
from hfjax.parallel.engine.parts import ModelParts
from hfjax.parallel.mesh import PIPE_AXIS, in_use
from hfjax.parallel.pipeline.executor import Pipeline, State
from hfjax.parallel.pipeline.plane import PipelinePlane
from hfjax.parallel.pipeline.rings import Slots
from hfjax.parallel.schedules.versions import Versions

_OWN = ("versions", "optimizer", "squares")  # of a stage; the same on all devices that share it


@dataclass(frozen=True)
class Updates:
    """How a stage updates its layers."""

    versions: Versions
    parameters: Flat  # of this stage's layers, [units, ...], as the call began
    optimizer: Any  # what it keeps of them
    reduce: Callable  # (gradients of a total, its weight) -> gradients of the mean, over all rows
    apply: Callable  # (gradients, optimizer, parameters) -> (parameters, optimizer)


@dataclass(frozen=True, kw_only=True)
class Asynchronous(Pipeline):
    """A pipeline whose stages update their layers while microbatches are on their way.

    Its model is a `weighed` one, its ticks have the columns of the versions.
    """

    updates: Updates

    def train(self) -> tuple[Flat, Any, Any, Any, Any]:
        """Return parameters and optimizer of this stage's layers; squares, outside and aux.

        `squares` adds up the squared norm of this stage's gradient in every update; the gradients
        of `outside` and `aux` are those of a pipeline that waits.
        """
        state = self._run_ticks()
        final = jnp.asarray(self.updates.versions.final)[self._stage]
        parameters = self._version(state["versions"], final)
        return parameters, state["optimizer"], state["squares"], state["outside"], state["aux"]

    @cached_property
    def _kept(self) -> Slots:
        """The versions of this stage's layers, [slots, units, ...]."""
        return Slots(self.updates.versions.slots, self._chunks.units, apart=False)

    def _version(self, versions: Flat, slot: Index) -> Flat:
        pick = lambda a: lax.dynamic_index_in_dim(a, slot, 0, keepdims=False)
        return {path: pick(a) for path, a in versions.items()}

    def _start(self) -> State:
        updates, slots = self.updates, self.updates.versions.slots
        all_same = lambda a: jnp.broadcast_to(a, (slots, *a.shape))
        state = super()._start() | {"weight": jnp.zeros(())}
        state["versions"] = {path: all_same(a) for path, a in updates.parameters.items()}
        state["optimizer"] = updates.optimizer
        state["squares"] = jnp.zeros(()) * self._stage  # differs between stages only
        return state

    def _parameters(self, state: State, at: Any, kind: str, unit: Index) -> Any:
        return self._kept.get(state["versions"], unit, at.positive(f"{kind}_version"))

    def _tick(self, kinds: str, facts: Any, state: State, row: dict) -> tuple[State, None]:
        """Run the tick, then update: the stage's own state stays one for all its devices."""
        new, _ = super()._tick(kinds, facts, state, row)
        new |= {name: state[name] for name in _OWN}
        if "B" in kinds:
            mine = {name: column[self._stage] for name, column in row.items()}
            new = self._updated(self._weighed(new, mine), mine)
        return new, None

    def _sums(self, gradients: Any, unit: Index, chunk: Index, at: Any) -> Any:
        """Begin at zero after an update: the update itself needs not write zeros."""
        first = lambda a: jnp.where(at["B_first"] > 0, jnp.zeros((), a.dtype), a)
        return jax.tree.map(first, super()._sums(gradients, unit, chunk, at))

    def _weighed(self, state: State, mine: dict) -> State:
        """Add the weight of the microbatch that came with its dy."""
        slot = jnp.maximum(mine["B_dy"], 0)
        _, weight = self._queue("dy").get(state["dy"], 0, slot)
        weight = jnp.where(mine["B_microbatch"] >= 0, weight, 0)
        before = jnp.where(mine["B_first"] > 0, 0, state["weight"])
        return state | {"weight": before + weight}

    def _updated(self, state: State, mine: dict) -> State:
        def update(own):
            sums = self._chunks.stacked(state["gradients"])
            gradients = self.updates.reduce(sums, state["weight"])
            return self._update(own, gradients, mine["L_version"], mine["U_version"])

        own = {name: state[name] for name in _OWN}
        return state | lax.cond(mine["U_version"] >= 0, update, lambda own: own, own)

    def _update(self, held: State, gradients: Flat, latest: Any, target: Any) -> State:
        """Return the stage's own state with the weights after the latest in slot `target`."""
        old = self._version(held["versions"], latest)
        new, optimizer = self.updates.apply(gradients, held["optimizer"], old)
        put = lambda a, x: lax.dynamic_update_index_in_dim(a, x, target, 0)
        versions = {path: put(a, new[path]) for path, a in held["versions"].items()}
        square = sum(jnp.sum(jnp.square(g), dtype=float) for g in gradients.values())
        return dict(zip(_OWN, (versions, optimizer, held["squares"] + square), strict=True))


def weighed(model: ModelParts) -> ModelParts:
    """Return the model with a number beside x whose gradient is the weight of the microbatch.

    It is zero on its way forward. Its gradient comes with every dy, so that each stage can make a
    mean of what it has the total of; what the weight is, only the head knows.
    """

    def first(outside, m):
        return model.first(outside, m), jnp.zeros(())

    def with_weight(passes):
        return lambda known, slots, carried, split: _beside(passes(known, slots, carried[0], split))

    def last(outside, carried, m):
        x, beside = carried
        total, mean = model.last(outside, x, m)
        return total + (beside * lax.stop_gradient(mean.weight)).astype(total.dtype), mean

    keep = model.keep and with_weight(model.keep)
    passes = with_weight(model.passes)
    return replace(model, first=first, passes=passes, last=last, keep=keep)


def _beside(own: Dissected) -> Dissected:
    """Return the passes of layers that hand on a number beside x."""

    def forward(known, carried):
        y, *kept = own.forward(known, carried[0])
        return (y, carried[1]), *kept

    def backward(known, stash, late, dy):
        dx, gradients = own.backward(known, stash, late, dy[0])
        return (dx, dy[1]), gradients

    return replace(own, forward=forward, backward=backward)


@dataclass(frozen=True, kw_only=True)
class AsynchronousPlane(PipelinePlane):
    """The data plane of a step in which stages update their layers themselves."""

    versions: Versions

    def train(
        self, held: StepInputs, batch: Any, step: jax.Array, apply: Callable
    ) -> tuple[StepInputs, jax.Array, Flat, Mean]:
        """Return what changed; mean squared norm of layers' gradients; other gradients; Mean.

        `apply(gradients, (moments, counts), parameters) -> (parameters, (moments, counts))` is
        given the gradients of a mean; those of the outside are of a total, over all microbatches.
        """
        stages = in_use(self.mesh, (PIPE_AXIS,))

        def device(held, batch, step):
            layers, (moments, counts), squares, outside, means = self._stage(
                held, batch, step, apply
            )
            outside = {path: self._give(self.placed[path], g) for path, g in outside.items()}
            outside = self._reduction(outside, self.placed)
            agreed = lambda x: lax.pmax(x, stages) if stages else x  # all stages count alike
            new = StepInputs(layers, {}, moments, jax.tree.map(agreed, counts))
            self._check_kept()
            squares = lax.psum(squares, stages) if stages else squares
            return new, squares, outside, self._sum(jax.tree.map(lambda x: x.sum(0), means))

        at_home = StepInputs(P(*stages), P(), P(*stages), P())
        given = at_home._replace(parameters=self._specs("parameter"))
        in_specs = (given, P(self._batch_axes), P())
        out_specs = (at_home, P(), P(), P())
        new, squares, *rest = self._shard_map(device, in_specs, out_specs)(held, batch, step)
        return new, squares / self._updates_per_call, *rest

    @property
    def _updates_per_call(self) -> int:
        return int((self.versions.columns["U_version"][:, 0] >= 0).sum())

    def _stage(self, held: StepInputs, batch: Any, step: Any, apply: Callable) -> tuple:
        """Return what one stage has after the last tick."""
        assert self.ticks is not None
        layers = {p: a for p, a in held.parameters.items() if p.startswith(LAYERS)}
        updates = Updates(
            versions=self.versions,
            parameters=layers,
            optimizer=(held.moments, held.counts),
            reduce=self._reduce,
            apply=apply,
        )
        columns = self.ticks.columns | self.versions.columns
        columns["B_first"] = _first_of_group(columns["B_microbatch"], columns["U_version"])
        return Asynchronous(
            ticks=replace(self.ticks, columns=columns),
            model=weighed(self._model_of(held, batch, step)),
            unroll=self._unroll,
            choose=self._offloading,
            updates=updates,
        ).train()

    def _model_of(self, held: StepInputs, batch: Any, step: Any) -> ModelParts:
        random, statistics = self._sort(held.variables)
        keys = self._keys(random, _rows(batch), step)
        parameters, unread = held.parameters, set(self.placed)
        return self._training(parameters, statistics, batch, (keys, 0), unread).model()

    def _reduce(self, gradients: Flat, weight: jax.Array) -> Flat:
        """Return the gradients of the mean over the rows of all devices of a stage.

        A microbatch without weight has no mean, and no gradient.
        """
        summed = self._reduction(gradients, self.placed)
        weight = lax.psum(weight, self._batch_axes) if self._batch_axes else weight
        scale = jnp.where(weight == 0, 0, 1 / weight)
        mean = lambda path, g: (g * scale.astype(g.dtype)).astype(self.placed[path].dtype)
        return {path: mean(path, g) for path, g in summed.items()}


def _first_of_group(backward: np.ndarray, updates: np.ndarray) -> np.ndarray:
    """Return 1 where a backward is the first since the last update of its stage.

    >>> backward, updates = np.array([[0, 1, -1, 2, 3]]).T, np.array([[-1, 0, -1, -1, 1]]).T
    >>> _first_of_group(backward, updates).T
    array([[1, 0, 0, 1, 0]], dtype=int32)
    """
    count = np.cumsum(backward >= 0, axis=0)
    done = np.maximum.accumulate(np.where(updates >= 0, count, 0), axis=0)
    before = np.concatenate([np.zeros_like(done[:1]), done[:-1]])
    return ((backward >= 0) & (count == before + 1)).astype(np.int32)


def _rows(batch: Any) -> int:
    return jax.tree.leaves(batch)[0].shape[0]
