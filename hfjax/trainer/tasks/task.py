"""The interface of a task: the model, batches, scores."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

import hfjax
from hfjax.data.indexed_loader import IndexedLoader


class Scores(Protocol):
    """The scores of an evaluation."""

    @property
    def loss(self) -> float:
        """The mean loss."""
        ...

    @property
    def numbers(self) -> Mapping[str, float]:
        """Further scores by name, for the metrics file."""
        ...

    @property
    def line(self) -> str:
        """The scores in a line."""
        ...

    @property
    def table(self) -> str:
        """Further scores as a table, for `hfjax eval` alone."""
        ...


class Task(Protocol):
    """What a run trains on."""

    @property
    def unit(self) -> str:
        """What a step processes, in the plural."""
        ...

    @property
    def model(self) -> Any:
        """The model to train, with its loss and sizes."""
        ...

    @property
    def units_per_example(self) -> int:
        """Number of these units in an example."""
        ...

    @property
    def eval_loss(self) -> Callable:
        """(outputs, batch) -> the loss with the metrics of an evaluation."""
        ...

    def flops(self, layout: hfjax.Layout) -> float:
        """Return the FLOPs of training on one unit."""
        ...

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the shapes of a batch, without reading data."""
        ...

    def describe_example(self) -> str:
        """Return what the examples are, in words: sequences of 64 tokens."""
        ...

    def train_loader(self, local_slice: Callable) -> IndexedLoader:
        """Return the training batches; `local_slice(batch)` selects this process's examples."""
        ...

    def valid_loader(self, local_slice: Callable) -> IndexedLoader | None:
        """Return the validation batches: each example once, in order; None if there are none."""
        ...

    def startup_notes(self) -> list[str]:
        """Return the lines to print before training."""
        ...

    def init_from_weights(
        self, layout: hfjax.Layout, seed: int, schedule: hfjax.Schedule | None
    ) -> tuple[hfjax.State, list[str]] | None:
        """Return an initial state with given weights, and lines to print; None without any."""
        ...

    def closing_lines(self, loader: Any) -> list[str]:
        """Return the lines to print after training on the batches of a loader."""
        ...

    def compute_scores(self, metrics: Sequence[Mapping[str, Any]]) -> Scores:
        """Return the scores of an evaluation from the metrics of all its batches."""
        ...
