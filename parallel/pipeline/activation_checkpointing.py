"""What of a layer a pipeline computes again: the same in every microbatch, or not in the last.

`remat="except_last"` is torchgpipe's: the backward pass of the last microbatch comes soon after its
forward pass, so what it keeps is kept for one microbatch only.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from jax import lax

from hfjax.parallel.jaxprs.split_backward import Dissected, zeros_like
from hfjax.parallel.pipeline.stash_buffers import Slots
from hfjax.parallel.pipeline.tick import StageTick
from hfjax.utils.paths import Flat, Index


class UnitPasses(ABC):
    """How a layer runs in a tick. `kept` is what a stage keeps beside the rings."""

    @abstractmethod
    def empty(self) -> Any:
        """Return `kept` before the first tick."""

    @abstractmethod
    def forward(self, known: tuple, x: Any, kept: Any, at: StageTick, unit: Index) -> tuple:
        """Return (y, stash, late), and `kept`."""

    @abstractmethod
    def backward(
        self, known: tuple, stash: Any, dy: Any, kept: Any, at: StageTick, unit: Index
    ) -> tuple[Any, Flat]:
        """Return dx and the gradients."""


@dataclass(frozen=True)
class EveryMicrobatch(UnitPasses):
    """A layer that runs alike for every microbatch."""

    passes: Dissected

    def empty(self) -> list:
        """Keep nothing."""
        return []

    def forward(self, known: tuple, x: Any, kept: Any, at: StageTick, unit: Index) -> tuple:
        """Return (y, stash, late), and `kept`."""
        return self.passes.forward(known, x), kept

    def backward(
        self, known: tuple, stash: Any, dy: Any, kept: Any, at: StageTick, unit: Index
    ) -> tuple[Any, Flat]:
        """Return dx and the gradients."""
        return self.passes.backward(known, stash, [], dy)


@dataclass(frozen=True)
class ExceptLast(UnitPasses):
    """A layer that computes nothing again for the last microbatch."""

    passes: Dissected
    keeping: Dissected  # the passes that compute nothing again
    chunks: Slots  # an entry for each layer of the stage
    last: int  # the number of the last microbatch

    def empty(self) -> Any:
        """Return zeros for what the last microbatch keeps of each layer."""
        return self.chunks.full(self.keeping.stash)

    def forward(self, known: tuple, x: Any, kept: Any, at: StageTick, unit: Index) -> tuple:
        """Return (y, stash, late), and `kept`."""

        def keep(kept) -> tuple:
            y, values, _ = self.keeping.forward(known, x)
            nothing = zeros_like((self.passes.stash, self.passes.late))
            return (y, *nothing), self.chunks.put(kept, unit, at.positive("F_chunk"), values)

        again = lambda kept: (self.passes.forward(known, x), kept)
        return lax.cond(at["F_microbatch"] == self.last, keep, again, kept)

    def backward(
        self, known: tuple, stash: Any, dy: Any, kept: Any, at: StageTick, unit: Index
    ) -> tuple[Any, Flat]:
        """Return dx and the gradients."""
        values = self.chunks.get(kept, unit, at.positive("B_chunk"))
        keep = lambda: self.keeping.backward(known, values, [], dy)
        again = lambda: self.passes.backward(known, stash, [], dy)
        return lax.cond(at["B_microbatch"] == self.last, keep, again)
