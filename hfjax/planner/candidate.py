"""One way to run a step: sides of the mesh, strategy, schedule, recomputation, offload."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from hfjax.parallel.mesh import AXES
from hfjax.parallel.offload.activations import Offload
from hfjax.parallel.schedules.named import SCHEDULES, Schedule
from hfjax.parallel.schedules.table import Table
from hfjax.parallel.settings import Context
from hfjax.parallel.strategy import Strategy
from hfjax.planner.memory_model import Sides
from hfjax.trainer.build import PLANES, sizes_of, strategy_of
from hfjax.trainer.config import Mesh, PipelineOptions, Train


@dataclass(frozen=True)
class Candidate:
    """A configuration of a plan; `rows` is the batch of a step.

    Attributes:
        sides: How many devices each axis has, those of one left out.
        zero: What of parameters, gradients and moments is split: ddp, zero1, zero2, fsdp.
        rows: Rows of a step, on all devices together.
        sequence: Whether tensor splits the sequence between layers too.
        schedule: That of the pipeline; None where there is none.
        chunks: Of each stage, where the schedule leaves a choice.
        microbatches: Of the pipeline.
        remat: What layers compute again.
        offload: What of what layers keep waits on the host.
        accumulate: Microbatches of a step without a pipeline.
        split_rows: Parts of rows whose transfers hide under each other's products.
        reduction: flat, or hierarchical.
        host: What of the state the host keeps: "", host_optimizer.
    """

    sides: tuple[tuple[str, int], ...]
    zero: str
    rows: int
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
        """Return the candidate that the settings of a run describe, on so many devices."""
        given = sizes_of(config, count)
        left = count // -math.prod(given.values()) if -1 in given.values() else 1
        sizes = Sides.of(**{axis: left if n == -1 else n for axis, n in given.items()})
        names = config.strategy.replace("|", "+").split("+")
        zero = next((n for n in names if n in PLANES), "ddp")
        piped = sizes["pipe"] > 1
        return cls(
            tuple((axis, sizes[axis]) for axis in AXES if sizes[axis] > 1),
            {"hsdp": "fsdp", "zero3": "fsdp"}.get(zero, zero),
            config.batch,
            "sequence" in names,
            config.pipeline.name if piped else None,
            config.pipeline.chunks if piped else None,
            (config.pipeline.microbatches or 4 * sizes["pipe"]) if piped else None,
            config.remat,
            config.offload,
            config.accumulate,
            config.split_rows,
            config.reduction,
            "host_optimizer" if "host_optimizer" in names else "",
        )

    def side(self, axis: str) -> int:
        """Return how many devices an axis has."""
        return self.mesh[axis]

    @cached_property
    def mesh(self) -> Sides:
        """The sides of all axes."""
        return mesh_of_sides(self.sides)

    @property
    def devices(self) -> int:
        """How many devices there are."""
        return self.mesh.size

    @property
    def replicas(self) -> int:
        """Over how many devices the rows of a batch are split; those that share rows are one."""
        return self.side("data") * self.side("fsdp") * self.side("expert")

    @property
    def pieces(self) -> int:
        """Into how many microbatches a device's rows go."""
        return self.accumulate * (self.microbatches or 1)

    @cached_property
    def rows_at_once(self) -> float:
        """Rows of a microbatch on a device; a row that devices share counts in part."""
        shared = self.side("context") * self.side("row")
        return self.rows / (self.replicas * self.pieces * shared)

    @property
    def offloaded(self) -> float:
        """The part of what layers keep that waits on the host.

        Raises:
            ValueError: `offload` says it by names or products.
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
    def names(self) -> tuple[str, ...]:
        """The strategies, as `--strategy` joins them."""
        return _names(self.sides, self.zero, self.sequence, self.host)

    @property
    def strategy(self) -> Strategy:
        """The strategy."""
        return _strategy(self.names)

    @property
    def pipeline(self) -> Schedule | None:
        """The schedule with its microbatches and chunks."""
        if self.schedule is None:
            return None
        assert self.microbatches is not None
        return schedule_of(self.schedule, self.microbatches, self.chunks)

    @property
    def execution(self) -> dict[str, Any]:
        """How the step runs: keywords of `hfjax.train_step`."""
        return {
            "accumulate": self.accumulate,
            "schedule": self.pipeline,
            "remat": self.remat,
            "offload": self.offload,
            "split_rows": self.split_rows,
            "reduction": self.reduction,
            "context": Context(),
        }

    def settings(self, base: Train) -> Train:
        """Return the settings of a run: those of `base`, laid out like this."""
        sides = {axis: size for axis, size in self.sides if size > 1}
        pipeline = base.pipeline
        if self.schedule is not None:
            chunks = None if SCHEDULES[self.schedule].fixed else self.chunks
            pipeline = PipelineOptions(self.schedule, self.microbatches, chunks)
        return replace(
            base,
            strategy="+".join(self.names),
            mesh=Mesh(**{**sides, **({} if "data" in sides else {"data": 1})}),
            batch=self.rows,
            accumulate=self.accumulate,
            remat=self.remat,
            offload=self.offload,
            split_rows=self.split_rows,
            reduction=self.reduction,
            pipeline=pipeline,
        )

    @property
    def shown(self) -> Mapping[str, str]:
        """What a table shows, by column."""
        sides = " ".join(f"{a}={n}" for a, n in self.sides if n > 1) or "one device"
        how = [self.schedule or ""]
        if self.chunks and self.schedule and not SCHEDULES[self.schedule].fixed:
            how.append(f"x{self.chunks}")
        more = [f"remat={self.remat}"] if self.remat != "none" else []
        more += [f"offload={self.offload}"] if self.offload else []
        more += [f"split_rows={self.split_rows}"] if self.split_rows > 1 else []
        more += ["hierarchical"] if self.reduction != "flat" else []
        return {
            "mesh": sides,
            "strategy": "+".join(n for n in self.names if n not in ("pipe", "context", "expert")),
            "schedule": " ".join(filter(None, how)) or "-",
            "microbatches": f"{self.pieces} x {self.rows // (self.replicas * self.pieces)}",
            "memory": ", ".join(more) or "-",
        }

    def __str__(self) -> str:
        shown = self.shown
        parts = [shown["mesh"], shown["strategy"], shown["schedule"], shown["microbatches"]]
        return ", ".join(p for p in [*parts, shown["memory"]] if p != "-")


@cache
def mesh_of_sides(sides: tuple[tuple[str, int], ...]) -> Sides:
    """Return the sizes of all axes, of those that are larger than 1."""
    return Sides.of(**dict(sides))


@cache
def _names(
    sides: tuple[tuple[str, int], ...], zero: str, sequence: bool, host: str
) -> tuple[str, ...]:
    mesh = mesh_of_sides(sides)
    found = ["hsdp" if zero == "fsdp" and mesh["data"] > 1 else zero]
    if mesh["row"] > 1:
        found.append("grid")
    elif mesh["tensor"] > 1:
        found += ["tensor", "sequence"] if sequence else ["tensor"]
    found += [axis for axis in ("context", "expert", "pipe") if mesh[axis] > 1]
    return (*found, *([host] if host else []))


@cache
def _strategy(names: tuple[str, ...]) -> Strategy:
    return strategy_of("+".join(names))


@cache
def schedule_of(name: str, microbatches: int, chunks: int | None) -> Schedule:
    """Return a schedule; chunks count where it leaves a choice."""
    fixed = SCHEDULES[name].fixed
    more: dict[str, Any] = {} if fixed or chunks is None else {"chunks": chunks}
    return Schedule(name, microbatches, **more)


@cache
def table_of(name: str, microbatches: int, chunks: int | None, stages: int) -> Table:
    """Return the table of a schedule; built once, since a search asks for it first to know it."""
    return schedule_of(name, microbatches, chunks).table(stages)
