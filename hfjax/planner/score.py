"""Scores candidates: seconds and bytes, by formula, from one reading of the model.

`Scorer` has what all candidates share: the run's settings, its model's arrays and programs, the
machine. All that is slow is cached by what it depends on, so that a candidate costs little.
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
from hfjax.parallel.layer_stack.unrolled_layers import MAX_UNROLLED
from hfjax.parallel.mesh import size_of
from hfjax.parallel.precision.by_path import parse_precision
from hfjax.parallel.precision.dtypes import precision_of
from hfjax.parallel.schedules.cost import compile_outline, cost, list_permutes
from hfjax.parallel.schedules.table import Table
from hfjax.planner.candidate import Candidate, table_of
from hfjax.planner.comm_model import (
    GRID,
    NEW_PARAMS,
    TENSOR,
    CommInputs,
    CommVolume,
    attention_option,
    comm_volumes,
)
from hfjax.planner.memory_model import ArrayPlacements, ModelArrays
from hfjax.planner.peak_memory import MemoryInputs, Peak, WeightBytes, peak_of
from hfjax.planner.programs.compile_step import ProgramStats
from hfjax.planner.programs.model_calls import ModelCalls, calls_of
from hfjax.planner.programs.model_profile import ModelProfile, Sizes, profile_of
from hfjax.planner.programs.placeholder_attention import fused_attention
from hfjax.planner.programs.planned_run import PlannedRun
from hfjax.planner.programs.read_program import Share
from hfjax.planner.step_time import (
    NO_WORK,
    OVERLAP_FRACTION,
    OverlapBudget,
    StepTime,
    WorkTime,
    comm_seconds,
    straggler_factor,
    time_of_work,
)
from hfjax.trainer.config import MeshConfig, OffloadConfig, TrainConfig

# Of tensor's transfers, hidden by tensor_overlap_chunks: benchmarks/results/ahead_of_time.md.
HALVES = 0.5


@dataclass(frozen=True)
class ScoredCandidate:
    """A candidate with its seconds and bytes."""

    candidate: Candidate
    time: StepTime
    peak: Peak
    compiled: ProgramStats | None = None  # the program that corrected it


@dataclass(frozen=True)
class PipelineProfile:
    """A pipeline's table, and what follows from it."""

    table: Table
    stash_depth: float  # microbatches that a stage has room for, in whole stages
    crossing: float  # microbatches of which W needs something of B
    forward: int  # ticks in which stages run forward, with a microbatch or without
    backward: int
    permutes: int


@cache
def pipeline_profile(
    schedule: str, microbatches: int, chunks: int | None, stages: int
) -> PipelineProfile:
    """Return what a schedule's table implies for the executor's program."""
    table = table_of(schedule, microbatches, chunks, stages)
    ticks = compile_outline(table)
    stash_depth, crossing = (ticks.depth[name] / table.chunks for name in ("stash", "b_to_w"))
    runs = {kind: sum(b - a for a, b, used in ticks.segments if kind in used) for kind in "FB"}
    sent = sum(count for _, _, count in list_permutes(ticks))
    return PipelineProfile(table, stash_depth, crossing, runs["F"], runs["B"], sent)


