"""What a candidate's devices send in a step, by formula: kind, axes, bytes, and what may hide it.

The formulas are those that tests/test_collective_laws.py holds steps to; those of context, experts
and grids are asked of the files in which a step's own choice is made, so that both count the same.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from hfjax.parallel.extensions.context_parallel import comm_kinds
from hfjax.parallel.extensions.expert_parallel.dispatch_kinds import (
    MixtureCall,
    choose as choose_dispatch,
)
from hfjax.parallel.extensions.tensor_grid.costs import sent_on_grid
from hfjax.parallel.mesh import BATCH_AXES, in_use
from hfjax.parallel.settings import Context
from hfjax.planner.candidate import Candidate
from hfjax.planner.memory_model import Flows, Sides

GATHERS, SUMS, NEW = "gathers", "sums of gradients", "gathers of new parameters"
TENSOR, POSITIONS, EXPERTS = "tensor", "positions", "tokens of experts"
MESSAGES, GRID = "messages of stages", "grid"


@dataclass(frozen=True)
class Sent:
    """Collectives of one purpose in one step; `payload` is the larger side, of all calls."""

    purpose: str
    kind: str  # all-gather, reduce-scatter, all-reduce, permute, all-to-all
    axes: tuple[str, ...]
    payload: float
    calls: float
    layers: bool = True  # whether layers' products may run beside it
    backward: bool = False

    def moved(self, sides: Sides) -> float:
        """Return the bytes that a device sends."""
        n = math.prod(sides[axis] for axis in self.axes)
        if self.kind == "permute":
            return self.payload
        return self.payload * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class Traffic:
    """What the formulas need of a model under a candidate."""

    flows: Flows  # of one device's layers: those of a stage
    layers: int  # of a stage
    compute: int  # bytes of a number in which layers compute
    reduce: int  # bytes of a number in which gradients are summed
    stored: int  # bytes of a stored parameter
    residual: float  # bytes of what goes from layer to layer: of a microbatch, tensor not divided
    sums: float  # of a layer over tensor, forward: what comes out of what tensor splits
    summed: float  # bytes of all of them
    calls: tuple[comm_kinds.AttentionCall, ...] = ()  # of all layers, as `times` says
    mixtures: tuple[tuple[MixtureCall, int], ...] = ()  # of all layers, and of how many each is
    part: float = 1.0  # of all layers, those of a stage
    again: bool = False  # layers compute what they send again
    chunks: int = 1  # of a stage, of which each tick runs one
    forward: int = 0  # ticks of a pipeline in which stages run forward; 0: there is none
    backward: int = 0
    permutes: int = 0  # of the pipeline's messages
    linear: tuple[tuple[int, int], ...] = ()
    tokens: float = 0.0


def sent_by(c: Candidate, t: Traffic) -> Iterator[Sent]:
    """Yield what a step sends."""
    yield from _parameters(c, t)
    yield from _gradients(c, t)
    yield from _tensor(c, t)
    yield from _positions(c, t)
    yield from _experts(c, t)
    if t.permutes:
        size = t.residual / (c.side("tensor") if c.sequence else 1)
        yield Sent(MESSAGES, "permute", ("pipe",), t.permutes * size, t.permutes)


def _passes(c: Candidate, t: Traffic, backward: bool = False) -> float:
    """Return how often all layers of a device run, in slots of a pipeline that idle too."""
    ticks = t.backward if backward else t.forward
    return ticks / t.chunks if ticks else c.accumulate


def _parameters(c: Candidate, t: Traffic) -> Iterator[Sent]:
    flows = t.flows
    for axes, inside in flows.along("fsdp", True):
        for backward in (False, True):
            runs = _passes(c, t, backward)
            size, count = runs * t.compute * inside, runs * max(t.layers, 1)
            yield Sent(GATHERS, "all-gather", axes, size, count, backward=backward)
    for axes, around in flows.along("fsdp", False):
        times = 1 if t.forward else c.accumulate
        yield Sent(GATHERS, "all-gather", axes, times * t.compute * around, times, layers=False)
    for kind in ("scattered", "sharded moments"):
        for layers in (True, False):
            for axes, size in flows.along(kind, layers):
                calls = max(t.layers, 1) if layers else 1
                yield Sent(NEW, "all-gather", axes, t.stored * size, calls, layers)


def _gradients(c: Candidate, t: Traffic) -> Iterator[Sent]:
    flows, size, sides = t.flows, t.reduce, c.mesh
    for inside in (True, False):
        layers = max(t.layers, 1) if inside else 1
        times = _passes(c, t, True) if inside or not t.forward else 1
        stages = in_use(sides, ("pipe",)) if not inside else ()
        last = {"layers": inside, "backward": True}
        for axes, moved in flows.along("fsdp", inside):
            payload = times * size * moved
            yield Sent(SUMS, "reduce-scatter", axes, payload, times * layers, **last)
        for axes, moved in flows.along("scattered", inside):
            yield from _summed(c, axes, False, times * size * moved, times * layers, last)
        for axes, moved in flows.along("sharded moments", inside):
            yield from _summed(c, axes, False, size * moved, layers, last)
        for axes, moved in flows.along("shards", inside):
            yield Sent(SUMS, "all-reduce", axes, size * moved, layers, **last)
        for axes, moved in flows.along("whole", inside):
            yield from _summed(c, (*stages, *axes), True, size * moved, layers, last)
        if stages:  # every stage has a part of the gradients of what is around the layers
            yield from _of_stages(flows, sides, size)


def _of_stages(flows: Flows, sides: Sides, size: int) -> Iterator[Sent]:
    """Yield the sums over stages of gradients of which each device has a shard, or all."""
    for kind in ("fsdp", "scattered", "sharded moments", "alone"):
        for axes, moved in flows.along(kind, False):
            payload = size * moved / math.prod(sides[a] for a in axes)
            yield Sent(SUMS, "all-reduce", ("pipe",), payload, 1, layers=False, backward=True)


def _summed(
    c: Candidate,
    over: tuple[str, ...],
    whole: bool,
    size: float,
    calls: float,
    last: dict[str, bool],
) -> Iterator[Sent]:
    """Yield the sums of gradients that every device has whole, or a part of; in two levels."""
    kind = "all-reduce" if whole else "reduce-scatter"
    node, across = _levels(c, over)
    if not across:
        yield Sent(SUMS, kind, over, size, calls, **last)
        return
    yield Sent(SUMS, "reduce-scatter", node, size, calls, **last)
    part = size / math.prod(c.side(axis) for axis in node)
    yield Sent(SUMS, kind, across, part, calls, **last)
    if whole:
        yield Sent(SUMS, "all-gather", node, size, calls, **last)


def _levels(c: Candidate, over: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes of the first level of a sum, and those of the second, if there is one."""
    if c.reduction == "flat":
        return over, ()
    node = in_use(c.mesh, BATCH_AXES)[-1:]
    return node, tuple(axis for axis in over if axis not in node)


