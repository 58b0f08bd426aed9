"""The work of a step by formula: the processor's seconds of all devices together, on CPUs.

Fake devices share the cores of one machine, so nothing overlaps and nobody waits: what counts is
what is computed and copied.

    products    matrix products: a start, operations, factors and results through the cache, and
                the factor that XLA turns where a product sums over its rows
    memory      all else that layers and what is around them compute, through the cache
    weights     layers' parameters out of their stack, and their gradients into one
    kept        what layers keep, into the stacks of a loop or the rings of a pipeline, and out
    gradients   sums over microbatches
    optimizer   the state through memory
    transfers   a start for each device of a collective, and its bytes, copied
    fresh       memory that a step takes for the first time: the system clears each page

Idle slots of a pipeline that compute count as slots; those that are skipped do not.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp

from hfjax.machines.machine import Machine, Processor
from hfjax.parallel.schedules.compile import compile_table
from hfjax.planner.candidate import Candidate
from hfjax.planner.peak_memory import LOOPED
from hfjax.planner.programs.model_profile import Work
from hfjax.planner.score import Scorer
from hfjax.planner.sent import sent_by


@dataclass(frozen=True)
class StepWork:
    """The processor's seconds of a step, of all devices, part by part."""

    products: float
    memory: float
    weights: float
    kept: float
    gradients: float
    optimizer: float
    transfers: float
    fresh: float

    @property
    def parts(self) -> Mapping[str, float]:
        """The parts by name."""
        return dict(vars(self))

    @property
    def total(self) -> float:
        """All together."""
        return sum(self.parts.values())


def work(scorer: Scorer, c: Candidate) -> StepWork:
    """Return the processor's seconds of a step of a candidate, summed over its devices.

    Args:
        scorer: Of the run, on a machine that is a CPU: `calibrate` writes such a file.
        c: The candidate.

    Raises:
        ValueError: The machine is no CPU, or a side does not divide what it splits.
    """
    machine, cpu = scorer.machine, _processor(scorer.machine)
    placing = scorer.placing(c)
    layers = max(scorer.stage_layers(c), 1)
    forward, backward, ends = _passes(scorer, c)
    share = scorer.share(c)
    profile, rows = scorer.profile(c.remat), c.rows_at_once
    products = memory = 0.0
    for part, times in (("forward", forward), ("backward", backward), ("ends", ends)):
        if times:
            found = profile.work(part, share)
            products += times * seconds_of_products(found, rows, share.tensor, machine)
            size = found.traffic[0] * rows + found.traffic[1]
            memory += times * (size / cpu.cached + found.launches * machine.launch)
    elements = scorer.elements(placing)
    compute, reduce, _ = scorer.numbers
    loop = scorer.how(c, placing) == "loop"
    count = c.pieces
    stack, summed = compute * elements[True], reduce * elements[True]
    out = 2 * stack * (2 if loop else 1) * (1 if c.pipeline else count)
    kept, sums = 0.0, 3.0 * placing.gradients * (count - 1)
    sizes = profile.sizes(share)
    if c.pipeline is not None:
        slots = _slots(scorer, c)
        kept = slots.in_rings(sizes.stashed[0] * rows, sizes.crossed * rows)
        sums = slots.sums * placing.gradients / layers
        if scorer.piped(c).table.chunks > 1:  # a slot takes its chunk's out
            out += 2 * stack / layers * (slots.forward + slots.backward + slots.weights)
    elif loop:
        kept = 5 * (sizes.stashed[0] * rows) * layers * count  # stacks begin as zeros
    else:
        kept = 2 * (sizes.kept[0] * rows) * layers * count
    peak = scorer.peak(c, placing)
    stacked = peak.kept / (LOOPED if loop and c.pipeline is None else 1.0)
    fresh = stacked + peak.weights + peak.moment + peak.gradients + peak.messages
    state = placing.state + sum(placing.on_host.values())
    clipped = 2 if scorer.config.optimizer.clip else 1
    transfers = sum(
        one.calls * machine.inside_start
        + one.moved(c.mesh) / (cpu.gathered if one.kind == "all-gather" else machine.inside)
        for one in sent_by(c, scorer.traffic(c, placing))
    )
    n = c.devices
    return StepWork(
        products=n * products,
        memory=n * memory,
        weights=n * (out + 2 * summed * (1 if c.pipeline else count)) / machine.stream,
        kept=n * kept / machine.stream,
        gradients=n * sums / machine.stream,
        optimizer=n * (2 * state + clipped * placing.gradients) / machine.stream,
        transfers=n * transfers,
        fresh=n * fresh / cpu.fresh,
    )


