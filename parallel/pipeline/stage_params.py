"""Which parameters the passes of a pipeline use, and what becomes of a stage's gradients.

In most schedules parameters stay as they are until all microbatches are done: `FixedWeights`. A
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
    def values(self) -> Any: ...
    @property
    def stage(self) -> Any: ...
    def queue(self, name: str) -> Any: ...


class Weights(ABC):
    """Where a stage's parameters come from in a tick, and what becomes of its gradients."""

    @abstractmethod
    def start(self, stage: Stage) -> State:
        """Return what it adds to the state before the first tick."""

    @abstractmethod
    def parameters(self, stage: Stage, state: State, at: StageTick, kind: str, unit: Index) -> Flat:
        """Return the parameters of a layer that a slot of this kind (F, B, W) uses."""

    @abstractmethod
    def sums(self, stage: Stage, gradients: Any, unit: Index, chunk: Index, at: StageTick) -> Flat:
        """Return the sum to which the gradient of a layer is added."""

    @abstractmethod
    def after_tick(
        self, stage: Stage, kinds: str, before: State, after: State, at: StageTick
    ) -> State:
        """Return the state at the end of a tick."""


class FixedWeights(Weights):
    """Parameters stay as they are, and gradients are added up, until all microbatches are done."""

    def start(self, stage: Stage) -> State:
        """Add nothing."""
        return {}

    def parameters(self, stage: Stage, state: State, at: StageTick, kind: str, unit: Index) -> Flat:
        """Return those that the step was given."""
        return stage.chunks.get(stage.values, unit, at.positive(f"{kind}_chunk"))

    def sums(self, stage: Stage, gradients: Any, unit: Index, chunk: Index, at: StageTick) -> Flat:
        """Return the sum over all microbatches so far."""
        return stage.chunks.get(gradients, unit, chunk)

    def after_tick(
        self, stage: Stage, kinds: str, before: State, after: State, at: StageTick
    ) -> State:
        """Change nothing."""
        return after
