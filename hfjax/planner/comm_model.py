"""The collectives of a candidate's step, by formula: kind, axes, bytes, and what may hide them.

tests/test_collective_laws.py checks steps against these formulas. Those of context, experts and
grids come from the files in which a step makes its own choice, so that both count the same.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from hfjax.parallel.extensions.context_parallel import comm_kinds
from hfjax.parallel.extensions.expert_parallel.dispatch_kinds import (
    MixtureCall,
    choose_dispatch as choose_dispatch,
)
from hfjax.parallel.extensions.tensor_grid.costs import grid_comm_volume
from hfjax.parallel.mesh import BATCH_AXES, in_use
from hfjax.parallel.settings import ContextParallel
from hfjax.planner.candidate import Candidate
from hfjax.planner.memory_model import Flows, MeshShape

GATHERS, SUMS, NEW_PARAMS = "gathers", "sums of gradients", "gathers of new parameters"
TENSOR, POSITIONS, EXPERTS = "tensor", "positions", "tokens of experts"
MESSAGES, GRID = "messages of stages", "grid"


@dataclass(frozen=True)
class CommVolume:
    """Collectives of one purpose in one step; `payload` is the larger side, of all calls."""

    purpose: str
    kind: str  # all-gather, reduce-scatter, all-reduce, permute, all-to-all
    axes: tuple[str, ...]
    payload: float
    calls: float
    layers: bool = True  # whether matmuls of layers may hide it
    backward: bool = False

    def sent_bytes(self, mesh: MeshShape) -> float:
        """Return the bytes that a device sends."""
        n = math.prod(mesh[axis] for axis in self.axes)
        if self.kind == "permute":
            return self.payload
        return self.payload * (n - 1) / n * (2 if self.kind == "all-reduce" else 1)


@dataclass(frozen=True)
class CommInputs:
    """What the formulas need of a model under a candidate."""

    flows: Flows  # of one device's layers: those of its stage
    layers: int  # of a stage
    compute_itemsize: int  # bytes of an element in which layers compute
    reduce_itemsize: int  # bytes of an element in which gradients are reduced
    param_itemsize: int  # bytes of a stored element of a parameter
    residual: float  # bytes between two layers: of a microbatch, not divided by tensor
    num_reductions: float  # of a layer over tensor, forward: outputs of sharded matmuls
    reduction_bytes: float  # bytes of all of them
    calls: tuple[comm_kinds.AttentionCall, ...] = ()  # of all layers, as `times` says
    mixtures: tuple[tuple[MixtureCall, int], ...] = ()  # and the number of layers that have each
    stage_fraction: float = 1.0  # the part of all layers that a stage has
    with_recompute: bool = False  # layers send again what they recompute
    chunks: int = 1  # of a stage; each tick runs one
    forward: int = 0  # ticks in which pipeline stages run forward; 0: no pipeline
    backward: int = 0
    permutes: int = 0  # of the pipeline's messages
    linear: tuple[tuple[int, int], ...] = ()
    tokens: float = 0.0


def comm_volumes(c: Candidate, t: CommInputs) -> Iterator[CommVolume]:
    """Yield the collectives of a step."""
    yield from _param_gathers(c, t)
    yield from _gradient_reductions(c, t)
    yield from _tensor_comms(c, t)
    yield from _context_comms(c, t)
    yield from _expert_comms(c, t)
    if t.permutes:
        size = t.residual / (c.axis_size("tensor") if c.sequence else 1)
        yield CommVolume(MESSAGES, "permute", ("pipe",), t.permutes * size, t.permutes)


def _num_passes(c: Candidate, t: CommInputs, backward: bool = False) -> float:
    """Return how often all layers of a device run, idle slots of a pipeline included."""
    ticks = t.backward if backward else t.forward
    return ticks / t.chunks if ticks else c.gradient_accumulation_steps


def _param_gathers(c: Candidate, t: CommInputs) -> Iterator[CommVolume]:
    flows = t.flows
    for axes, inside in flows.elements_by_axes("fsdp", True):
        for backward in (False, True):
            runs = _num_passes(c, t, backward)
            size, count = runs * t.compute_itemsize * inside, runs * max(t.layers, 1)
            yield CommVolume(GATHERS, "all-gather", axes, size, count, backward=backward)
    for axes, around in flows.elements_by_axes("fsdp", False):
        times = 1 if t.forward else c.gradient_accumulation_steps
        yield CommVolume(
            GATHERS, "all-gather", axes, times * t.compute_itemsize * around, times, layers=False
        )
    for kind in ("scattered", "sharded moments"):
        for layers in (True, False):
            for axes, size in flows.elements_by_axes(kind, layers):
                calls = max(t.layers, 1) if layers else 1
                yield CommVolume(
                    NEW_PARAMS, "all-gather", axes, t.param_itemsize * size, calls, layers
                )


def _gradient_reductions(c: Candidate, t: CommInputs) -> Iterator[CommVolume]:
    flows, size, mesh = t.flows, t.reduce_itemsize, c.mesh
    for in_layers in (True, False):
        layers = max(t.layers, 1) if in_layers else 1
        times = _num_passes(c, t, True) if in_layers or not t.forward else 1
        stages = in_use(mesh, ("pipe",)) if not in_layers else ()
        flags = {"layers": in_layers, "backward": True}
        for axes, elements in flows.elements_by_axes("fsdp", in_layers):
            payload = times * size * elements
            yield CommVolume(SUMS, "reduce-scatter", axes, payload, times * layers, **flags)
        for axes, elements in flows.elements_by_axes("scattered", in_layers):
            yield from _two_level_reductions(
                c, axes, False, times * size * elements, times * layers, flags
            )
        for axes, elements in flows.elements_by_axes("sharded moments", in_layers):
            yield from _two_level_reductions(c, axes, False, size * elements, layers, flags)
        for axes, elements in flows.elements_by_axes("shards", in_layers):
            yield CommVolume(SUMS, "all-reduce", axes, size * elements, layers, **flags)
        for axes, elements in flows.elements_by_axes("whole", in_layers):
            yield from _two_level_reductions(
                c, (*stages, *axes), True, size * elements, layers, flags
            )
        if stages:  # every stage has a partial gradient of embedding and head
            yield from _stage_reductions(flows, mesh, size)


def _stage_reductions(flows: Flows, mesh: MeshShape, size: int) -> Iterator[CommVolume]:
    """Yield the reductions over stages of gradients, sharded or replicated on each device."""
    for kind in ("fsdp", "scattered", "sharded moments", "alone"):
        for axes, elements in flows.elements_by_axes(kind, False):
            payload = size * elements / math.prod(mesh[a] for a in axes)
            yield CommVolume(SUMS, "all-reduce", ("pipe",), payload, 1, layers=False, backward=True)


def _two_level_reductions(
    c: Candidate,
    axes: tuple[str, ...],
    replicate_result: bool,
    size: float,
    calls: float,
    flags: dict[str, bool],
) -> Iterator[CommVolume]:
    """Yield the reductions of gradients, to replicated or sharded ones; possibly in two levels."""
    kind = "all-reduce" if replicate_result else "reduce-scatter"
    node, across = _levels(c, axes)
    if not across:
        yield CommVolume(SUMS, kind, axes, size, calls, **flags)
        return
    yield CommVolume(SUMS, "reduce-scatter", node, size, calls, **flags)
    shard_size = size / math.prod(c.axis_size(axis) for axis in node)
    yield CommVolume(SUMS, kind, across, shard_size, calls, **flags)
    if replicate_result:
        yield CommVolume(SUMS, "all-gather", node, size, calls, **flags)


def _levels(c: Candidate, axes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the axes of a reduction's first level, and those of the second, if there is one."""
    if c.gradient_reduction == "flat":
        return axes, ()
    node = in_use(c.mesh, BATCH_AXES)[-1:]
    return node, tuple(axis for axis in axes if axis not in node)


