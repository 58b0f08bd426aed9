"""Schedules by name, and the user's own: the table of an `hfjax.Schedule`."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from hfjax.parallel.schedules import builders
from hfjax.parallel.schedules.check_table import check_table, stage_map_fault
from hfjax.parallel.schedules.lay_out import lay_out, make_lane
from hfjax.parallel.schedules.table import StageMap, Table, Versions
from hfjax.parallel.schedules.text import parse_table
from hfjax.parallel.schedules.versions import weight_versions
from hfjax.utils.keywords import is_int, strict_fields

BALANCES = ("even", "parameters", "flops")


@dataclass(frozen=True)
class Builder:
    """Builds a table from its name, stages, microbatches and chunks; and what it can build."""

    build: Callable[[str, int, int, int], Table]
    description: str
    chunks: int = 1  # the default
    fixed_chunks: bool = True  # False: any number of chunks
    every: Callable[[int], int] | None = None  # asynchronous: stages -> microbatches per update


def forward_table(stage_map: StageMap, microbatches: int) -> Table:
    """Return the table of an evaluation: forwards only, the deepest chunk of a stage first."""
    stages = 1 + max(stage for stage, _ in stage_map)
    if problem := stage_map_fault(stage_map, stages):
        raise ValueError(f"forward: {problem[0]}")
    lanes = [[] for _ in range(stages)]
    for g in reversed(range(len(stage_map))):
        lanes[stage_map[g][0]].append(make_lane("F", [(g, m) for m in range(microbatches)]))
    return lay_out("forward", stage_map, lanes)


def _build_forward(name: str, stages: int, microbatches: int, chunks: int) -> Table:
    return forward_table(builders.loop_stage_map(stages, chunks), microbatches)


SCHEDULES: dict[str, Builder] = {
    "gpipe": Builder(builders.build_gpipe, "All forwards, then all backwards (Huang et al. 2019)."),
    "1f1b": Builder(
        builders.build_1f1b, "A forward and a backward in every tick (1F1B, combined)."
    ),
    "1f1b-published": Builder(
        builders.build_alternating_1f1b,
        "A forward or a backward in a tick: the memory of 1F1B (PipeDream-flush).",
    ),
    "interleaved": Builder(
        builders.build_1f1b,
        "1f1b with more chunks: the bubble divided by them (Narayanan et al. 2021).",
        chunks=2,
        fixed_chunks=False,
    ),
    "interleaved-published": Builder(
        builders.build_alternating_1f1b,
        "A forward or a backward in a tick, interleaved as in Megatron-LM.",
        chunks=2,
        fixed_chunks=False,
    ),
    "looped-bfs": Builder(
        builders.build_gpipe,
        "gpipe with more chunks, breadth first (Lamy-Poirier 2023).",
        chunks=2,
        fixed_chunks=False,
    ),
    "zb": Builder(
        partial(builders.build_zero_bubble, builders.build_1f1b),
        "1f1b or interleaved with a weights slot in every tick (after Qi et al. 2023).",
        fixed_chunks=False,
    ),
    "zb-h1": Builder(
        partial(builders.build_zb_h, 1),
        "Zero bubble, the stash of 1F1B; what W needs of B is kept besides (Qi et al. 2023).",
    ),
    "zb-h2": Builder(
        partial(builders.build_zb_h, 2),
        "zb-h1 with twice that stash: no stage rests once it has begun.",
    ),
    "zb-v": Builder(
        partial(builders.build_on_v, builders.zb_v_lane),
        "Zero bubble on a V; what W needs of B is kept besides (Qi et al. 2024).",
        chunks=2,
    ),
    "v": Builder(builders.build_v_combined, "1f1b on a V: about half its memory.", chunks=2),
    "v-zb": Builder(
        partial(builders.build_zero_bubble, builders.build_v_combined),
        "v with a weights slot in every tick.",
        chunks=2,
    ),
    "dualpipe-v": Builder(
        partial(builders.build_on_v, builders.dualpipe_v_lane),
        "Forward and backward of two microbatches in one tick (DeepSeek's DualPipeV).",
        chunks=2,
    ),
    "pipedream": Builder(
        builders.build_alternating_1f1b,
        "Stages update after every backward, without a flush: stale weights (Narayanan 2019).",
        every=lambda stages: 1,
    ),
    "2bw": Builder(
        builders.build_alternating_1f1b,
        "Updates by groups of microbatches, one group late, without a flush (PipeDream-2BW, 2021).",
        every=lambda stages: max(stages, 2),
    ),
    "forward": Builder(_build_forward, "Forwards only, for an evaluation.", fixed_chunks=False),
}


@strict_fields
@dataclass(frozen=True)
class Schedule:
    """How the microbatches of a step go through the pipeline.

    "1f1b" runs a forward and a backward of each stage in one tick, and so keeps up to 2 S - 1
    microbatches; "1f1b-published" is the order of the papers, one task a tick, with at most S.

    With pipedream and 2bw stages update their layers during the step, and the rest of the model
    once at the end: `hfjax.optimizer_step.async_pipeline` says when, and from which gradients.

    Attributes:
        name: gpipe, 1f1b, 1f1b-published, interleaved, interleaved-published, looped-bfs, zb,
            zb-h1, zb-h2, zb-v, v, v-zb, dualpipe-v, pipedream, 2bw; forward (for evaluations only).
        microbatches: Into how many the examples of a step, or of each accumulation step, are split.
        chunks: Chunks of the model on each stage. None: the schedule's default.
        balance: even, parameters or flops; or the number of layers of each virtual stage, in the
            model's order.
        own: A table of your own, instead of one by name: see `from_text` and `from_csv`.
        every: For 2bw: microbatches per update. None: as many as stages, at least 2.
        branches: Whether a stage skips its layers in a slot in which it has no task, instead of
            computing something and dropping it. auto: if layers send nothing that stages might
            wait for, and in all tables that have different tasks in one slot (1f1b-published …).

    Example:
        >>> import hfjax
        >>> hfjax.Schedule("interleaved", microbatches=8).table(stages=4).virtual
        8
    """

    name: str = "1f1b"
    microbatches: int = 1
    chunks: int | None = None  # chunks of the model on each stage; None: the schedule's default
    balance: str | tuple[int, ...] = "even"  # layers of each virtual stage
    own: Table | None = None  # a table of the user's, instead of one by name
    every: int | None = None  # 2bw: microbatches per update; None: as many as stages
    branches: bool | str = "auto"  # whether idle slots skip their layers

    def __post_init__(self) -> None:
        _check_balance(self.balance)
        _check_every(self)
        if self.branches != "auto" and not isinstance(self.branches, bool):
            raise ValueError(f'branches={self.branches!r}: True, False or "auto".')
        if self.own is not None and not isinstance(self.own, Table):
            raise ValueError(f"own={self.own!r}: a Table is expected; text: Schedule.from_text(…).")
        if self.own is not None:
            check_table(self.own)
            for field in ("name", "microbatches", "chunks"):
                value, table_value = getattr(self, field), getattr(self.own, field)
                if value not in (getattr(Schedule, field), table_value):
                    raise ValueError(
                        f"{field}={value!r}, the table has {table_value!r}. Leave {field} away."
                    )
                object.__setattr__(self, field, table_value)
            return
        if not isinstance(self.name, str):
            raise ValueError(f"name={self.name!r}: one of {', '.join(SCHEDULES)}.")
        if self.name not in SCHEDULES:
            raise ValueError(
                f"no schedule {self.name!r}. Schedules: {', '.join(SCHEDULES)}; "
                "a table of your own: Schedule.from_text, Schedule.from_csv."
            )
        if not is_int(self.microbatches):
            raise ValueError(
                f"microbatches={self.microbatches!r}: a positive number of microbatches."
            )
        builder = SCHEDULES[self.name]
        if self.chunks is None:
            object.__setattr__(self, "chunks", builder.chunks)
        _check_chunks(self.name, builder, self.chunks)

    def __str__(self) -> str:
        """Return the grid of a table of your own; what a name means depends on the stages."""
        return repr(self) if self.own is None else str(self.own)

    def table(self, stages: int) -> Table:
        """Return the table that the pipeline runs; it prints as one line per stage.

        Args:
            stages: The size of the mesh's pipe axis.

        Raises:
            ValueError: A table of your own is for another number of stages.

        Example:
            >>> import hfjax
            >>> print(hfjax.Schedule("gpipe", microbatches=2).table(stages=2))
            0F0 0F1 .   .   0B0 0B1
            .   1F0 1F1 1B0 1B1 .
        """
        if not is_int(stages):
            raise ValueError(f"stages={stages!r}: a positive number of stages.")
        table = self.own or build_table(self.name, stages, self.microbatches, self.chunks or 1)
        if table.stages != stages:
            raise ValueError(
                f"{self.name} is a table for {table.stages} stages, the mesh has {stages}. "
                f"Use pipe={table.stages}, or write a table with {stages} lines."
            )
        return table if self.branches is not False else replace(table, branches=False)

    @property
    def asynchronous(self) -> bool:
        """Whether stages update their layers by themselves, while microbatches are in flight."""
        return self.own is None and SCHEDULES[self.name].every is not None

    def versions(self, stages: int) -> Versions | None:
        """Return which version of the weights each task uses; None: there is only one.

        Args:
            stages: The size of the mesh's pipe axis.

        Example:
            >>> import hfjax
            >>> versions = hfjax.Schedule("pipedream", microbatches=8).versions(stages=4)
            >>> versions.slots, versions.staleness
            (4, (3, 2, 1, 0))
        """
        table, builder = self.table(stages), SCHEDULES.get(self.name)
        if not self.asynchronous or builder is None or builder.every is None:
            return None
        default = min(builder.every(stages), self.microbatches)
        return weight_versions(table, self.every or default)

    @classmethod
    def from_text(
        cls,
        text: str,
        *,
        name: str = "own",
        balance: str | tuple[int, ...] = "even",
        branches: bool | str | None = None,
    ) -> "Schedule":
        """Return the schedule written as a line per stage (`hfjax.parallel.schedules.text`).

        Args:
            text: Cells separated by blanks or commas. A cell is tasks joined by `+`: virtual stage,
                kind (F, B, I or W), microbatch. `.` is idle.
            name: The name to show.
            balance: As in `Schedule`: even, parameters, flops, or layers of each virtual stage.
            branches: As in `Schedule`; None is auto.

        Example:
            >>> import hfjax
            >>> text = "0F0 0F1 0B0 0B1" + chr(10) + "1F0+1B0 1F1+1B1"
            >>> print(hfjax.Schedule.from_text(text))
            0F0 0F1     0B0     0B1
            .   1F0+1B0 1F1+1B1 .
        """
        setting = "auto" if branches is None else branches
        table_branches = setting if isinstance(setting, bool) else None
        return cls(own=parse_table(text, name, table_branches), balance=balance, branches=setting)

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        *,
        balance: str | tuple[int, ...] = "even",
        branches: bool | str | None = None,
    ) -> "Schedule":
        """Return the schedule of a CSV or text file, a line per stage; its name is the file's.

        Args:
            path: The file, in UTF-8; cells as in `from_text`.
            balance: As in `Schedule`.
            branches: As in `from_text`.

        Example:
            >>> import hfjax, pathlib, tempfile
            >>> folder = tempfile.TemporaryDirectory()
            >>> path = pathlib.Path(folder.name, "mine.csv")
            >>> _ = path.write_text("0F0,0B0" + chr(10) + "1F0+1B0")
            >>> hfjax.Schedule.from_csv(path).name
            'mine'
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8-sig")  # spreadsheets write a byte order mark
        except UnicodeDecodeError:
            raise ValueError(f"{path} is no text: a line of cells per stage is expected.") from None
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}.") from None
        return cls.from_text(text, name=path.stem, balance=balance, branches=branches)


