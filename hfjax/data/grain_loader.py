"""Batches of any Grain data set: the same on any number of processes, and exact resume."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import grain
import numpy as np

from hfjax.data.grain_examples import ENDLESS, ArraySpec, GrainExamples, describe_specs
from hfjax.data.indexed_loader import IndexedLoader, check_batch_size, check_epochs, check_numbers
from hfjax.utils.keywords import strict_fields


@strict_fields
@dataclass(eq=False)
class GrainLoader(IndexedLoader):
    """An iterator over batches of a Grain data set, as `from_grain` returns it."""

    dataset: grain.MapDataset
    batch_size: int
    epochs: int | None = None  # None: no end
    local_examples: Sequence[int] | np.ndarray | None = None
    pad_last: bool = False  # pad the last batch with examples of mask 0, do not drop it
    name: str = ""
    threads: int = 2
    prefetch: int = 4  # batches read ahead

    def __post_init__(self) -> None:
        least = {"batch_size": 1, "threads": 0, "prefetch": self.threads}
        check_numbers(self, least, ("pad_last",))
        if not isinstance(self.name, str):
            raise ValueError(f"name={self.name!r}: a text is expected.")
        examples = self._examples  # raises errors of the data set now
        if self.is_endless and (self.epochs is not None or self.pad_last):
            option = "pad_last=True" if self.epochs is None else f"epochs={self.epochs}"
            raise ValueError(
                f"{option}: this data set has no end, because of .repeat(). Leave out one of the "
                "two."
            )
        check_epochs(self)
        content = f"the data set has {self.examples_per_epoch} of {describe_specs(examples.specs)}"
        check_batch_size(self, content, "Lower batch_size, or give more data.")

    @property
    def is_endless(self) -> bool:
        """Whether the data set itself repeats without end."""
        return self.examples_per_epoch >= ENDLESS

    @property
    def examples_per_epoch(self) -> int:
        """The number of examples; of a data set without end a number that is never reached."""
        return len(self.dataset)

    @property
    def specs(self) -> dict[str, ArraySpec]:
        """Shape and dtype of each array of an example."""
        return self._examples.specs

    # -- data -----------------------------------------------------------------------------

    @cached_property
    def _examples(self) -> GrainExamples:
        return GrainExamples(self.dataset, self.pad_last)

    def _identity_fields(self) -> dict[str, Any]:
        return {"data": {**self._examples.content(), "name": self.name}}

    def _order(self, epochs: int | None) -> grain.MapDataset[int]:
        numbers = grain.MapDataset.range(self.examples_per_epoch)
        return numbers if self.is_endless else numbers.repeat(epochs)

    def _make_source(self) -> GrainExamples:
        return self._examples

    def _read_options(self) -> grain.ReadOptions:
        return grain.ReadOptions(self.threads, self.prefetch)


def from_grain(  # noqa: PLR0913  options of one call
    dataset: grain.MapDataset,
    batch_size: int,
    *,
    epochs: int | None = None,
    local_examples: Sequence[int] | np.ndarray | None = None,
    pad_last: bool = False,
    name: str = "",
    threads: int = 2,
    prefetch: int = 4,
) -> GrainLoader:
    """Return an iterator over batches of a Grain data set, as `Loader` is one of token files.

    Its examples are dictionaries of arrays and numbers, which may be nested; each array gets a
    batch dimension. Their order is that of the data set: `.seed(0).shuffle()` shuffles each epoch
    anew. Neither processes nor threads, batch size or a restart change it. Example i has to be the
    same whenever it is read, and no example may be missing: a data set with `.filter` is refused.

    `state()` holds a checksum of the first examples, their shapes and number and `name`, and
    `restore` refuses a data set in which these differ. They do not show every change.

    Args:
        dataset: A grain.MapDataset, not batched. It may repeat without end (`.repeat()`).
        batch_size: The global batch size, in examples.
        epochs: The number of passes over the data. None: no end, or that of the data set.
        local_examples: The examples of each batch that this process loads (`share`, or
            `hfjax.process_batch_slice`). None: all.
        pad_last: Whether to pad the last batch with examples of zeros instead of dropping it. Then
            "mask" is 0 for these and 1 for others, unless the examples have a "mask".
        name: What the data is, such as a version: a state of another name is refused.
        threads: The number of reading threads; 0: the caller only.
        prefetch: The number of batches to prefetch, at least `threads`.

    Raises:
        ValueError: It is no such data set, or examples differ in keys, shapes or dtypes.

    Example:
        >>> import grain, numpy as np
        >>> from hfjax.data import from_grain
        >>> data = grain.MapDataset.range(6).map(lambda i: {"x": np.full(2, i), "y": i % 2})
        >>> loader = from_grain(data, batch_size=2, epochs=1)
        >>> next(loader)["x"].tolist(), len(loader)
        ([[0, 0], [1, 1]], 3)
        >>> state = loader.state()
        >>> again = from_grain(data, batch_size=2, epochs=1)
        >>> again.restore(state)
        >>> next(again)["x"].tolist()
        [[2, 2], [3, 3]]
    """
    options: dict[str, Any] = {"epochs": epochs, "local_examples": local_examples}
    options |= {"pad_last": pad_last, "name": name, "threads": threads, "prefetch": prefetch}
    return GrainLoader(dataset, batch_size, **options)
