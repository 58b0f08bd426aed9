"""Which parameters the passes of a pipeline use, and what becomes of a stage's gradients.

In most schedules parameters stay as they are until all microbatches are done: `FixedParams`. A
stage of an asynchronous pipeline updates its own in between (`wings/asynchronous`).
"""

from abc import ABC, abstractmethod
from typing import Any, Protocol

from hfjax.parallel.pipeline.tick import StageTick, State
from hfjax.utils.paths import Flat, Index


class Stage(Protocol):
    """What of a stage (`executor.Pipeline`) is read here."""

    @property
    def chunks(self) -> Any: ...  # Slots; pyright takes no cached_property for it
    @property
    def chunk_params(self) -> Any: ...
    @property
    def stage(self) -> Any: ...
    def queue(self, name: str) -> Any: ...


class StageParams(ABC):
    """Where a stage's parameters come from in a tick, and what becomes of its gradients."""

    @abstractmethod
    def init_state(self, stage: Stage) -> State:
        """Return what it adds to the state before the first tick."""

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
    """Parameters stay as they are, and gradients are added up, until all microbatches are done."""

    def init_state(self, stage: Stage) -> State:
        """Add nothing."""
        return {}

    def layer_params(
        self, stage: Stage, state: State, tick: StageTick, kind: str, unit: Index
    ) -> Flat:
        """Return those that the step was given."""
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