@cache
def build_table(name: str, stages: int, microbatches: int, chunks: int) -> Table:
    """Return the table of a schedule by name; it is cached, hence read-only."""
    table = SCHEDULES[name].build(name, stages, microbatches, chunks)
    table.cells.flags.writeable = False
    return table


def _check_balance(balance: object) -> None:
    if balance in BALANCES or (
        isinstance(balance, tuple) and balance and all(map(is_int, balance))
    ):
        return
    raise ValueError(
        f"balance={balance!r}: one of {', '.join(BALANCES)}, or the number of layers of each "
        "virtual stage in model order, e.g. (3, 4, 4, 3)."
    )


def _check_every(schedule: Schedule) -> None:
    """2bw alone has groups of microbatches; of one microbatch each they would be pipedream's."""
    if schedule.every is None:
        return
    setting = f"every={schedule.every!r} of {schedule.name}"
    if schedule.own is not None or schedule.name != "2bw":
        raise ValueError(
            f"{setting}: only 2bw updates after a number of microbatches that you choose. Leave it "
            'away, or use Schedule("2bw", …).'
        )
    if not is_int(schedule.every) or schedule.every < 2:
        raise ValueError(
            f"{setting}: a number of microbatches, at least 2. To update after each of them: "
            'Schedule("pipedream", …).'
        )


def _check_chunks(name: str, builder: Builder, chunks: object) -> None:
    if not is_int(chunks):
        raise ValueError(f"chunks={chunks!r}: a positive number of chunks.")
    if builder.fixed_chunks and chunks != builder.chunks:
        others = ", ".join(other for other, b in SCHEDULES.items() if not b.fixed_chunks)
        raise ValueError(
            f"chunks={chunks}: {name} has {builder.chunks} on each stage. Leave chunks away, or "
            f"use a schedule that takes any number: {others}."
        )
