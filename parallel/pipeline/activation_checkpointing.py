"""What of a layer a pipeline computes again: the same in every microbatch, or not in the last.

`remat="except_last"` is torchgpipe's: the backward pass of the last microbatch comes soon after its
forward pass, so what it keeps is kept for one microbatch only.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from jax import lax

from hfjax.parallel.jaxprs.split_backward import SplitBackward, zeros_like
from hfjax.parallel.pipeline.stash_buffers import Slots
from hfjax.parallel.pipeline.tick import StageTick
from hfjax.utils.paths import Flat, Index


class LayerPasses(ABC):
    """How a layer runs in a tick. `kept` is what a stage keeps beside the rings."""

    @abstractmethod
    def init_carry(self) -> Any:
        """Return `kept` before the first tick."""

    @abstractmethod
    def forward(self, known: tuple, x: Any, carry: Any, tick: StageTick, unit: Index) -> tuple:
        """Return (y, stash, late), and `carry`."""

    @abstractmethod
    def backward(
        self, known: tuple, stash: Any, dy: Any, carry: Any, tick: StageTick, unit: Index
    ) -> tuple[Any, Flat]:
        """Return dx and the gradients."""


@dataclass(frozen=True)
class UniformRemat(LayerPasses):
    """A layer that runs alike for every microbatch."""

    passes: SplitBackward

    def init_carry(self) -> list:
        """Keep nothing."""
        return []

    def forward(self, known: tuple, x: Any, carry: Any, tick: StageTick, unit: Index) -> tuple:
        """Return (y, stash, late), and `carry`."""
        return self.passes.forward(known, x), carry

    def backward(
        self, known: tuple, stash: Any, dy: Any, carry: Any, tick: StageTick, unit: Index
    ) -> tuple[Any, Flat]:
        """Return dx and the gradients."""
        return self.passes.backward(known, stash, [], dy)


@dataclass(frozen=True)
class RematExceptLast(LayerPasses):
    """A layer that computes nothing again for the last microbatch."""

    passes: SplitBackward
    no_remat_passes: SplitBackward  # the passes that compute nothing again
    chunks: Slots  # an entry for each layer of the stage
    last_microbatch: int  # the number of the last microbatch

    def init_carry(self) -> Any:
        """Return zeros for what the last microbatch keeps of each layer."""
        return self.chunks.full(self.no_remat_passes.stash)

    def forward(self, known: tuple, x: Any, carry: Any, tick: StageTick, unit: Index) -> tuple:
        """Return (y, stash, late), and `carry`."""

        def save_all(carry) -> tuple:
            y, values, _ = self.no_remat_passes.forward(known, x)
            zeros = zeros_like((self.passes.stash, self.passes.w_residuals))
            return (y, *zeros), self.chunks.put(carry, unit, tick.index("F_chunk"), values)

        remat = lambda carry: (self.passes.forward(known, x), carry)
        return lax.cond(tick["F_microbatch"] == self.last_microbatch, save_all, remat, carry)

    def backward(
        self, known: tuple, stash: Any, dy: Any, carry: Any, tick: StageTick, unit: Index
    ) -> tuple[Any, Flat]:
        """Return dx and the gradients."""
        values = self.chunks.get(carry, unit, tick.index("B_chunk"))
        from_saved = lambda: self.no_remat_passes.backward(known, values, [], dy)
        remat = lambda: self.passes.backward(known, stash, [], dy)
        return lax.cond(tick["B_microbatch"] == self.last_microbatch, from_saved, remat)