def _tensor(c: Candidate, t: Traffic) -> Iterator[Sent]:
    if c.side("row") > 1:
        yield from _grid(c, t)
        return
    if c.side("tensor") == 1:
        return
    runs, axes = _passes(c, t) * max(t.layers, 1), ("tensor",)
    kinds = ("all-gather", "reduce-scatter") if c.sequence else ("all-reduce",)
    for n, back in ((runs * (2 if t.again else 1), False), (runs, True)):
        for kind in kinds:
            yield Sent(TENSOR, kind, axes, n * t.summed, n * t.sums, backward=back)


def _grid(c: Candidate, t: Traffic) -> Iterator[Sent]:
    sides = (c.side("fsdp"), c.side("row"), c.side("tensor"))
    tokens = t.tokens * c.side("fsdp")
    maps = {str(number): sizes for number, sizes in enumerate(t.linear)}
    numbers, _ = sent_on_grid(maps, round(tokens), sides)
    count = _passes(c, t) * max(t.layers, 1)
    size = float(numbers) * t.compute * (1.5 if t.again else 1.0)
    yield Sent(GRID, "permute", ("row", "tensor"), count * size, count * 2 * len(maps))


def _positions(c: Candidate, t: Traffic) -> Iterator[Sent]:
    n = c.side("context")
    if n == 1 or not t.calls:
        return
    chosen = form_of(n, t.calls)
    for call in t.calls:
        forward, backward = chosen.bytes(call)
        count = _passes(c, t) * t.part * call.times
        again = 2 if t.again else 1
        kind = "permute" if chosen.form == "ring" else "all-to-all"
        calls = count * (n - 1 if kind == "permute" else 4)
        hides = chosen.form == "ring"
        scale = 1.0 if kind == "permute" else n / (n - 1)
        yield Sent(POSITIONS, kind, ("context",), again * forward * count * scale, calls, hides)
        yield Sent(POSITIONS, kind, ("context",), backward * count * scale, calls, hides, True)


@cache
def form_of(devices: int, calls: tuple[comm_kinds.AttentionCall, ...]) -> comm_kinds.Option:
    """Return the form that a step takes."""
    return comm_kinds.choose(Context(), devices, calls).option


def _experts(c: Candidate, t: Traffic) -> Iterator[Sent]:
    n = c.side("expert")
    if n == 1:
        return
    for call, times in t.mixtures:
        way = choose_dispatch("auto", call)
        forward, backward = call.bytes(way)
        forward += call.again(way) if t.again else 0
        count = _passes(c, t) * t.part * times
        scale = n / (n - 1)
        for size, back in ((forward, False), (backward, True)):
            payload = size * count * scale
            yield Sent(EXPERTS, "all-to-all", ("expert",), payload, 2 * count, False, back)
