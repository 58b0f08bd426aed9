"""Gradients of a stage's layers, summed over devices in the last tick.

A gradient to which no tick adds any more is summed while the backward pass of the last tick runs:
that of each layer in that pass as soon as it is computed, those of all other chunks from the start.
All stages do so in that tick, also those that finished earlier, since they run one program: the
step waits for the stage that finishes last.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hfjax.parallel.pipeline.stash_buffers import Slots
from hfjax.parallel.pipeline.tick import StageTick, State
from hfjax.parallel.schedules.compile import Ticks
from hfjax.parallel.schedules.table import Table


@dataclass(frozen=True)
class LastTick:
    """What the last tick does with the gradients of a stage's layers."""

    table: Table
    reduce_layer: Callable[[Any], Any]  # sums the gradients of a layer over devices

    def reduce_idle_chunks(
        self, chunks: Slots, before: State, after: State, tick: StageTick
    ) -> State:
        """Return the state with the gradients of the idle chunks summed too."""
        gradients = after["gradients"]
        busy_chunk = tick.index("W_chunk" if self.table.splits_backward else "B_chunk")
        for hop in range(1, chunks.slots):
            for unit in range(chunks.units):
                chunk = (busy_chunk + hop) % chunks.slots
                grad_sum = self.reduce_layer(chunks.get(before["gradients"], unit, chunk))
                gradients = chunks.put(gradients, unit, chunk, grad_sum)
        return after | {"gradients": gradients}


def split_last_tick(ticks: Ticks) -> Ticks:
    """Return the same ticks, with the last one in a segment of its own."""
    *segments, (start, end, kinds) = ticks.segments
    before = [(start, end - 1, kinds)] if end - start > 1 else []
    return replace(ticks, segments=(*segments, *before, (end - 1, end, kinds)))
