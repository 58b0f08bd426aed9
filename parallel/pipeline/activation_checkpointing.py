"""Recomputation of layers in a pipeline: in every microbatch, or in all but the last.

`remat="except_last"` is torchgpipe's: the backward pass of the last microbatch comes soon after its
forward pass, so its residuals are kept for one microbatch only.
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
    """How a layer runs in a tick.

    `last_microbatch_residuals` is what a stage saves outside of its ring buffers.
    """

    @abstractmethod
    def init_residuals(self) -> Any:
        """Return `last_microbatch_residuals` before the first tick."""

    @abstractmethod
    def forward(
        self, known: tuple, x: Any, last_microbatch_residuals: Any, tick: StageTick, unit: Index
    ) -> tuple:
        """Return (y, stash, w_residuals), and `last_microbatch_residuals`."""

    @abstractmethod
    def backward(
        self,
        known: tuple,
        stash: Any,
        dy: Any,
        last_microbatch_residuals: Any,
        tick: StageTick,
        unit: Index,
    ) -> tuple[Any, Flat]:
        """Return dx and the gradients."""


@dataclass(frozen=True)
class UniformRemat(LayerPasses):
    """A layer that runs the same way for every microbatch."""

    passes: SplitBackward

    def init_residuals(self) -> list:
        """Return an empty carry."""
        return []

    def forward(
        self, known: tuple, x: Any, last_microbatch_residuals: Any, tick: StageTick, unit: Index
    ) -> tuple:
        """Return (y, stash, w_residuals), and `last_microbatch_residuals`."""
        return self.passes.forward(known, x), last_microbatch_residuals

    def backward(
        self,
        known: tuple,
        stash: Any,
        dy: Any,
        last_microbatch_residuals: Any,
        tick: StageTick,
        unit: Index,
    ) -> tuple[Any, Flat]:
        """Return dx and the gradients."""
        return self.passes.backward(known, stash, [], dy)


@dataclass(frozen=True)
class RematExceptLast(LayerPasses):
    """A layer that recomputes nothing in the last microbatch."""

    passes: SplitBackward
    no_remat_passes: SplitBackward  # the passes without recomputation
    chunks: Slots  # an entry for each layer of the stage
    last_microbatch: int  # the index of the last microbatch

    def init_residuals(self) -> Any:
        """Return zeros for the last microbatch's residuals of each layer."""
        return self.chunks.full(self.no_remat_passes.stash)

    def forward(
        self, known: tuple, x: Any, last_microbatch_residuals: Any, tick: StageTick, unit: Index
    ) -> tuple:
        """Return (y, stash, w_residuals), and `last_microbatch_residuals`."""

        def save_all(last_microbatch_residuals) -> tuple:
            y, values, _ = self.no_remat_passes.forward(known, x)
            zeros = zeros_like((self.passes.stash, self.passes.w_residuals))
            return (y, *zeros), self.chunks.put(
                last_microbatch_residuals, unit, tick.index("F_chunk"), values
            )

        remat = lambda last_microbatch_residuals: (
            self.passes.forward(known, x),
            last_microbatch_residuals,
        )
        return lax.cond(
            tick["F_microbatch"] == self.last_microbatch, save_all, remat, last_microbatch_residuals
        )

    def backward(
        self,
        known: tuple,
        stash: Any,
        dy: Any,
        last_microbatch_residuals: Any,
        tick: StageTick,
        unit: Index,
    ) -> tuple[Any, Flat]:
        """Return dx and the gradients."""
        values = self.chunks.get(last_microbatch_residuals, unit, tick.index("B_chunk"))
        from_saved = lambda: self.no_remat_passes.backward(known, values, [], dy)
        remat = lambda: self.passes.backward(known, stash, [], dy)
        return lax.cond(tick["B_microbatch"] == self.last_microbatch, from_saved, remat)
