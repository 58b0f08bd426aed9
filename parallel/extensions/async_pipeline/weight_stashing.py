"""The weights of a stage that updates its own: it keeps the versions that are still in use.

The columns F_version and B_version of a table say which weights a microbatch's passes use: both
the same, those that its forward found (weight stashing, PipeDream, arXiv:1806.03377; two versions,
PipeDream-2BW, arXiv:2006.09503). At the end of a tick whose U_version is a slot, the gradients
gathered since the last update are averaged over the batch axes, applied to the latest version
(L_version), and the new one goes to that slot. All stages run one program: each has as many slots
as the stage that needs most.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.pipeline.stage_params import Stage, Weights
from hfjax.parallel.pipeline.stash_buffers import Slots
from hfjax.parallel.pipeline.tick import StageTick, State
from hfjax.parallel.schedules.versions import Versions
from hfjax.utils.paths import Flat, Index

_OWN = ("versions", "optimizer", "squares")  # of a stage; the same on all devices that share it


@dataclass(frozen=True)
class VersionedWeights(Weights):
    """How a stage updates its layers. The model is a `weighed` one."""

    versions: Versions
    units: int  # layers of a stage
    layers: Flat  # the parameters of this stage's layers, [units, ...], as the call began
    optimizer: Any  # what it keeps of them
    reduce: Callable  # (gradients of a total, its weight) -> gradients of the mean, over all rows
    apply: Callable  # (gradients, optimizer, parameters) -> (parameters, optimizer)

    def start(self, stage: Stage) -> State:
        """Return every version as the parameters were; `squares` differs between stages only."""
        all_same = lambda a: jnp.broadcast_to(a, (self.versions.slots, *a.shape))
        return {
            "weight": jnp.zeros(()),
            "versions": {path: all_same(a) for path, a in self.layers.items()},
            "optimizer": self.optimizer,
            "squares": jnp.zeros(()) * stage.stage,
        }

    def parameters(self, stage: Stage, state: State, at: StageTick, kind: str, unit: Index) -> Flat:
        """Return those of the version that the table names."""
        return self._slots.get(state["versions"], unit, at.positive(f"{kind}_version"))

    def sums(self, stage: Stage, gradients: Any, unit: Index, chunk: Index, at: StageTick) -> Flat:
        """Begin at zero after an update: the update itself needs not write zeros."""
        first = lambda a: jnp.where(at["B_first"] > 0, jnp.zeros((), a.dtype), a)
        return jax.tree.map(first, stage.chunks.get(gradients, unit, chunk))

    def after_tick(
        self, stage: Stage, kinds: str, before: State, after: State, at: StageTick
    ) -> State:
        """Update, if the table says so: the stage's own state stays one for all its devices."""
        after = after | {name: before[name] for name in _OWN}
        return self._updated(stage, self._weighed(stage, after, at), at) if "B" in kinds else after

    def final(self, stage: Stage, state: State) -> Flat:
        """Return the parameters after the last tick."""
        return _version(state["versions"], jnp.asarray(self.versions.final)[stage.stage])

    @cached_property
    def _slots(self) -> Slots:
        """The versions of this stage's layers, [slots, units, ...]."""
        return Slots(self.versions.slots, self.units, apart=False)

    def _weighed(self, stage: Stage, state: State, at: StageTick) -> State:
        """Add the weight of the microbatch that came with its dy."""
        _, weight = stage.queue("dy").get(state["dy"], 0, at.positive("B_dy"))
        weight = jnp.where(at["B_microbatch"] >= 0, weight, 0)
        before = jnp.where(at["B_first"] > 0, 0, state["weight"])
        return state | {"weight": before + weight}

    def _updated(self, stage: Stage, state: State, at: StageTick) -> State:
        def update(own: State) -> State:
            sums = stage.chunks.stacked(state["gradients"])
            gradients = self.reduce(sums, state["weight"])
            return self._update(own, gradients, at["L_version"], at["U_version"])

        own = {name: state[name] for name in _OWN}
        return state | lax.cond(at["U_version"] >= 0, update, lambda own: own, own)

    def _update(self, held: State, gradients: Flat, latest: Index, target: Index) -> State:
        """Return the stage's own state with the weights after the latest in slot `target`."""
        old = _version(held["versions"], latest)
        new, optimizer = self.apply(gradients, held["optimizer"], old)
        put = lambda a, x: lax.dynamic_update_index_in_dim(a, x, target, 0)
        versions = {path: put(a, new[path]) for path, a in held["versions"].items()}
        square = sum(jnp.sum(jnp.square(g), dtype=float) for g in gradients.values())
        return dict(zip(_OWN, (versions, optimizer, held["squares"] + square), strict=True))


def _version(versions: Flat, slot: Index) -> Flat:
    pick = lambda a: lax.dynamic_index_in_dim(a, slot, 0, keepdims=False)
    return {path: pick(a) for path, a in versions.items()}
