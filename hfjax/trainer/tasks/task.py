"""What a run asks of what it learns from: the model, batches, scores."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

import hfjax
from hfjax.data.indexed_loader import IndexedLoader


class Scores(Protocol):
    """What an evaluation found."""

    @property
    def loss(self) -> float:
        """The mean loss."""
        ...

    @property
    def numbers(self) -> Mapping[str, float]:
        """Further numbers by name, for the journal."""
        ...

    @property
    def line(self) -> str:
        """What was found, in a line."""
        ...

    @property
    def table(self) -> str:
        """What else was found, for `hfjax eval` alone."""
        ...


class Task(Protocol):
    """What a run learns from."""

    unit: str
    """What a step goes through, in the plural."""

    @property
    def model(self) -> Any:
        """The model, and what is known of it."""
        ...

    @property
    def units_per_example(self) -> int:
        """How many of these units a row has."""
        ...

    @property
    def eval_loss(self) -> Callable:
        """(outputs, batch) -> the loss with what an evaluation counts."""
        ...

    def flops(self, layout: hfjax.Layout) -> float:
        """Return the operations that training needs for one unit."""
        ...

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a batch; nothing is read."""
        ...

    def describe_example(self) -> str:
        """Return what a row is, in words: rows of 64 tokens."""
        ...

    def train_loader(self, local_slice: Callable) -> IndexedLoader:
        """Return the batches to train on; `local_slice(rows)` are the rows of this process."""
        ...

    def valid_loader(self, local_slice: Callable) -> IndexedLoader | None:
        """Return the batches to validate on: each row once, in order; None: there are none."""
        ...

    def startup_lines(self) -> list[str]:
        """Return what to say before training."""
        ...

    def init_from_weights(
        self, layout: hfjax.Layout, seed: int, schedule: hfjax.Schedule | None
    ) -> tuple[hfjax.State, list[str]] | None:
        """Return a state that begins with given weights, and what to say; None: none are given."""
        ...

    def closing_lines(self, loader: Any) -> list[str]:
        """Return what to say after training on the batches of a loader."""
        ...

    def compute_scores(self, metrics: Sequence[Mapping[str, Any]]) -> Scores:
        """Return the scores of an evaluation, of the metrics of all its batches."""
        ...
