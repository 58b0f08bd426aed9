"""One way to run a step: mesh axis sizes, strategy, schedule, rematerialization, offload."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property, reduce
from operator import or_
from typing import Any

import hfjax
from hfjax.parallel.mesh import AXES
from hfjax.parallel.offload.activations import Offload
from hfjax.parallel.schedules.named import SCHEDULES, Schedule
from hfjax.parallel.schedules.table import Table
from hfjax.parallel.settings import ContextParallel
from hfjax.parallel.strategy import Strategy
from hfjax.planner.memory_model import MeshShape
from hfjax.trainer.config import (
    FSDP_AXES,
    MeshConfig,
    OffloadConfig,
    PipelineConfig,
    TrainConfig,
)
from hfjax.trainer.strategy import mesh_sizes, zero_stage

ZERO_STAGES = ("ddp", "zero1", "zero2", "fsdp")


@dataclass(frozen=True)
class Candidate:
    """A configuration of a plan; `batch_size` is the global batch size of a step.

    Attributes:
        axis_sizes: Number of devices along each axis; an axis may be left out.
        zero: Which of parameters, gradients, optimizer state are sharded: ddp, zero1, zero2, fsdp.
        batch_size: Examples in a step, over all devices.
        sequence: Whether tensor also shards the sequence between layers.
        schedule: Pipeline schedule; None without a pipeline.
        chunks: Model chunks of each stage; None without a pipeline.
        microbatches: Microbatches of the pipeline.
        remat: What layers recompute.
        offload: Which of the layers' residuals wait in host memory.
        gradient_accumulation_steps: Microbatches of a step without a pipeline.
        tensor_overlap_chunks: Parts of a batch whose transfers hide under each other's matmuls.
        gradient_reduction: flat, or hierarchical.
        host: Which part of the state is in host memory: "", host_optimizer.
    """

    axis_sizes: tuple[tuple[str, int], ...]
    zero: str
    batch_size: int
    sequence: bool = False
    schedule: str | None = None
    chunks: int | None = None
    microbatches: int | None = None
    remat: str = "none"
    offload: str | None = None
    gradient_accumulation_steps: int = 1
    tensor_overlap_chunks: int = 1
    gradient_reduction: str = "flat"
    host: str = ""

    @classmethod
    def of(cls, config: TrainConfig, count: int) -> "Candidate":
        """Return the candidate that the settings of a run describe, on `count` devices."""
        sizes = MeshShape.of(**mesh_sizes(config.mesh, count))
        is_pipeline, pipeline = sizes["pipe"] > 1, config.pipeline
        chunks = pipeline.chunks or SCHEDULES[pipeline.schedule].chunks
        microbatches = pipeline.microbatches or 4 * sizes["pipe"]
        return cls(
            tuple((axis, sizes[axis]) for axis in AXES if sizes[axis] > 1),
            effective_zero(ZERO_STAGES[zero_stage(config)], sizes),
            config.global_batch_size,
            sizes["tensor"] > 1 and sizes["row"] == 1 and config.sequence_parallel,
            pipeline.schedule if is_pipeline else None,
            chunks if is_pipeline else None,
            microbatches if is_pipeline else None,
            config.remat,
            config.offload.activations,
            config.gradient_accumulation_steps,
            config.tensor_overlap_chunks,
            config.gradient_reduction,
            "host_optimizer" if config.offload.optimizer else "",
        )

    def axis_size(self, axis: str) -> int:
        """Return the number of devices along an axis."""
        return self.mesh[axis]

    @cached_property
    def mesh(self) -> MeshShape:
        """The sizes of all axes."""
        return mesh_shape(self.axis_sizes)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.mesh.size

    @property
    def replicas(self) -> int:
        """The number of devices that shard the batch; devices that share examples count as one."""
        return self.axis_size("data") * self.axis_size("fsdp") * self.axis_size("expert")

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches of a device's batch."""
        return self.gradient_accumulation_steps * (self.microbatches or 1)

    @cached_property
    def microbatch_size(self) -> float:
        """Examples of a microbatch on a device; a shared example counts in part."""
        devices_per_example = self.axis_size("context") * self.axis_size("row")
        return self.batch_size / (self.replicas * self.num_microbatches * devices_per_example)

    @property
    def offload_ratio(self) -> float:
        """The fraction of the layers' residuals that waits in host memory.

        Raises:
            ValueError: `offload` gives names or matmuls in place of a fraction.
        """
        if self.offload is None:
            return 0.0
        ratio = Offload.of(self.offload).ratio
        if ratio is None:
            raise ValueError(
                f"--offload.activations {self.offload}: a plan has no formula for its bytes. Give "
                "a fraction: --offload.activations 0.5."
            )
        return ratio

    @cached_property
    def strategy_names(self) -> tuple[str, ...]:
        """The strategies that are joined, in lower case."""
        return _strategy_names(self.axis_sizes, self.zero, self.sequence, self.host)

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return _strategy(self.strategy_names)

    @property
    def pipeline(self) -> Schedule | None:
        """The schedule with its microbatches and chunks."""
        if self.schedule is None:
            return None
        assert self.microbatches is not None
        return schedule_of(self.schedule, self.microbatches, self.chunks)

    @property
    def execution(self) -> dict[str, Any]:
        """How the step runs: keyword arguments of `hfjax.train_step`."""
        return {
            "gradient_accumulation_steps": self.gradient_accumulation_steps,
            "schedule": self.pipeline,
            "remat": self.remat,
            "offload": self.offload,
            "tensor_overlap_chunks": self.tensor_overlap_chunks,
            "gradient_reduction": self.gradient_reduction,
            "context": ContextParallel(),
        }

    def settings(self, base: TrainConfig) -> TrainConfig:
        """Return the settings of a run: those of `base`, with this layout."""
        pipeline = base.pipeline
        if self.schedule is not None:
            chunks = None if SCHEDULES[self.schedule].fixed_chunks else self.chunks
            pipeline = PipelineConfig(self.schedule, self.microbatches, chunks)
        stage = ZERO_STAGES.index(self.zero)
        implied = 3 if self.axis_size("fsdp") > 1 else 0
        tensor = self.axis_size("tensor") > 1 and self.axis_size("row") == 1
        return replace(
            base,
            strategy=None,
            zero=None if stage == implied else stage,
            sequence_parallel=self.sequence or not tensor,
            mesh=MeshConfig(**{"data": 1, **dict(self.axis_sizes)}),
            global_batch_size=self.batch_size,
            gradient_accumulation_steps=self.gradient_accumulation_steps,
            remat=self.remat,
            offload=OffloadConfig(self.offload, bool(self.host)),
            tensor_overlap_chunks=self.tensor_overlap_chunks,
            gradient_reduction=self.gradient_reduction,
            pipeline=pipeline,
        )

    @property
    def table_cells(self) -> Mapping[str, str]:
        """The cells of a table, by column."""
        mesh = " ".join(f"{a}={n}" for a, n in self.axis_sizes if n > 1) or "one device"
        schedule_words = [self.schedule or ""]
        if self.chunks and self.schedule and not SCHEDULES[self.schedule].fixed_chunks:
            schedule_words.append(f"x{self.chunks}")
        examples = self.batch_size // (self.replicas * self.num_microbatches)
        memory_words = [f"remat={self.remat}"] if self.remat != "none" else []
        memory_words += [f"offload={self.offload}"] if self.offload else []
        chunks = self.tensor_overlap_chunks
        memory_words += [f"tensor_overlap_chunks={chunks}"] if chunks > 1 else []
        memory_words += ["hierarchical"] if self.gradient_reduction != "flat" else []
        return {
            "mesh": mesh,
            "strategy": "+".join(
                n for n in self.strategy_names if n not in ("pipe", "context", "expert")
            ),
            "schedule": " ".join(filter(None, schedule_words)) or "-",
            "microbatches": f"{self.num_microbatches} x {examples}",
            "memory": ", ".join(memory_words) or "-",
        }

    def __str__(self) -> str:
        columns = self.table_cells
        cells = [columns["mesh"], columns["strategy"], columns["schedule"], columns["microbatches"]]
        return ", ".join(p for p in [*cells, columns["memory"]] if p != "-")


