"""The weights of a stage that updates itself: it keeps the versions that are still in use.

The columns F_version and B_version of a table say which weights a microbatch's passes use: both
those of its forward (weight stashing, PipeDream, arXiv:1806.03377; two versions, PipeDream-2BW,
arXiv:2006.09503). At the end of a tick whose U_version is a slot, the gradients accumulated since
the last update are averaged over the batch axes and applied to the latest version (L_version); the
new version is written to that slot. All stages run one program: each has as many slots as the stage
that needs most.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hfjax.parallel.pipeline.stage_params import Stage, StageParams
from hfjax.parallel.pipeline.stash_buffers import Slots
from hfjax.parallel.pipeline.tick import StageTick, State
from hfjax.parallel.schedules.table import Versions
from hfjax.utils.paths import Flat, Index

_STAGE_STATE = (
    "versions",
    "optimizer",
    "squares",
)  # of a stage; replicated over its devices


@dataclass(frozen=True)
class VersionedParams(StageParams):
    """How a stage updates its layers. The model is one of `add_weight_carry`."""

    versions: Versions
    units: int  # layers of a stage
    layers: Flat  # the parameters of this stage's layers, [units, ...], before the step
    optimizer: Any  # their optimizer state and counts
    reduce: Callable  # (gradients of a total, weight) -> gradients of the mean over all examples
    apply: Callable  # (gradients, optimizer, parameters) -> (parameters, optimizer)

    def init_state(self, stage: Stage) -> State:
        """Return the initial parameters as every version; `squares` differs between stages only."""
        repeat_versions = lambda a: jnp.broadcast_to(a, (self.versions.slots, *a.shape))
        return {
            "weight": jnp.zeros(()),
            "versions": {path: repeat_versions(a) for path, a in self.layers.items()},
            "optimizer": self.optimizer,
            "squares": jnp.zeros(()) * stage.stage,
        }

    def layer_params(
        self, stage: Stage, state: State, tick: StageTick, kind: str, unit: Index
    ) -> Flat:
        """Return the parameters of the version in the table."""
        return self._slots.get(state["versions"], unit, tick.index(f"{kind}_version"))

    def grad_sums(
        self, stage: Stage, gradients: Any, unit: Index, chunk: Index, tick: StageTick
    ) -> Flat:
        """Start from zero after an update: the update itself need not write zeros."""
        zero_if_first = lambda a: jnp.where(tick["B_first"] > 0, jnp.zeros((), a.dtype), a)
        return jax.tree.map(zero_if_first, stage.chunks.get(gradients, unit, chunk))

    def after_tick(
        self, stage: Stage, kinds: str, before: State, after: State, tick: StageTick
    ) -> State:
        """Update if the table says so; the stage's own state stays replicated over its devices."""
        after = after | {name: before[name] for name in _STAGE_STATE}
        return (
            self._maybe_update(stage, self._add_weight(stage, after, tick), tick)
            if "B" in kinds
            else after
        )

    def final_params(self, stage: Stage, state: State) -> Flat:
        """Return the parameters after the last tick."""
        return _read_version(state["versions"], jnp.asarray(self.versions.final)[stage.stage])

    @cached_property
    def _slots(self) -> Slots:
        """The versions of this stage's layers, [slots, units, ...]."""
        return Slots(self.versions.slots, self.units, unstack_units=False)

    def _add_weight(self, stage: Stage, state: State, tick: StageTick) -> State:
        """Add the weight of the microbatch that came with its dy."""
        _, weight = stage.queue("dy").get(state["dy"], 0, tick.index("B_dy"))
        weight = jnp.where(tick["B_microbatch"] >= 0, weight, 0)
        before = jnp.where(tick["B_first"] > 0, 0, state["weight"])
        return state | {"weight": before + weight}

    def _maybe_update(self, stage: Stage, state: State, tick: StageTick) -> State:
        def update(stage_state: State) -> State:
            sums = stage.chunks.to_stacked(state["gradients"])
            gradients = self.reduce(sums, state["weight"])
            return self._update(stage_state, gradients, tick["L_version"], tick["U_version"])

        stage_state = {name: state[name] for name in _STAGE_STATE}
        return state | lax.cond(
            tick["U_version"] >= 0, update, lambda stage_state: stage_state, stage_state
        )

    def _update(self, state: State, gradients: Flat, latest: Index, target: Index) -> State:
        """Return the stage's own state with the next version of the weights in slot `target`."""
        old = _read_version(state["versions"], latest)
        new, optimizer = self.apply(gradients, state["optimizer"], old)
        write_version = lambda a, x: lax.dynamic_update_index_in_dim(a, x, target, 0)
        versions = {path: write_version(a, new[path]) for path, a in state["versions"].items()}
        square = sum(jnp.sum(jnp.square(g), dtype=float) for g in gradients.values())
        return dict(
            zip(_STAGE_STATE, (versions, optimizer, state["squares"] + square), strict=True)
        )


def _read_version(versions: Flat, slot: Index) -> Flat:
    pick = lambda a: lax.dynamic_index_in_dim(a, slot, 0, keepdims=False)
    return {path: pick(a) for path, a in versions.items()}
