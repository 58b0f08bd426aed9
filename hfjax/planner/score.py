"""What a candidate takes: seconds and bytes, by formula, from one reading of the model.

`Scorer` holds what all candidates share: the run's settings, its model's arrays and programs, the
machine. All that is slow is kept by what it depends on, so that a candidate costs little.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax

from hfjax.hardware.machine import Machine
from hfjax.parallel.adapters.model_template import LAYERS
from hfjax.parallel.extensions.context_parallel.comm_kinds import AttentionCall
from hfjax.parallel.extensions.expert_parallel.dispatch_kinds import MixtureCall
from hfjax.parallel.layer_stack.ordered_layers import AT_MOST
from hfjax.parallel.mesh import size_of
from hfjax.parallel.precision.by_path import by_path
from hfjax.parallel.precision.dtypes import precision_of
from hfjax.parallel.schedules.cost import cost, outline, permutes_of
from hfjax.parallel.schedules.table import Table
from hfjax.planner.candidate import Candidate, table_of
from hfjax.planner.comm_model import GRID, NEW, TENSOR, Sent, Traffic, form_of, sent_by
from hfjax.planner.memory_model import ArraysPlaced, ModelArrays
from hfjax.planner.peak_memory import Peak, Running, WeightBytes, peak_of
from hfjax.planner.programs.compile_step import Compiled
from hfjax.planner.programs.model_calls import ModelCalls, calls_of
from hfjax.planner.programs.model_profile import ModelProfile, Sizes, profile_of
from hfjax.planner.programs.placeholder_attention import fused_attention
from hfjax.planner.programs.planned_run import Planned
from hfjax.planner.programs.read_program import Share
from hfjax.planner.step_time import (
    BESIDE,
    NOTHING,
    Beside,
    StepTime,
    WorkTime,
    seconds_of,
    slowest,
    time_of_work,
)
from hfjax.trainer.config import Mesh, Train

HALVES = 0.5  # of tensor's transfers that split rows hide: benchmarks/results/ahead_of_time.md


@dataclass(frozen=True)
class Scored:
    """A candidate with its seconds and bytes."""

    candidate: Candidate
    time: StepTime
    peak: Peak
    compiled: Compiled | None = None  # by what it was corrected


@dataclass(frozen=True)
class Piped:
    """A pipeline's table, and what follows from it."""

    table: Table
    held: float  # microbatches that a stage has room for, in whole stages
    crossing: float  # those of which W needs something of B
    forward: int  # ticks in which stages run forward, whether they have a microbatch or not
    backward: int
    permutes: int


@cache
def piped(schedule: str, microbatches: int, chunks: int | None, stages: int) -> Piped:
    """Return what a schedule's table says of the executor's program."""
    table = table_of(schedule, microbatches, chunks, stages)
    ticks = outline(table)
    held, crossing = (ticks.depth[name] / table.chunks for name in ("stash", "cross"))
    runs = {kind: sum(b - a for a, b, used in ticks.segments if kind in used) for kind in "FB"}
    sent = sum(count for _, _, count in permutes_of(ticks))
    return Piped(table, held, crossing, runs["F"], runs["B"], sent)