def effective_zero(zero: str, sizes: Mapping[str, int]) -> str:
    """Return what is sharded on a mesh: nothing, if its axes for that have one device.

    >>> effective_zero("fsdp", MeshShape.of(fsdp=4)), effective_zero("fsdp", MeshShape.of(data=4))
    ('fsdp', 'ddp')
    """
    axes = FSDP_AXES if zero == "fsdp" else ("data", *FSDP_AXES)
    return zero if any(sizes[axis] > 1 for axis in axes) else "ddp"


@cache
def mesh_shape(axis_sizes: tuple[tuple[str, int], ...]) -> MeshShape:
    """Return the sizes of all axes, from those larger than 1."""
    return MeshShape.of(**dict(axis_sizes))


@cache
def _strategy_names(
    axis_sizes: tuple[tuple[str, int], ...], zero: str, sequence: bool, host: str
) -> tuple[str, ...]:
    mesh = mesh_shape(axis_sizes)
    names = ["hsdp" if zero == "fsdp" and mesh["data"] > 1 else zero]
    if mesh["row"] > 1:
        names.append("grid")
    elif mesh["tensor"] > 1:
        names += ["tensor", "sequence"] if sequence else ["tensor"]
    names += [axis for axis in ("context", "expert", "pipe") if mesh[axis] > 1]
    return (*names, *([host] if host else []))


@cache
def _strategy(names: tuple[str, ...]) -> Strategy:
    return reduce(or_, (getattr(hfjax, name.upper()) for name in names))


@cache
def schedule_of(name: str, microbatches: int, chunks: int | None) -> Schedule:
    """Return a schedule; `chunks` counts only where the schedule leaves a choice."""
    fixed = SCHEDULES[name].fixed_chunks
    more: dict[str, Any] = {} if fixed or chunks is None else {"chunks": chunks}
    return Schedule(name, microbatches, **more)


@cache
def table_of(name: str, microbatches: int, chunks: int | None, stages: int) -> Table:
    """Return the table of a schedule, cached: a search first builds it to see whether it exists."""
    return schedule_of(name, microbatches, chunks).table(stages)
