"""One way to run a step: mesh axis sizes, strategy, schedule, rematerialization, offload."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from hfjax.parallel.mesh import AXES
from hfjax.parallel.offload.activations import Offload
from hfjax.parallel.schedules.named import SCHEDULES, Schedule
from hfjax.parallel.schedules.table import Table
from hfjax.parallel.settings import ContextParallel
from hfjax.parallel.strategy import Strategy
from hfjax.planner.memory_model import MeshShape
from hfjax.trainer.build import DATA_STRATEGIES, mesh_sizes, parse_strategy
from hfjax.trainer.config import Mesh, PipelineOptions, Train


@dataclass(frozen=True)
class Candidate:
    """A configuration of a plan; `batch_size` is the global batch size of a step.

    Attributes:
        axis_sizes: Number of devices along each axis; an axis may be left out.
        zero: Which of parameters, gradients, optimizer state are sharded: ddp, zero1, zero2, fsdp.
        batch_size: Examples in a step, over all devices.
        sequence: Whether tensor also shards the sequence between layers.
        schedule: Pipeline schedule; None without a pipeline.
        chunks: Model chunks of each stage, where the schedule leaves a choice.
        microbatches: Microbatches of the pipeline.
        remat: What layers recompute.
        offload: Which of the layers' residuals wait in host memory.
        accumulate: Microbatches of a step without a pipeline.
        split_rows: Parts of a batch whose transfers hide under each other's matmuls.
        reduction: flat, or hierarchical.
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
    accumulate: int = 1
    split_rows: int = 1
    reduction: str = "flat"
    host: str = ""

    @classmethod
    def of(cls, config: Train, count: int) -> "Candidate":
        """Return the candidate that the settings of a run describe, on `count` devices."""
        config_sizes = mesh_sizes(config, count)
        remaining = count // -math.prod(config_sizes.values()) if -1 in config_sizes.values() else 1
        sizes = MeshShape.of(
            **{axis: remaining if n == -1 else n for axis, n in config_sizes.items()}
        )
        names = config.strategy.replace("|", "+").split("+")
        zero = next((n for n in names if n in DATA_STRATEGIES), "ddp")
        is_pipeline = sizes["pipe"] > 1
        return cls(
            tuple((axis, sizes[axis]) for axis in AXES if sizes[axis] > 1),
            {"hsdp": "fsdp", "zero3": "fsdp"}.get(zero, zero),
            config.batch,
            "sequence" in names,
            config.pipeline.name if is_pipeline else None,
            config.pipeline.chunks if is_pipeline else None,
            (config.pipeline.microbatches or 4 * sizes["pipe"]) if is_pipeline else None,
            config.remat,
            config.offload,
            config.accumulate,
            config.split_rows,
            config.reduction,
            "host_optimizer" if "host_optimizer" in names else "",
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
        return self.accumulate * (self.microbatches or 1)

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
                f"offload={self.offload}: a plan knows the bytes of a fraction. Say offload=0.5."
            )
        return ratio

    @cached_property
    def strategy_names(self) -> tuple[str, ...]:
        """The strategies, as `--strategy` joins them."""
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
            "accumulate": self.accumulate,
            "schedule": self.pipeline,
            "remat": self.remat,
            "offload": self.offload,
            "split_rows": self.split_rows,
            "reduction": self.reduction,
            "context": ContextParallel(),
        }

    def settings(self, base: Train) -> Train:
        """Return the settings of a run: those of `base`, with this layout."""
        axis_sizes = {axis: size for axis, size in self.axis_sizes if size > 1}
        pipeline = base.pipeline
        if self.schedule is not None:
            chunks = None if SCHEDULES[self.schedule].fixed_chunks else self.chunks
            pipeline = PipelineOptions(self.schedule, self.microbatches, chunks)
        return replace(
            base,
            strategy="+".join(self.strategy_names),
            mesh=Mesh(**{**axis_sizes, **({} if "data" in axis_sizes else {"data": 1})}),
            batch=self.batch_size,
            accumulate=self.accumulate,
            remat=self.remat,
            offload=self.offload,
            split_rows=self.split_rows,
            reduction=self.reduction,
            pipeline=pipeline,
        )

    @property
    def columns(self) -> Mapping[str, str]:
        """The cells of a table, by column."""
        mesh = " ".join(f"{a}={n}" for a, n in self.axis_sizes if n > 1) or "one device"
        schedule_words = [self.schedule or ""]
        if self.chunks and self.schedule and not SCHEDULES[self.schedule].fixed_chunks:
            schedule_words.append(f"x{self.chunks}")
        examples = self.batch_size // (self.replicas * self.num_microbatches)
        memory_words = [f"remat={self.remat}"] if self.remat != "none" else []
        memory_words += [f"offload={self.offload}"] if self.offload else []
        memory_words += [f"split_rows={self.split_rows}"] if self.split_rows > 1 else []
        memory_words += ["hierarchical"] if self.reduction != "flat" else []
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
        columns = self.columns
        cells = [columns["mesh"], columns["strategy"], columns["schedule"], columns["microbatches"]]
        return ", ".join(p for p in [*cells, columns["memory"]] if p != "-")


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
    return parse_strategy("+".join(names))


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