def _tensor_comms(c: Candidate, t: CommInputs) -> Iterator[CommVolume]:
    if c.axis_size("row") > 1:
        yield from _grid_comms(c, t)
        return
    if c.axis_size("tensor") == 1:
        return
    runs, axes = _num_passes(c, t) * max(t.layers, 1), ("tensor",)
    kinds = ("all-gather", "reduce-scatter") if c.sequence else ("all-reduce",)
    for n, back in ((runs * (2 if t.with_recompute else 1), False), (runs, True)):
        for kind in kinds:
            yield CommVolume(
                TENSOR, kind, axes, n * t.reduction_bytes, n * t.num_reductions, backward=back
            )


def _grid_comms(c: Candidate, t: CommInputs) -> Iterator[CommVolume]:
    grid_shape = (c.axis_size("fsdp"), c.axis_size("row"), c.axis_size("tensor"))
    tokens = t.tokens * c.axis_size("fsdp")
    maps = {str(number): sizes for number, sizes in enumerate(t.linear)}
    numbers, _ = grid_comm_volume(maps, round(tokens), grid_shape)
    count = _num_passes(c, t) * max(t.layers, 1)
    size = float(numbers) * t.compute_itemsize * (1.5 if t.with_recompute else 1.0)
    yield CommVolume(GRID, "permute", ("row", "tensor"), count * size, count * 2 * len(maps))


def _context_comms(c: Candidate, t: CommInputs) -> Iterator[CommVolume]:
    n = c.axis_size("context")
    if n == 1 or not t.calls:
        return
    option = attention_option(n, t.calls)
    for call in t.calls:
        forward, backward = option.bytes(call)
        count = _num_passes(c, t) * t.stage_fraction * call.times
        forward_passes = 2 if t.with_recompute else 1
        kind = "permute" if option.kind == "ring" else "all-to-all"
        calls = count * (n - 1 if kind == "permute" else 4)
        overlaps = option.kind == "ring"
        scale = 1.0 if kind == "permute" else n / (n - 1)
        yield CommVolume(
            POSITIONS, kind, ("context",), forward_passes * forward * count * scale, calls, overlaps
        )
        yield CommVolume(
            POSITIONS, kind, ("context",), backward * count * scale, calls, overlaps, True
        )


@cache
def attention_option(
    devices: int, calls: tuple[comm_kinds.AttentionCall, ...]
) -> comm_kinds.CommOption:
    """Return the form of context parallel attention that a step chooses."""
    return comm_kinds.choose_comm_kind(ContextParallel(), devices, calls).option


def _expert_comms(c: Candidate, t: CommInputs) -> Iterator[CommVolume]:
    n = c.axis_size("expert")
    if n == 1:
        return
    for call, times in t.mixtures:
        dispatch = choose_dispatch("auto", call)
        forward, backward = call.bytes(dispatch)
        forward += call.bytes_resent_by_remat(dispatch) if t.with_recompute else 0
        count = _num_passes(c, t) * t.stage_fraction * times
        scale = n / (n - 1)
        for size, back in ((forward, False), (backward, True)):
            payload = size * count * scale
            yield CommVolume(EXPERTS, "all-to-all", ("expert",), payload, 2 * count, False, back)
