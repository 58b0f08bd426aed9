"""A schedule's table compiled for the executor: buffer slots, routes of messages, segments.

Every value that waits (a message, an activation, what B computes for W) is in a ring buffer from
the phase that writes it to the phase that reads it last. Two values share a slot if their lifetimes
do not overlap (interval colouring), so a buffer has no more slots than values alive at once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from hfjax.parallel.schedules.check_table import check_table
from hfjax.parallel.schedules.table import KINDS, Table, Task

BUFFERS = ("x", "dy", "stash", "w_residuals", "b_to_w")
LINK_NAMES = {0: "self", 1: "left", -1: "right"}
# The column that writes -> its buffer.
WRITES = {
    **{f"{buffer}_{source}": buffer for buffer in ("x", "dy") for source in LINK_NAMES.values()},
    "F_stash": "stash",
    "F_w_residuals": "w_residuals",
    "H_dy": "dy",
    "B_b_to_w": "b_to_w",
}
READS = ("F_x", "B_dy", "B_stash", "B_w_residuals", "W_w_residuals", "W_b_to_w")
# The phases of a tick are receive, F, head, B, W; the first word of a column is its phase.
PHASES = {"x": 0, "dy": 0, "F": 1, "H": 2, "B": 3, "W": 4}
Use = tuple[str, int]  # a column, and the tick in which it is used


@dataclass(frozen=True, eq=False)
class Ticks:
    """What the executor follows: `columns[name][tick, stage]` is a microbatch, chunk or slot.

    -1 means unused. But a phase that executes always writes: where it has no task (an idle stage of
    a table without branches), its column in `WRITES` names a free slot, or one extra slot.
    """

    table: Table
    columns: dict[str, np.ndarray]  # int32 [ticks, stages]
    depth: dict[str, int]  # slots of each ring buffer; 0: it is not used
    segments: tuple[tuple[int, int, str], ...]  # first tick, end, kinds in use
    # "F", "B" -> link (0: from itself, 1: from stage - 1, -1: from + 1) -> whether anything arrives
    arrivals: Mapping[str, Mapping[int, Any]]  # bool [ticks]

    @cached_property
    def links(self) -> dict[str, tuple[int, ...]]:
        """The links in use."""
        links_in_use = lambda arrivals: tuple(
            link for link, arrives in arrivals.items() if arrives.any()
        )
        return {kind: links_in_use(arrivals) for kind, arrivals in self.arrivals.items()}

    @cached_property
    def shares_permutes(self) -> bool:
        """Whether F and B share permutes: a stage makes one message a tick, on a link of both.

        Only with branches: without them idle slots would compute on messages of the other kind.
        """
        common_links = {*self.links["F"]} & {*self.links["B"]} - {0}
        busy = self.table.cells[:, :, :2] >= 0
        return bool(common_links) and self.table.branches and not busy.all(axis=2).any()

    def has_arrivals(self, kind: str, link: int, start: int, end: int) -> bool:
        """Whether a message from a task of these kinds arrives by a link in these ticks."""
        return any(self.arrivals[k][link][start:end].any() for k in kind)

    def route(self, kind: str, link: int) -> list[tuple[int, int]]:
        """Return (source, target) stages of a link: activations go up, their gradients down."""
        stage_map = [stage for stage, _ in self.table.stage_map]
        up = [(source, target) for source, target in pairwise(stage_map) if source != target]
        down = [(target, source) for source, target in up]
        is_on_link = lambda source, target: (target - source - link) % self.table.stages == 0
        return sorted(
            {pair for pair in up * ("F" in kind) + down * ("B" in kind) if is_on_link(*pair)}
        )

    @property
    def messages(self) -> list[tuple[str, int]]:
        """Kind and link of each message of a tick."""
        links = sorted({*self.links["F"], *self.links["B"]}, key=[*LINK_NAMES].index)
        separate = [(kind, link) for kind in "FB" for link in self.links[kind]]
        return [("FB", link) for link in links] if self.shares_permutes else separate


def compile_table(table: Table) -> Ticks:
    """Return the table with its slots, links and segments; raise ValueError if it is faulty.

    >>> from hfjax.parallel.schedules.named import Schedule
    >>> ticks = compile_table(Schedule("1f1b", microbatches=8).table(stages=4))
    >>> ticks.segments, ticks.depth["stash"]
    (((0, 3, 'F'), (3, 11, 'FB'), (11, 14, 'B')), 7)
    """
    values = list(_values(check_table(table)))
    columns, segments = _work_columns(table), find_segments(table)
    columns |= {name: np.full_like(columns["F_chunk"], -1) for name in (*WRITES, *READS)}
    values_by_buffer = {
        buffer: [value for value in values if value.buffer == buffer] for buffer in BUFFERS
    }
    depth = {buffer: _assign_slots(values_by_buffer[buffer], columns, table) for buffer in BUFFERS}
    arrives = lambda buffer, source: np.any(columns[f"{buffer}_{source}"] >= 0, axis=1)
    buffers = {"F": "x", "B": "dy"}.items()
    arrivals = {
        k: {hop: arrives(r, source) for hop, source in LINK_NAMES.items()} for k, r in buffers
    }
    for buffer in BUFFERS:
        _assign_idle_slots(
            buffer,
            values_by_buffer[buffer],
            columns,
            _phase_activity(table, columns, segments),
            depth,
        )
    return Ticks(table, columns, depth, segments, arrivals)


@dataclass(frozen=True)
class _Value:
    buffer: str
    stage: int
    written: Use
    read: tuple[Use, ...]

    @property
    def life(self) -> tuple[int, int]:
        """The first and the last moment, counted in phases from the start of the table."""
        return _moment(self.written), max(map(_moment, self.read))


def _moment(use: Use) -> int:
    column, tick = use
    return tick * 5 + PHASES[column.partition("_")[0]]


def _values(table: Table) -> Iterator[_Value]:
    """Yield every value that waits for a task."""
    times = table.times()
    for (kind, g, m), tick in times.items():
        stage = table.stage_map[g][0]
        if kind == "F" and g > 0:
            arrival = _arrival("x", table, g - 1, g, times[Task("F", g - 1, m)])
            yield _Value("x", stage, arrival, (("F_x", tick),))
        elif kind == "B":
            yield from _backward_values(table, times, Task(kind, g, m))
        elif kind == "W":
            forward_tick, backward_tick = times[Task("F", g, m)], times[Task("B", g, m)]
            yield _Value(
                "w_residuals",
                stage,
                ("F_w_residuals", forward_tick),
                (("B_w_residuals", backward_tick), ("W_w_residuals", tick)),
            )
            yield _Value("b_to_w", stage, ("B_b_to_w", backward_tick), (("W_b_to_w", tick),))


def _backward_values(table: Table, times: dict[Task, int], task: Task) -> Iterator[_Value]:
    _, g, m = task
    stage, forward_tick, tick = table.stage_map[g][0], times[Task("F", g, m)], times[task]
    yield _Value("stash", stage, ("F_stash", forward_tick), (("B_stash", tick),))
    if g == table.virtual - 1:
        yield _Value("dy", stage, ("H_dy", forward_tick), (("B_dy", tick),))
    else:
        arrival = _arrival("dy", table, g + 1, g, times[Task("B", g + 1, m)])
        yield _Value("dy", stage, arrival, (("B_dy", tick),))


def _arrival(buffer: str, table: Table, source: int, target: int, tick: int) -> Use:
    """Return the column of the link by which a message comes, one tick after it was made."""
    return f"{buffer}_{LINK_NAMES[link_between(table, source, target)]}", tick + 1


def link_between(table: Table, source: int, target: int) -> int:
    """Return the link from one virtual stage to another."""
    source_stage, target_stage = table.stage_map[source][0], table.stage_map[target][0]
    if source_stage == target_stage:
        return 0
    if table.stages == 2:  # left and right are the same stage: one link for each direction
        return target - source
    return 1 if (target_stage - source_stage) % table.stages == 1 else -1


def _work_columns(table: Table) -> dict[str, np.ndarray]:
    """Return the columns that say which microbatch and which chunk each slot works on."""
    chunk_of = np.array([chunk for _, chunk in table.stage_map], np.int32)
    columns = {}
    for slot, kind in enumerate(KINDS):
        cells = table.cells[:, :, slot]
        idle = cells < 0
        columns[f"{kind}_microbatch"] = np.where(idle, -1, cells // table.virtual)
        columns[f"{kind}_chunk"] = np.where(idle, -1, chunk_of[cells % table.virtual])
    return {name: column.astype(np.int32) for name, column in columns.items()}


def find_segments(table: Table) -> tuple[tuple[int, int, str], ...]:
    """Return the runs of ticks that use the same kinds; with branches one run has all ticks."""
    used_by_tick = np.any(table.cells >= 0, axis=1)
    if table.branches:
        used_by_tick = np.broadcast_to(used_by_tick.any(axis=0), used_by_tick.shape)
    kinds = [
        "".join(k for k, is_used in zip(KINDS, used_kinds, strict=True) if is_used)
        for used_kinds in used_by_tick
    ]
    runs, tick = [], 0
    for run, same in groupby(kinds):
        first, tick = tick, tick + len(list(same))
        runs.append((first, tick, run))
    return tuple(runs)


def _assign_slots(values: list[_Value], columns: dict[str, np.ndarray], table: Table) -> int:
    """Give each value the first slot free when it is written; return the number of slots."""
    ends: list[list[int]] = [[] for _ in range(table.stages)]
    for value in sorted(values, key=lambda value: value.life):
        born, dies = value.life
        mine = ends[value.stage]
        slot = next((i for i, end in enumerate(mine) if end < born), len(mine))
        mine[slot : slot + 1] = [dies]
        for column, tick in (value.written, *value.read):
            columns[column][tick, value.stage] = slot
    return max(map(len, ends))


def _assign_idle_slots(
    buffer: str,
    values: list[_Value],
    columns: dict[str, np.ndarray],
    runs: dict[str, np.ndarray],
    depth: dict[str, int],
) -> None:
    """Let idle stages write to a free slot, else to one extra slot."""
    ticks, stages = columns["F_chunk"].shape
    busy = np.zeros((ticks * 5, stages, depth[buffer] + 1), bool)
    for value in values:
        born, dies = value.life
        busy[
            born : dies + 1, value.stage, columns[value.written[0]][value.written[1], value.stage]
        ] = True
    for name in (name for name, into in WRITES.items() if into == buffer):
        column = columns[name]
        if (column < 0).all():
            continue
        phase = name.partition("_")[0]
        free = (~busy[PHASES[phase] :: 5]).argmax(axis=2)
        idle = (column < 0) & runs[phase]
        column[idle] = free[idle]
        depth[buffer] = max(depth[buffer], int(column.max()) + 1)


def _phase_activity(
    table: Table, columns: dict[str, np.ndarray], segments: tuple[tuple[int, int, str], ...]
) -> dict[str, np.ndarray]:
    """Return in which ticks each stage runs each phase: it receives messages in all of them."""
    runs = {}
    for kind in KINDS:
        active = [np.full((end - first, 1), kind in kinds) for first, end, kinds in segments]
        runs[kind] = (
            columns[f"{kind}_microbatch"] >= 0 if table.branches else np.concatenate(active)
        )
    always = np.full((table.ticks, 1), True)
    return runs | {"H": runs["F"], "x": always, "dy": always}
