"""A model as the planner sees it: its programs, read once for each kind of rematerialization.

All that depends on a configuration is arithmetic on them: examples of a device, the tensor degree
of a layer, whether the sequence is sharded with it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax

import hfjax
from hfjax.analysis.targets import can_compile_for_gpus, target_devices
from hfjax.parallel.mesh import EXPERTS
from hfjax.parallel.strategy import TENSOR
from hfjax.planner.programs.placeholder_attention import fused_attention
from hfjax.planner.programs.planned_run import PlannedRun
from hfjax.planner.programs.program_costs import (
    Bytes,
    Costs,
    FusedCall,
    GrowingProduct,
    costs_of,
    live_across,
    peak_sizes,
    plus,
    product_of,
    total_of,
)
from hfjax.planner.programs.read_program import Operand, Operation, Share, StepProgram, read_step
from hfjax.trainer.config import MeshConfig, OffloadConfig, TrainConfig

KERNEL_ROWS = 128  # that one tile of the cross-entropy kernel has


@dataclass(frozen=True)
class Sizes:
    """Bytes of one model on a device: pairs of bytes per example and fixed bytes."""

    residuals: Bytes  # of a layer, outside of a loop
    loop_residuals: Bytes  # of a layer, as a loop passes them on
    carry: float  # from layer to layer, per example
    forward: list[Bytes]  # while a layer runs
    backward: list[Bytes]
    head: list[Bytes]  # while embedding and head run
    end_residuals: Bytes  # of embedding and head, while layers run backward
    logits: float  # per example, as the head makes them
    b_to_w: float  # what weight gradients of a layer need of its backward pass, per example


@dataclass(frozen=True)
class Work:
    """What a part of a step computes on one device."""

    products: tuple[GrowingProduct, ...]
    attention: tuple[FusedCall, ...]
    traffic: Bytes  # memory traffic of all else
    launches: float


@dataclass(eq=False)
class ModelProfile:
    """One model under one kind of rematerialization."""

    program: StepProgram
    _sizes: dict = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """The number of equal layers; 0: none are known."""
        return self.program.layers

    @cached_property
    def _part_costs(self) -> dict[str, Costs]:
        operations, program = self.program.parts, self.program
        carry = [] if program.carry is None else [program.carry]
        ends = [*operations["before"], *operations["between"], *operations["after"]]
        return {
            "joint": costs_of(
                [*operations["layers"], *operations["backward"]], carry, self._border
            ),
            "forward": costs_of(operations["layers"], [*carry, *program.residuals]),
            "backward": costs_of(operations["backward"], []),
            "ends": costs_of(ends, []),
        }

    @property
    def _border(self) -> int:
        return len(self.program.parts["layers"])

    def sizes(self, share: Share) -> Sizes:
        """Return bytes on one of the devices that shard layers."""
        if share not in self._sizes:
            self._sizes[share] = self._compute_sizes(share)
        return self._sizes[share]

    def _compute_sizes(self, share: Share) -> Sizes:
        costs, program = self._part_costs, self.program
        total_size = lambda values: total_of(values, share)
        first = len(program.parts["before"])
        ends = costs["ends"]
        end_residuals = [v for v in live_across(ends, first) if not v.is_input and v.per_example]
        residuals = [v for v in live_across(costs["joint"], self._border) if not v.is_input]
        outputs = [v for v in ends.product_outputs if v.per_example]
        return Sizes(
            residuals=plus(total_size(residuals), self._gather_overhead(residuals, share)),
            loop_residuals=total_size([v for v in program.residuals if not v.is_input]),
            carry=program.carry.size(share)[0] if program.carry else 0.0,
            forward=peak_sizes(costs["forward"], share, keep_results=False),
            backward=peak_sizes(costs["backward"], share, keep_results=False),
            head=peak_sizes(ends, share),
            end_residuals=total_size(end_residuals),
            logits=max((v.size(share)[0] for v in outputs), default=0.0),
            b_to_w=total_size([v for v in costs["forward"].product_outputs if v.per_example])[0],
        )

    def _gather_overhead(self, residuals: list[Operand], share: Share) -> Bytes:
        """Return the extra bytes of residuals that a sharded matmul reads unsharded."""
        if not share.sequence or share.tensor == 1:
            return 0.0, 0.0
        gathered_ids = {id(v) for v in self._part_costs["joint"].gathered}
        gathered = [v for v in residuals if id(v) in gathered_ids and not v.split]
        return sum(v.per_example * (1 - 1 / share.tensor) for v in gathered), 0.0

    @cached_property
    def linear_maps(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of a layer's linear maps, alternately column- and row-parallel.

        Consecutive column-parallel maps (queries, keys and values; gate and up) count as one.
        """
        maps: list[tuple[int, int]] = []
        inputs: list[tuple[int, int]] = []
        for one in self._forward_products:
            (_, _, n, k), split = product_of(one).two, one.makes[0].split
            if one.is_partial and inputs:
                maps += [(inputs[0][0], sum(outputs for _, outputs in inputs)), (k, n)]
                inputs = []
            elif split and not one.is_partial:
                inputs.append((k, n))
        return tuple(maps)

    @cached_property
    def reduction_bytes(self) -> tuple[int, ...]:
        """The bytes per example that a layer reduces over a tensor axis forward, without experts.

        Of a model without a layer stack: of all layers, half of what both passes reduce.
        """
        sums = [x.makes[0].per_example for x in self._forward_products if x.is_partial]
        return tuple(sums if self.layers else sums[: len(sums) // 2])

    @property
    def _forward_products(self) -> Iterator[Operation]:
        """Yield matmuls of activations and weights; without a layer stack those backward too."""
        for one in self.program.parts["layers" if self.layers else "before"]:
            of_experts = any(v.experts for v in one.reads)
            weights = sum(not v.per_example for v in one.reads)
            if one.name == "dot_general" and weights == 1 and not of_experts:
                yield one

    def work(self, part: str, share: Share) -> Work:
        """Return what a part computes: layers, their forward or backward pass alone, ends."""
        key = part, share
        if key not in self._sizes:
            costs = self._part_costs["ends" if part == "ends" else "joint"]
            border, end = self._border, float("inf")
            span = {"forward": (0, border), "backward": (border, end)}.get(part, (0, end))
            costs = costs.select(*span)
            traffic = costs.traffic(share)
            products, attention = tuple(costs.products), tuple(costs.attention)
            self._sizes[key] = Work(products, attention, traffic, costs.launches)
        return self._sizes[key]


def profile_of(
    config: TrainConfig,
    vocab: int | None,
    gpu: str | None,
    attention: Callable | None = fused_attention,
) -> ModelProfile:
    """Return the profile of a configuration's model under its remat, in its precision.

    It is traced on one device: the axis sizes of its mesh, its batch and its strategy do not count.
    `attention` replaces the model's own; None: its own is read, as CPUs run it.
    """
    single_device: dict[str, Any] = {
        **{"mesh": MeshConfig(), "zero": None, "strategy": None, "offload": OffloadConfig()},
        **{"gradient_accumulation_steps": 1, "tensor_overlap_chunks": 1},
    }
    base = replace(config, kernels="auto", gradient_reduction="flat", **single_device)
    devices = jax.devices()[:1]
    if gpu is not None and can_compile_for_gpus():
        devices = target_devices(gpu, 1)
    traces, run = [], None
    for batch_size in (2, 3):
        run = PlannedRun(
            replace(base, global_batch_size=batch_size), devices, vocab, attention=attention
        )
        execution = {**run.execution, "unroll": 1, "schedule": None}
        if run.task.units_per_example % KERNEL_ROWS:  # it would pad one of the two programs
            execution["kernels"] = {"cross_entropy": "xla"}
        step = hfjax.train_step(run.layout, run.model.loss, **execution)
        traces.append(run.trace(step))
    assert run is not None
    layout = run.layout
    rules = TENSOR.parameters
    dims = {
        path: frozenset(d for d, name in enumerate(a.axes) if name in rules)
        for path, a in layout.arrays.items()
    }
    args_info = jax.tree_util.tree_leaves_with_path(traces[0].args_info)
    split = [dims.get(_path(keys), frozenset()) for keys, _ in args_info]
    stacked = [p.shape[0] for p in layout.param_specs.values() if p.stacked]
    experts = [a.shape[a.axes.index(EXPERTS)] for a in layout.arrays.values() if EXPERTS in a.axes]
    program = read_step(
        traces[0], traces[1], split, max(stacked, default=0), max(experts, default=0)
    )
    return ModelProfile(program)


def _path(keys: Any) -> str:
    """Return the path of a parameter among the arguments of a step; "" for all else."""
    if len(keys) < 3 or getattr(keys[2], "name", "") != "params":
        return ""
    return "/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in keys[3:])