class Scorer:
    """Scores candidates of one run on one kind of machine."""

    def __init__(
        self, config: Train, vocab: int | None, machine: Machine, compile_for: str | None
    ) -> None:
        self.config, self.vocab, self.machine = config, vocab, machine
        self.compile_for = compile_for  # the GPU, where something here compiles for it
        self._profiles: dict[str, ModelProfile] = {}
        self._placed: dict[Any, ArraysPlaced] = {}
        self._work: dict[Any, WorkTime] = {}
        self._weights: dict[Any, WeightBytes] = {}
        self._chosen: dict[Any, tuple[AttentionCall, ...]] = {}

    @cached_property
    def one(self) -> Planned:
        """The parts of the run on one device."""
        alone = replace(
            self.config, strategy="ddp", mesh=Mesh(), batch=1, accumulate=1, offload=None,
            remat="none", split_rows=1, reduction="flat",
        )  # fmt: skip
        return Planned(alone, jax.devices()[:1], self.vocab)

    @cached_property
    def arrays(self) -> ModelArrays:
        """The model's arrays, and those of its optimizer."""
        return ModelArrays.of(self.one.layout)

    @cached_property
    def layers(self) -> int:
        """How many equal layers are stacked; 0: none."""
        stacked = [p.shape[0] for p in self.one.layout.placed.values() if p.stacked]
        return stacked[0] if stacked else 0

    @property
    def length(self) -> int:
        """Positions of a row; 1 where rows have none."""
        return self.one.task.each if self.one.task.unit == "tokens" else 1

    @cached_property
    def calls(self) -> ModelCalls:
        """The attentions and mixtures that the model asks for, whosever it is."""
        return calls_of(self.one)

    @cached_property
    def flops(self) -> float:
        """What training needs for a token: of one's own model its products, and attention.

        They are counted as those of presets (`run.tasks.texts.flops_per_token`).
        """
        task = self.one.task
        if task.unit != "tokens" or task.model.shape is not None:
            return task.flops(self.one.layout)
        profile, layers = self.profile("none"), max(self.layers, 1)
        found = 0.0
        for part, times in (("layers", layers), ("ends", 1)):
            work = profile.work(part, Share())
            sides = ((p.sides(1, 1), p.times) for p in work.products)
            found += times * sum(2 * n * math.prod(of_row) for of_row, n in sides)
            found += times * sum(12 * a.seen for a in work.attention if not a.backward)
        return found / self.length

    @cached_property
    def numbers(self) -> tuple[int, int, int]:
        """Bytes of a number: computed with, summed as gradients, stored."""
        precision = precision_of(by_path(self.config.precision))
        stored = max(jax.numpy.dtype(d).itemsize for d in self.arrays.dtypes.values())
        default = getattr(precision, "default", precision)
        compute = default.compute.itemsize if default.compute is not None else stored
        reduce = default.reduce.itemsize if default.reduce is not None else max(stored, 4)
        return compute, reduce, stored

    # -- what is kept by what it depends on --------------------------------------------------

    def profile(self, remat: str) -> ModelProfile:
        """Return the model's programs under a kind of recomputation.

        Attention is one call, as on GPUs, unless the machine is a CPU.
        """
        if remat not in self._profiles:
            config = replace(self.config, remat=remat, pipeline=type(self.config.pipeline)())
            attention = fused_attention if self.machine.platform != "cpu" else None
            found = profile_of(config, self.vocab, self.compile_for, attention)
            self._profiles[remat] = found
        return self._profiles[remat]

    def placing(self, c: Candidate) -> ArraysPlaced:
        """Return where the arrays lie.

        Raises:
            ValueError: A side does not divide what it splits.
        """
        places = self.stage_layers(c) * c.side("pipe") if c.side("pipe") > 1 else None
        key = c.mesh, c.names, places
        if key not in self._placed:
            self._placed[key] = self.arrays.placed(c.strategy, c.mesh, places)
        return self._placed[key]

    def stage_layers(self, c: Candidate) -> int:
        """Return how many places for layers each stage has."""
        stages, chunks = c.side("pipe"), self._chunks(c)
        return math.ceil(self.layers / (stages * chunks)) * chunks if stages > 1 else self.layers

    def _chunks(self, c: Candidate) -> int:
        if c.pipeline is None:
            return 1
        return self.piped(c).table.chunks

    def piped(self, c: Candidate) -> Piped:
        """Return what a pipeline's table says."""
        assert c.schedule is not None
        assert c.microbatches is not None
        return piped(c.schedule, c.microbatches, c.chunks, c.side("pipe"))

    def work(self, c: Candidate, part: str) -> WorkTime:
        """Return the seconds of one layer, or of what is around them, for one microbatch."""
        share = self.share(c)
        parts = 1 if part == "ends" else c.split_rows  # layers run on some rows after others
        key = c.remat, part, share, c.rows_at_once, parts
        if key not in self._work:
            work, rows = self.profile(c.remat).work(part, share), c.rows_at_once / parts
            found = time_of_work(work, rows, share.tensor, self.machine)
            self._work[key] = found.times(parts)
        return self._work[key]

    def share(self, c: Candidate) -> Share:
        """Return among how many devices a candidate splits what rows do not."""
        return Share(c.side("tensor"), c.sequence or c.side("row") > 1, c.side("expert"))

    # -- scores ------------------------------------------------------------------------------

    def score(self, c: Candidate) -> Scored:
        """Return what a candidate takes.

        Raises:
            ValueError: A side does not divide what it splits.
        """
        placing = self.placing(c)
        return Scored(c, self.time(c, placing), self.peak(c, placing))

    def how(self, c: Candidate, placing: ArraysPlaced) -> str:
        """Return how layers run: unrolled, in turn, loop, as a step chooses for GPUs."""
        gathers = placing.gathers_layers
        if self.machine.platform == "cpu":
            return "loop" if c.remat != "none" or c.offload or gathers else "unrolled"
        if c.remat == "none" and not gathers:
            return "loop" if c.offload else "unrolled"
        only_rows = all(c.side(axis) == 1 for axis in ("tensor", "row", "context", "expert"))
        few = only_rows and self.layers <= AT_MOST and not c.offload and c.side("pipe") == 1
        if not few:
            return "loop"
        return "in turn" if c.remat != "none" else "unrolled"

    def peak(self, c: Candidate, placing: ArraysPlaced) -> Peak:
        """Return the bytes of a device at the peak."""
        stages, sizes = c.side("pipe"), self.profile(c.remat).sizes(self.share(c))
        layers = max(self.stage_layers(c), 1)
        weights = self._weights_of(c, placing, layers)
        found = self.piped(c) if stages > 1 else None
        run = Running(
            rows=c.rows_at_once,
            layers=layers,
            how=self.how(c, placing),
            gathered=placing.gathers_layers,
            accumulate=c.accumulate,
            held=found.held if found else 0.0,
            stages=stages,
            crossing=found.crossing if found else 0.0,
            offload=c.offloaded,
            tensor=c.side("tensor"),
            stacked=self.layers > 0,
        )
        batch = self._batch(c)
        at_once = c.accumulate == 1 and stages == 1  # scattered as soon as they are there
        gradients = placing.scattered_gradients if at_once else placing.gradients
        return peak_of(sizes, run, placing.state, gradients, batch, weights)

    def _weights_of(self, c: Candidate, placing: ArraysPlaced, layers: int) -> WeightBytes:
        """Return the bytes of parameters, by what they are needed for."""
        key = id(placing)
        if key not in self._weights:
            compute, reduce, _ = self.numbers
            elements, largest = self.elements(placing), self._largest(placing)
            gathered = placing.flows.of("fsdp", False) > 0
            stored = [p for p in placing.placed.values() if p.path.startswith(LAYERS)]
            local = sum(placing.local(p, p.parameter) * p.dtype.itemsize for p in stored)
            self._weights[key] = WeightBytes(
                layer=compute * elements[True] / layers,
                layer_stored=local / layers,
                turned=self._turned(c, stored, placing),
                ends=compute * elements[False],
                gradient_layer=reduce * elements[True] / layers,
                gradient_ends=reduce * elements[False] * gathered,
                largest=reduce * largest[True] / layers,
                gradient_head=reduce * largest[False] * gathered,
            )
        return self._weights[key]

    def _turned(self, c: Candidate, stored: list[Any], placing: ArraysPlaced) -> float:
        """Return the bytes of stacks that a loop of gathered layers keeps in another order.

        XLA moves the dimension that is gathered to the front, where it is not yet the first of a
        layer; seen where another axis splits layers too.
        """
        if c.side("row") > 1:  # which of them was not looked at: a third of them, about
            return sum(placing.local(p, p.parameter) * p.dtype.itemsize for p in stored) / 3
        if c.side("tensor") == 1 and c.side("expert") == 1:
            return 0.0
        found = 0
        for p in stored:
            dims = [d + len(p.shape) for d, _ in p.split_dims("parameter")]
            if dims and min(dims) > 1:
                found += placing.local(p, p.parameter) * p.dtype.itemsize
        return float(found)

    @cached_property
    def _row(self) -> float:
        """The bytes of a row of the batch."""
        shapes = jax.tree.leaves(self.one.batch)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes)

    def _batch(self, c: Candidate) -> float:
        return self._row * c.rows / c.replicas

    def elements(self, placing: ArraysPlaced) -> dict[bool, float]:
        """Return the elements of parameters that a device computes with, of layers and of ends."""
        found = {True: 0.0, False: 0.0}
        for flow, size in placing.flows.elements.items():
            if flow.kind != "shards":
                found[flow.layers] += size
        return found

    def _largest(self, placing: ArraysPlaced) -> dict[bool, float]:
        """Return the elements of the largest array as it is read, of layers and of ends."""
        found = {True: 0.0, False: 0.0}
        for p in placing.placed.values():
            tensor = [axis for _, axes in p.tensor_dims for axis in axes]
            size, inside = math.prod(p.here) / size_of(tensor, p.mesh), p.path.startswith(LAYERS)
            found[inside] = max(found[inside], size)
        return found

    def traffic(self, c: Candidate, placing: ArraysPlaced) -> Traffic:
        """Return what the formulas of transfers need."""
        compute, reduce, stored = self.numbers
        profile = self.profile(c.remat)
        layers = self.stage_layers(c)
        carried = profile.program.carried
        rows = c.rows_at_once
        found = self.piped(c) if c.schedule else None
        each = max(self.layers, 1)
        mixed = sum(times for _, times in self.calls.mixtures) / each
        residual = carried.of_rows * rows if carried is not None else 0.0
        return Traffic(
            flows=placing.flows,
            layers=layers,
            compute=compute,
            reduce=reduce,
            stored=stored,
            residual=residual,
            sums=len(profile.summed) + mixed,
            summed=sum(profile.summed) * rows + mixed * residual,
            calls=self._calls(c),
            mixtures=self._mixtures(c),
            again=c.remat != "none",
            chunks=found.table.chunks if found else 1,
            forward=found.forward if found else 0,
            backward=found.backward if found else 0,
            permutes=found.permutes if found else 0,
            part=layers / self.layers if self.layers else 1.0,
            linear=profile.linear_maps,
            tokens=rows * self.length * c.side("row"),
        )

    def _calls(self, c: Candidate) -> tuple[AttentionCall, ...]:
        n = c.side("context")
        if n == 1:
            return ()
        key = max(round(c.rows_at_once * n), 1), c.side("tensor")
        if key not in self._chosen:
            rows, t = key
            self._chosen[key] = tuple(
                replace(a, rows=rows, heads=a.heads // t, key_heads=max(a.key_heads // t, 1))
                for a in self.calls.attentions
            )
        return self._chosen[key]

    def _mixtures(self, c: Candidate) -> tuple[tuple[MixtureCall, int], ...]:
        n = c.side("expert")
        if n == 1:
            return ()
        groups = lambda call: max(round(call.groups / self.calls.rows * c.rows_at_once), 1)
        return tuple(
            (replace(call, devices=n, groups=groups(call)), times)
            for call, times in self.calls.mixtures
        )

    def time(self, c: Candidate, placing: ArraysPlaced) -> StepTime:
        """Return the seconds of a step."""
        computing, room = self._computing(c, placing)
        beside = Beside(*room, self.machine.beside)
        for one, taken in sorted(self.transfers(c, placing), key=lambda pair: pair[0].purpose):
            beside.add(one, taken, self._hides(one, c))
        return replace(computing, exposed=beside.exposed, transfers=beside.total)

    def transfers(self, c: Candidate, placing: ArraysPlaced) -> Iterator[tuple[Sent, float]]:
        """Yield what a step sends, and the seconds that it takes."""
        for one in sent_by(c, self.traffic(c, placing)):
            yield one, seconds_of(one, c.mesh, self.machine)

    def least_time(self, c: Candidate, placing: ArraysPlaced) -> float:
        """Return the seconds of a step if nothing it sends were exposed: `time` is never less.

        Raises:
            ValueError: No form of attention runs over so many devices of context.
        """
        if calls := self._calls(c):
            form_of(c.side("context"), calls)
        return self._computing(c, placing)[0].total

    def _computing(
        self, c: Candidate, placing: ArraysPlaced
    ) -> tuple[StepTime, tuple[float, float]]:
        """Return a step without its transfers; room to hide them, forward and backward."""
        layers = max(self.stage_layers(c), 1)
        listed = self.layers == 0
        forward = NOTHING if listed else self.work(c, "forward").times(layers)
        backward = NOTHING if listed else self.work(c, "backward").times(layers)
        ends = self.work(c, "ends")
        copies = self._copies(c, placing, layers)
        forward, backward = forward.with_memory(copies), backward.with_memory(copies)
        bubble = 0.0
        count = c.accumulate
        if c.pipeline is not None:
            table, count = self.piped(c).table, c.pipeline.microbatches
            weights = backward.total / 2
            whole = cost(table, forward.total, backward.total, weights)
            bubble = max(whole - count * (forward.total + backward.total), 0.0)
        work = (forward + backward + ends).times(count)
        sums = placing.gradients * 3 * (count - 1) if c.pipeline is None else 0.0
        work = work.with_memory(sums / self.machine.stream)
        work = work.times(slowest(c.devices, self.machine))
        room = BESIDE * count * forward.total, BESIDE * count * (backward.total + ends.total / 2)
        computing = StepTime(
            products=work.products,
            memory=work.memory,
            exposed={},
            bubble=bubble,
            optimizer=self._optimizer(placing),
            host=self._host(c, placing, layers, count),
        )
        return computing, room

    def _copies(self, c: Candidate, placing: ArraysPlaced, layers: int) -> float:
        """Return the seconds that a loop copies what layers keep into stacks, or out of them."""
        if c.side("pipe") == 1 and self.how(c, placing) != "loop":
            return 0.0
        sizes: Sizes = self.profile(c.remat).sizes(self.share(c))
        kept = sizes.stashed[0] * c.rows_at_once * layers
        return 2 * kept / self.machine.stream

    def _hides(self, one: Sent, c: Candidate) -> float:
        """Return the part of transfers beside which products may run."""
        if one.purpose == TENSOR:
            return HALVES if c.split_rows > 1 else 0.0
        return float(one.layers and one.purpose not in (GRID, NEW))  # NEW: after the last product

    def _optimizer(self, placing: ArraysPlaced) -> float:
        state = placing.state + sum(placing.on_host.values())
        size = 2 * state + placing.gradients * (2 if self.config.optimizer.clip else 1)
        return size / self.machine.stream

    def _host(self, c: Candidate, placing: ArraysPlaced, layers: int, count: int) -> float:
        moved = sum(placing.on_host.values())
        if c.offload:
            kept = self.profile(c.remat).sizes(self.share(c)).stashed[0] * c.rows_at_once
            moved += c.offloaded * kept * layers * count
        return 2 * moved / self.machine.host_link  # there, and back