class Scorer:
    """Scores candidates of one run on one kind of machine."""

    def __init__(
        self, config: TrainConfig, vocab: int | None, machine: Machine, compile_for: str | None
    ) -> None:
        self.config, self.vocab, self.machine = config, vocab, machine
        self.compile_for = compile_for  # the GPU, where something here compiles for it
        self._profiles: dict[str, ModelProfile] = {}
        self._placements: dict[Any, ArrayPlacements] = {}
        self._work: dict[Any, WorkTime] = {}
        self._weights: dict[Any, WeightBytes] = {}
        self._chosen: dict[Any, tuple[AttentionCall, ...]] = {}

    @cached_property
    def base_run(self) -> PlannedRun:
        """The components of the run on one device."""
        config = replace(
            self.config, strategy=None, zero=None, mesh=MeshConfig(), global_batch_size=1,
            gradient_accumulation_steps=1, offload=OffloadConfig(),
            remat="none", tensor_overlap_chunks=1, gradient_reduction="flat",
        )  # fmt: skip
        return PlannedRun(config, jax.devices()[:1], self.vocab)

    @cached_property
    def arrays(self) -> ModelArrays:
        """The model's arrays, and those of its optimizer."""
        return ModelArrays.of(self.base_run.layout)

    @cached_property
    def layers(self) -> int:
        """The number of equal layers in the stack; 0: no stack."""
        stacked = [p.shape[0] for p in self.base_run.layout.param_specs.values() if p.stacked]
        return stacked[0] if stacked else 0

    @property
    def length(self) -> int:
        """Positions of an example; 1 where examples have none."""
        return self.base_run.task.units_per_example if self.base_run.task.unit == "tokens" else 1

    @cached_property
    def calls(self) -> ModelCalls:
        """The calls of attention and experts that the model makes, for any model."""
        return calls_of(self.base_run)

    @cached_property
    def flops(self) -> float:
        """FLOP that training needs for a token: for custom models those of matmuls and attention.

        They are counted as for presets (`flops_per_token` in trainer/tasks/text.py).
        """
        task = self.base_run.task
        if task.unit != "tokens" or task.model.shape is not None:
            return task.flops(self.base_run.layout)
        profile, layers = self.profile("none"), max(self.layers, 1)
        flops = 0.0
        for part, times in (("layers", layers), ("ends", 1)):
            work = profile.work(part, Share())
            shapes = ((p.gemm_shape(1, 1), p.times) for p in work.products)
            flops += times * sum(2 * n * math.prod(shape) for shape, n in shapes)
            flops += times * sum(12 * a.score_macs for a in work.attention if not a.backward)
        return flops / self.length

    @cached_property
    def itemsizes(self) -> tuple[int, int, int]:
        """Bytes of an element: in compute, in gradient reductions, as stored."""
        precision = precision_of(parse_precision(self.config.precision))
        param = max(jax.numpy.dtype(d).itemsize for d in self.arrays.dtypes.values())
        default = getattr(precision, "default", precision)
        compute = default.compute.itemsize if default.compute is not None else param
        reduce = default.reduce.itemsize if default.reduce is not None else max(param, 4)
        return compute, reduce, param

    # -- cached by what it depends on --------------------------------------------------------

    def profile(self, remat: str) -> ModelProfile:
        """Return the profile of the model under a kind of rematerialization.

        Attention is one call, as on GPUs, unless the machine is a CPU.
        """
        if remat not in self._profiles:
            config = replace(self.config, remat=remat, pipeline=type(self.config.pipeline)())
            attention = fused_attention if self.machine.platform != "cpu" else None
            profile = profile_of(config, self.vocab, self.compile_for, attention)
            self._profiles[remat] = profile
        return self._profiles[remat]

    def placements(self, c: Candidate) -> ArrayPlacements:
        """Return the placements of the arrays.

        Raises:
            ValueError: An axis does not divide the dimension that it shards.
        """
        num_layers = self.stage_layers(c) * c.axis_size("pipe") if c.axis_size("pipe") > 1 else None
        key = c.mesh, c.strategy_names, num_layers
        if key not in self._placements:
            self._placements[key] = self.arrays.place(c.strategy, c.mesh, num_layers)
        return self._placements[key]

    def stage_layers(self, c: Candidate) -> int:
        """Return the number of layer slots of each stage."""
        stages, chunks = c.axis_size("pipe"), self._chunks(c)
        return math.ceil(self.layers / (stages * chunks)) * chunks if stages > 1 else self.layers

    def _chunks(self, c: Candidate) -> int:
        if c.pipeline is None:
            return 1
        return self.pipeline_profile(c).table.chunks

    def pipeline_profile(self, c: Candidate) -> PipelineProfile:
        """Return the profile of a candidate's pipeline."""
        assert c.schedule is not None
        assert c.microbatches is not None
        return pipeline_profile(c.schedule, c.microbatches, c.chunks, c.axis_size("pipe"))

    def work(self, c: Candidate, part: str) -> WorkTime:
        """Return the seconds of one layer, or of embedding and head, for one microbatch."""
        share = self.share(c)
        chunks = (
            1 if part == "ends" else c.tensor_overlap_chunks
        )  # layers run on parts of the batch
        key = c.remat, part, share, c.microbatch_size, chunks
        if key not in self._work:
            work, examples = self.profile(c.remat).work(part, share), c.microbatch_size / chunks
            work_time = time_of_work(work, examples, share.tensor, self.machine)
            self._work[key] = work_time.times(chunks)
        return self._work[key]

    def share(self, c: Candidate) -> Share:
        """Return the sharding of a layer's values by a candidate, beside the batch."""
        return Share(
            c.axis_size("tensor"), c.sequence or c.axis_size("row") > 1, c.axis_size("expert")
        )

    # -- scores ------------------------------------------------------------------------------

    def score(self, c: Candidate) -> ScoredCandidate:
        """Return the time and memory of a candidate.

        Raises:
            ValueError: An axis does not divide the dimension that it shards.
        """
        placements = self.placements(c)
        return ScoredCandidate(c, self.time(c, placements), self.peak(c, placements))

    def layer_mode(self, c: Candidate, placements: ArrayPlacements) -> str:
        """Return how layers run: unrolled, in turn, loop, as a step chooses for GPUs."""
        gathers = placements.gathers_layers
        if self.machine.platform == "cpu":
            return "loop" if c.remat != "none" or c.offload or gathers else "unrolled"
        if c.remat == "none" and not gathers:
            return "loop" if c.offload else "unrolled"
        only_data = all(c.axis_size(axis) == 1 for axis in ("tensor", "row", "context", "expert"))
        few = (
            only_data and self.layers <= MAX_UNROLLED and not c.offload and c.axis_size("pipe") == 1
        )
        if not few:
            return "loop"
        return "in turn" if c.remat != "none" else "unrolled"

    def peak(self, c: Candidate, placements: ArrayPlacements) -> Peak:
        """Return the peak bytes of a device."""
        stages, sizes = c.axis_size("pipe"), self.profile(c.remat).sizes(self.share(c))
        layers = max(self.stage_layers(c), 1)
        weights = self._weight_bytes(c, placements, layers)
        pipeline = self.pipeline_profile(c) if stages > 1 else None
        run = MemoryInputs(
            microbatch_size=c.microbatch_size,
            layers=layers,
            layer_mode=self.layer_mode(c, placements),
            gathers_params=placements.gathers_layers,
            gradient_accumulation_steps=c.gradient_accumulation_steps,
            stash_depth=pipeline.stash_depth if pipeline else 0.0,
            stages=stages,
            crossing=pipeline.crossing if pipeline else 0.0,
            offload_ratio=c.offload_ratio,
            tensor=c.axis_size("tensor"),
            has_layer_stack=self.layers > 0,
        )
        batch = self._batch_bytes(c)
        is_scattered = (
            c.gradient_accumulation_steps == 1 and stages == 1
        )  # each as soon as it is computed
        gradients = placements.scattered_gradients if is_scattered else placements.gradients
        return peak_of(sizes, run, placements.state, gradients, batch, weights)

    def _weight_bytes(self, c: Candidate, placements: ArrayPlacements, layers: int) -> WeightBytes:
        """Return the bytes of parameters, by purpose."""
        key = id(placements)
        if key not in self._weights:
            compute, reduce, _ = self.itemsizes
            elements, largest = self.elements(placements), self._largest(placements)
            gathered = placements.flows.of("fsdp", False) > 0
            layer_specs = [p for p in placements.param_specs.values() if p.path.startswith(LAYERS)]
            local = sum(
                placements.local_size(p, p.parameter) * p.dtype.itemsize for p in layer_specs
            )
            self._weights[key] = WeightBytes(
                layer=compute * elements[True] / layers,
                layer_stored=local / layers,
                transposed=self._transposed_bytes(c, layer_specs, placements),
                ends=compute * elements[False],
                gradient_layer=reduce * elements[True] / layers,
                gradient_ends=reduce * elements[False] * gathered,
                largest=reduce * largest[True] / layers,
                gradient_head=reduce * largest[False] * gathered,
            )
        return self._weights[key]

    def _transposed_bytes(
        self, c: Candidate, layer_param_specs: list[Any], placements: ArrayPlacements
    ) -> float:
        """Return the bytes of stacks that a loop of gathered layers keeps in another order.

        XLA moves the gathered dimension to the front if it is not the first of a layer yet; seen
        where another axis shards layers too.
        """
        if c.axis_size("row") > 1:  # which of them was not examined: about a third
            return (
                sum(
                    placements.local_size(p, p.parameter) * p.dtype.itemsize
                    for p in layer_param_specs
                )
                / 3
            )
        if c.axis_size("tensor") == 1 and c.axis_size("expert") == 1:
            return 0.0
        size = 0
        for p in layer_param_specs:
            dims = [d + len(p.shape) for d, _ in p.split_dims("parameter")]
            if dims and min(dims) > 1:
                size += placements.local_size(p, p.parameter) * p.dtype.itemsize
        return float(size)

    @cached_property
    def _example_bytes(self) -> float:
        """The bytes of an example."""
        shapes = jax.tree.leaves(self.base_run.batch)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in shapes)

    def _batch_bytes(self, c: Candidate) -> float:
        return self._example_bytes * c.batch_size / c.replicas

    def elements(self, placements: ArrayPlacements) -> dict[bool, float]:
        """Return the elements of parameters that a device computes with, of layers and of ends."""
        counts = {True: 0.0, False: 0.0}
        for flow, size in placements.flows.elements.items():
            if flow.kind != "shards":
                counts[flow.layers] += size
        return counts

    def _largest(self, placements: ArrayPlacements) -> dict[bool, float]:
        """Return the elements of the largest array as it is read, of layers and of ends."""
        largest = {True: 0.0, False: 0.0}
        for p in placements.param_specs.values():
            tensor = [axis for _, axes in p.tensor_dims for axis in axes]
            size, inside = (
                math.prod(p.gathered_shape) / size_of(tensor, p.mesh),
                p.path.startswith(LAYERS),
            )
            largest[inside] = max(largest[inside], size)
        return largest

    def comm_inputs(self, c: Candidate, placements: ArrayPlacements) -> CommInputs:
        """Return the inputs of the collectives' formulas."""
        compute, reduce, param = self.itemsizes
        profile = self.profile(c.remat)
        layers = self.stage_layers(c)
        carry = profile.program.carry
        examples = c.microbatch_size
        pipeline = self.pipeline_profile(c) if c.schedule else None
        each = max(self.layers, 1)
        mixed = sum(times for _, times in self.calls.mixtures) / each
        residual = carry.per_example * examples if carry is not None else 0.0
        return CommInputs(
            flows=placements.flows,
            layers=layers,
            compute_itemsize=compute,
            reduce_itemsize=reduce,
            param_itemsize=param,
            residual=residual,
            num_reductions=len(profile.reduction_bytes) + mixed,
            reduction_bytes=sum(profile.reduction_bytes) * examples + mixed * residual,
            calls=self._attention_calls(c),
            mixtures=self._expert_calls(c),
            with_recompute=c.remat != "none",
            chunks=pipeline.table.chunks if pipeline else 1,
            forward=pipeline.forward if pipeline else 0,
            backward=pipeline.backward if pipeline else 0,
            permutes=pipeline.permutes if pipeline else 0,
            stage_fraction=layers / self.layers if self.layers else 1.0,
            linear=profile.linear_maps,
            tokens=examples * self.length * c.axis_size("row"),
        )

    def _attention_calls(self, c: Candidate) -> tuple[AttentionCall, ...]:
        n = c.axis_size("context")
        if n == 1:
            return ()
        key = max(round(c.microbatch_size * n), 1), c.axis_size("tensor")
        if key not in self._chosen:
            batch_size, t = key
            self._chosen[key] = tuple(
                replace(
                    a, batch_size=batch_size, heads=a.heads // t, key_heads=max(a.key_heads // t, 1)
                )
                for a in self.calls.attentions
            )
        return self._chosen[key]

    def _expert_calls(self, c: Candidate) -> tuple[tuple[MixtureCall, int], ...]:
        n = c.axis_size("expert")
        if n == 1:
            return ()
        groups = lambda call: max(round(call.groups / self.calls.batch_size * c.microbatch_size), 1)
        return tuple(
            (replace(call, devices=n, groups=groups(call)), times)
            for call, times in self.calls.mixtures
        )

    def time(self, c: Candidate, placements: ArrayPlacements) -> StepTime:
        """Return the seconds of a step, by part."""
        compute_time, room = self._compute_time(c, placements)
        budget = OverlapBudget(*room, self.machine.beside)
        for comm, seconds in sorted(
            self.transfers(c, placements), key=lambda pair: pair[0].purpose
        ):
            budget.add(comm, seconds, self._overlap_fraction(comm, c))
        return replace(compute_time, exposed=budget.exposed, transfers=budget.total)

    def transfers(
        self, c: Candidate, placements: ArrayPlacements
    ) -> Iterator[tuple[CommVolume, float]]:
        """Yield the collectives of a step, and their seconds."""
        for comm in comm_volumes(c, self.comm_inputs(c, placements)):
            yield comm, comm_seconds(comm, c.mesh, self.machine)

    def min_time(self, c: Candidate, placements: ArrayPlacements) -> float:
        """Return the seconds of a step without exposed transfers: a lower bound of `time`.

        Raises:
            ValueError: No form of attention runs over so many devices of context.
        """
        if calls := self._attention_calls(c):
            attention_option(c.axis_size("context"), calls)
        return self._compute_time(c, placements)[0].total

    def _compute_time(
        self, c: Candidate, placements: ArrayPlacements
    ) -> tuple[StepTime, tuple[float, float]]:
        """Return a step without its transfers; seconds that may hide them, forward and backward."""
        layers = max(self.stage_layers(c), 1)
        unstacked = self.layers == 0
        forward = NO_WORK if unstacked else self.work(c, "forward").times(layers)
        backward = NO_WORK if unstacked else self.work(c, "backward").times(layers)
        ends = self.work(c, "ends")
        copies = self._copy_seconds(c, placements, layers)
        forward, backward = forward.with_memory(copies), backward.with_memory(copies)
        bubble = 0.0
        count = c.gradient_accumulation_steps
        if c.pipeline is not None:
            table, count = self.pipeline_profile(c).table, c.pipeline.microbatches
            weights = backward.total / 2
            pipeline_seconds = cost(table, forward.total, backward.total, weights)
            bubble = max(pipeline_seconds - count * (forward.total + backward.total), 0.0)
        work = (forward + backward + ends).times(count)
        sums = placements.gradients * 3 * (count - 1) if c.pipeline is None else 0.0
        work = work.with_memory(sums / self.machine.stream)
        work = work.times(straggler_factor(c.devices, self.machine))
        room = (
            OVERLAP_FRACTION * count * forward.total,
            OVERLAP_FRACTION * count * (backward.total + ends.total / 2),
        )
        compute_time = StepTime(
            products=work.products,
            memory=work.memory,
            exposed={},
            bubble=bubble,
            optimizer=self._optimizer_seconds(placements),
            host=self._host_seconds(c, placements, layers, count),
        )
        return compute_time, room

    def _copy_seconds(self, c: Candidate, placements: ArrayPlacements, layers: int) -> float:
        """Return the seconds for which a loop copies residuals into stacks, or out of them."""
        if c.axis_size("pipe") == 1 and self.layer_mode(c, placements) != "loop":
            return 0.0
        sizes: Sizes = self.profile(c.remat).sizes(self.share(c))
        residuals = sizes.loop_residuals[0] * c.microbatch_size * layers
        return 2 * residuals / self.machine.stream

    def _overlap_fraction(self, comm: CommVolume, c: Candidate) -> float:
        """Return the fraction of a transfer that matmuls may hide."""
        if comm.purpose == TENSOR:
            return HALVES if c.tensor_overlap_chunks > 1 else 0.0
        return float(
            comm.layers and comm.purpose not in (GRID, NEW_PARAMS)
        )  # new parameters come after the last matmul

    def _optimizer_seconds(self, placements: ArrayPlacements) -> float:
        state = placements.state + sum(placements.on_host.values())
        size = 2 * state + placements.gradients * (2 if self.config.optimizer.max_grad_norm else 1)
        return size / self.machine.stream

    def _host_seconds(
        self, c: Candidate, placements: ArrayPlacements, layers: int, count: int
    ) -> float:
        host_bytes = sum(placements.on_host.values())
        if c.offload:
            residuals = (
                self.profile(c.remat).sizes(self.share(c)).loop_residuals[0] * c.microbatch_size
            )
            host_bytes += c.offload_ratio * residuals * layers * count
        return 2 * host_bytes / self.machine.host_link  # to the host and back
