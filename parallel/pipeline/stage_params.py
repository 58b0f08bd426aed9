"""Which parameters the passes of a pipeline use, and how a stage's gradients accumulate.

In most schedules parameters do not change until all microbatches are done: `FixedParams`. A stage
of an asynchronous pipeline updates its own in between (`extensions/async_pipeline`).
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

from hfjax.parallel.pipeline.tick import StageTick, State
from hfjax.utils.paths import Flat, Index


class Stage(Protocol):
    """The attributes of a stage (`executor.Pipeline`) that are read here."""

    @property
    def chunks(self) -> Any: ...  # Slots; pyright accepts no cached_property for it
    @property
    def chunk_params(self) -> Any: ...
    @property
    def stage(self) -> Any: ...
    def queue(self, name: str) -> Any: ...


class StageParams(ABC):
    """Where a stage's parameters come from in a tick, and how its gradients accumulate."""

    @abstractmethod
    def init_state(self, stage: Stage) -> State:
        """Return the entries that it adds to the state before the first tick."""

    @abstractmethod
    def layer_params(
        self, stage: Stage, state: State, tick: StageTick, kind: str, unit: Index
    ) -> Flat:
        """Return the parameters of a layer that a slot of this kind (F, B, W) uses."""

    @abstractmethod
    def grad_sums(
        self, stage: Stage, gradients: Any, unit: Index, chunk: Index, tick: StageTick
    ) -> Flat:
        """Return the sum to which the gradient of a layer is added."""

    @abstractmethod
    def after_tick(
        self, stage: Stage, kinds: str, before: State, after: State, tick: StageTick
    ) -> State:
        """Return the state at the end of a tick."""


class FixedParams(StageParams):
    """Parameters do not change, and gradients are summed, until all microbatches are done."""

    def init_state(self, stage: Stage) -> State:
        """Add nothing."""
        return {}

    def layer_params(
        self, stage: Stage, state: State, tick: StageTick, kind: str, unit: Index
    ) -> Flat:
        """Return the parameters of the step."""
        return stage.chunks.get(stage.chunk_params, unit, tick.index(f"{kind}_chunk"))

    def grad_sums(
        self, stage: Stage, gradients: Any, unit: Index, chunk: Index, tick: StageTick
    ) -> Flat:
        """Return the sum over all microbatches so far."""
        return stage.chunks.get(gradients, unit, chunk)

    def after_tick(
        self, stage: Stage, kinds: str, before: State, after: State, tick: StageTick
    ) -> State:
        """Change nothing."""
        return after
