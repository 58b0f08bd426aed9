"""A model as the planner sees it: its programs read once for each kind of recomputation.

All that depends on a configuration is arithmetic on what is here: rows of a device, how many share
a layer by tensor, whether the sequence is split with it.
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
from hfjax.planner.programs.planned_run import Planned
from hfjax.planner.programs.program_costs import (
    Bytes,
    Costs,
    FusedCall,
    GrowingProduct,
    at_once,
    costs_of,
    kept,
    plus,
    product_of,
    total_of,
)
from hfjax.planner.programs.read_program import Operand, Operation, Share, StepProgram, read_step
from hfjax.trainer.config import Mesh, Train


@dataclass(frozen=True)
class Sizes:
    """Bytes of one model on a device: each a pair, of every row and fixed."""

    kept: Bytes  # by a layer for its backward pass, where layers are in no loop
    stashed: Bytes  # the same where a loop hands it on
    carried: float  # from layer to layer, of every row
    forward: list[Bytes]  # while a layer runs
    backward: list[Bytes]
    head: list[Bytes]  # while what is around the layers runs
    around: Bytes  # what waits there while layers run backward
    logits: float  # of every row, as the head makes them
    crossed: float  # what gradients of a layer's weights need of its backward pass, of every row


@dataclass(frozen=True)
class Work:
    """What a part of a step computes on one device."""

    products: tuple[GrowingProduct, ...]
    attention: tuple[FusedCall, ...]
    traffic: Bytes  # through memory, of all else
    launches: float


@dataclass(eq=False)
class ModelProfile:
    """One model under one kind of recomputation."""

    program: StepProgram
    _sizes: dict = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """How many equal layers there are; 0: none that are known."""
        return self.program.layers

    @cached_property
    def _parts(self) -> dict[str, Costs]:
        parts, out = self.program.parts, self.program
        carried = [] if out.carried is None else [out.carried]
        ends = [*parts["before"], *parts["between"], *parts["after"]]
        return {
            "joint": costs_of([*parts["layers"], *parts["backward"]], carried, self._border),
            "forward": costs_of(parts["layers"], [*carried, *out.stashed]),
            "backward": costs_of(parts["backward"], []),
            "ends": costs_of(ends, []),
        }

    @property
    def _border(self) -> int:
        return len(self.program.parts["layers"])

    def sizes(self, share: Share) -> Sizes:
        """Return bytes on one of the devices that share layers."""
        if share not in self._sizes:
            self._sizes[share] = self._sized(share)
        return self._sizes[share]

    def _sized(self, share: Share) -> Sizes:
        parts, program = self._parts, self.program
        total = lambda values: total_of(values, share)
        first = len(program.parts["before"])
        ends = parts["ends"]
        waits = [v for v in kept(ends, first) if not v.given and v.of_rows]
        held = [v for v in kept(parts["joint"], self._border) if not v.given]
        made = [v for v in ends.made if v.of_rows]
        return Sizes(
            kept=plus(total(held), self._gathered(held, share)),
            stashed=total([v for v in program.stashed if not v.given]),
            carried=program.carried.size(share)[0] if program.carried else 0.0,
            forward=at_once(parts["forward"], share, results_stay=False),
            backward=at_once(parts["backward"], share, results_stay=False),
            head=at_once(ends, share),
            around=total(waits),
            logits=max((v.size(share)[0] for v in made), default=0.0),
            crossed=total([v for v in parts["forward"].made if v.of_rows])[0],
        )

    def _gathered(self, held: list[Operand], share: Share) -> Bytes:
        """Return the bytes by which kept values are larger that a split product reads whole."""
        if not share.sequence or share.tensor == 1:
            return 0.0, 0.0
        whole = {id(v) for v in self._parts["joint"].gathered}
        more = [v for v in held if id(v) in whole and not v.split]
        return sum(v.of_rows * (1 - 1 / share.tensor) for v in more), 0.0

    @cached_property
    def linear_maps(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of a layer's maps, in turn into what a tensor axis splits, and out.

        Those into it that follow one another (queries, keys and values; gate and up) are one.
        """
        found: list[tuple[int, int]] = []
        into: list[tuple[int, int]] = []
        for one in self._forward_products:
            (_, _, n, k), split = product_of(one).two, one.makes[0].split
            if one.summed and into:
                found += [(into[0][0], sum(outputs for _, outputs in into)), (k, n)]
                into = []
            elif split and not one.summed:
                into.append((k, n))
        return tuple(found)

    @cached_property
    def summed(self) -> tuple[int, ...]:
        """The bytes, of a row, of what a layer sums over a tensor axis forward; experts left out.

        Of a model whose layers are no stack: of all layers, half of what both passes sum.
        """
        sums = [x.makes[0].of_rows for x in self._forward_products if x.summed]
        return tuple(sums if self.layers else sums[: len(sums) // 2])

    @property
    def _forward_products(self) -> Iterator[Operation]:
        """Yield products of rows with weights; where layers are no stack also those backward."""
        for one in self.program.parts["layers" if self.layers else "before"]:
            of_experts = any(v.experts for v in one.reads)
            weights = sum(not v.of_rows for v in one.reads)
            if one.name == "dot_general" and weights == 1 and not of_experts:
                yield one

    def work(self, part: str, share: Share) -> Work:
        """Return what a part computes: layers, forward or backward alone of them, ends."""
        key = part, share
        if key not in self._sizes:
            costs = self._parts["ends" if part == "ends" else "joint"]
            border, end = self._border, float("inf")
            span = {"forward": (0, border), "backward": (border, end)}.get(part, (0, end))
            costs = costs.part(*span)
            traffic = costs.traffic(share)
            products, attention = tuple(costs.products), tuple(costs.attention)
            self._sizes[key] = Work(products, attention, traffic, costs.launches)
        return self._sizes[key]


def profile_of(
    config: Train,
    vocab: int | None,
    gpu: str | None,
    attention: Callable | None = fused_attention,
) -> ModelProfile:
    """Return the profile of a configuration's model under its remat, in its precision.

    It is traced on one device: the sides of its mesh, its batch and its strategy do not count.
    `attention` takes the place of the model's own; None: its own is read, as CPUs run it.
    """
    alone = {"mesh": Mesh(), "accumulate": 1, "offload": None, "split_rows": 1}
    one = replace(config, strategy="ddp", kernels="auto", reduction="flat", **alone)
    devices = jax.devices()[:1]
    if gpu is not None and can_compile_for_gpus():
        devices = target_devices(gpu, 1)
    traces, parts = [], None
    for rows in (2, 3):
        parts = Planned(replace(one, batch=rows), devices, vocab, attention=attention)
        execution = {**parts.execution, "unroll": 1, "schedule": None}
        step = hfjax.train_step(parts.layout, parts.model.loss, **execution)
        traces.append(parts.trace(step))
    assert parts is not None
    layout = parts.layout
    rules = TENSOR.parameters
    dims = {
        path: frozenset(d for d, name in enumerate(a.axes) if name in rules)
        for path, a in layout.arrays.items()
    }
    given = jax.tree_util.tree_leaves_with_path(traces[0].args_info)
    split = [dims.get(_path(keys), frozenset()) for keys, _ in given]
    stacked = [p.shape[0] for p in layout.placed.values() if p.stacked]
    experts = [a.shape[a.axes.index(EXPERTS)] for a in layout.arrays.values() if EXPERTS in a.axes]
    read = read_step(traces[0], traces[1], split, max(stacked, default=0), max(experts, default=0))
    return ModelProfile(read)


def _path(keys: Any) -> str:
    """Return the path of a parameter among the arguments of a step; "" of all else."""
    if len(keys) < 3 or getattr(keys[2], "name", "") != "params":
        return ""
    return "/".join(str(getattr(k, "key", getattr(k, "name", k))) for k in keys[3:])