def _processor(machine: Machine) -> Processor:
    """Return what is known of a CPU."""
    if machine.processor is None:
        raise ValueError(
            f"work on {machine.name}: processor time is compared on CPUs. Give the machine of a "
            "file that hfjax.planner.measuring.calibrate wrote on one."
        )
    return machine.processor


@dataclass(frozen=True)
class _Slots:
    """How often one stage runs a layer's slot: with a task, and in all ticks that have the slot."""

    tasks: float  # of each kind
    forward: float
    backward: float
    weights: float  # 0: the backward slot has them too
    skips: bool

    def in_rings(self, stash: float, cross: float) -> float:
        """Return bytes read and written: what a layer keeps, put into its ring and taken out.

        An idle slot that is skipped puts back what it takes.
        """
        idle = lambda slots: (slots - self.tasks) * self.skips
        found = 2 * stash * (self.forward + idle(self.forward) + self.tasks)
        if self.weights:
            found += 2 * cross * (self.backward + idle(self.backward) + self.tasks)
            found += 2 * stash * self.tasks / 2  # the weights' half reads a part again
        return found

    @property
    def sums(self) -> float:
        """How often a layer's gradients pass memory: read twice and written, idle ones as zeros."""
        slots = self.weights or self.backward
        return 3 * slots + (slots - self.tasks) * self.skips


def _slots(scorer: Scorer, c: Candidate) -> _Slots:
    """Return how often the slots of a pipeline run, a stage's layers all counted."""
    assert c.pipeline is not None
    table = scorer.piped(c).table
    each = max(scorer.stage_layers(c), 1) / table.chunks
    ticks = {kind: 0 for kind in "FBW"}
    for start, end, kinds in compile_table(table).segments:
        for kind in kinds:
            ticks[kind] += end - start
    tasks = c.pipeline.microbatches * table.chunks
    tasks, *slots = (each * n for n in (tasks, *ticks.values()))
    return _Slots(tasks, slots[0], slots[1], slots[2], not idle_slots_compute(c))


def _passes(scorer: Scorer, c: Candidate) -> tuple[float, float, float]:
    """Return how often a device runs a layer forward and backward, and what is around layers.

    The ends of a pipeline run on one stage each: a device has its part of them.
    """
    if c.pipeline is None:
        layers = max(scorer.stage_layers(c), 1) if scorer.layers else 0
        return layers * c.accumulate, layers * c.accumulate, c.accumulate
    slots, ends = _slots(scorer, c), c.pipeline.microbatches / c.side("pipe")
    if slots.skips:
        return slots.tasks, slots.tasks, ends
    return slots.forward, slots.backward, ends


def idle_slots_compute(c: Candidate) -> bool:
    """Return whether stages compute in slots in which they have no task.

    Where layers send what might be a permute no stage may skip them (docs/pipelines.md).

    Example:
        >>> from hfjax.planner.candidate import Candidate
        >>> from hfjax.planner.measuring.work import idle_slots_compute
        >>> sides = (("pipe", 2), ("tensor", 2))
        >>> idle_slots_compute(Candidate(sides, "ddp", 8, schedule="1f1b", microbatches=4))
        True
    """
    if c.pipeline is None:
        return False
    if c.pipeline.table(c.side("pipe")).branches:
        return False
    return any(c.side(axis) > 1 for axis in ("tensor", "row", "context", "expert"))


def seconds_of_products(found: Work, rows: float, tensor: int, machine: Machine) -> float:
    """Return the processor's seconds of a part's products on one device.

    Args:
        found: The part.
        rows: Rows of a microbatch.
        tensor: Among how many devices tensor splits a layer.
        machine: A CPU.
    """
    cpu, seconds = _processor(machine), 0.0
    for p in found.products:
        batch, m, n, k = (max(x, 1.0) for x in p.sides(rows, tensor))
        size = jnp.dtype(p.dtype).itemsize
        rate = machine.flops_fp32 if size > 2 else machine.flops
        one, other, result = (size * batch * x for x in (m * k, k * n, m * n))
        each = machine.start_up + 2 * batch * m * n * k / rate + (one + other + result) / cpu.cached
        if batch > 1:  # heads go before positions: XLA writes both factors anew
            each += 2 * one / (cpu.transposed if p.turned else cpu.cached) + 2 * other / cpu.cached
        elif p.turned:
            each += 2 * one / cpu.turned
        seconds += p.times * each
    return seconds
