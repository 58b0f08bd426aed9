"""A schedule's table compiled for the executor: ring slots, routes of messages, segments.

Every value that waits (a message, an activation, what crosses from B to W) lies in a ring from the
phase that writes it to the phase that reads it last. Two values share a slot if their lives do not
meet (interval colouring), so a ring has no more slots than values that live at once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from hfjax.parallel.schedules.table import KINDS, Table, Task, check

RINGS = ("x", "dy", "stash", "late", "cross")
SIDES = {0: "self", 1: "left", -1: "right"}
# The column that writes -> its ring.
WRITES = {
    **{f"{ring}_{side}": ring for ring in ("x", "dy") for side in SIDES.values()},
    "F_stash": "stash",
    "F_late": "late",
    "H_dy": "dy",
    "B_cross": "cross",
}
READS = ("F_x", "B_dy", "B_stash", "B_late", "W_late", "W_cross")
# The phases of a tick are receive, F, head, B, W; the first word of a column is its phase.
PHASES = {"x": 0, "dy": 0, "F": 1, "H": 2, "B": 3, "W": 4}
Use = tuple[str, int]  # a column, and the tick in which it is used


@dataclass(frozen=True, eq=False)
class Ticks:
    """What an executor follows: `columns[name][tick, stage]` is a microbatch, chunk or ring slot.

    -1 means unused. But a phase that executes always writes: where it has no task (an idle stage of
    a table without branches), its column in `WRITES` names a free slot, or one extra slot.
    """

    table: Table
    columns: dict[str, np.ndarray]  # int32 [ticks, stages]
    depth: dict[str, int]  # slots of each ring; 0: the ring is not used
    segments: tuple[tuple[int, int, str], ...]  # first tick, end, kinds in use
    # "F", "B" -> link (0 from itself, 1 from stage - 1, -1 from + 1) -> whether anything arrives
    arrivals: Mapping[str, Mapping[int, Any]]  # bool [ticks]

    @cached_property
    def links(self) -> dict[str, tuple[int, ...]]:
        """The links in use."""
        used = lambda found: tuple(link for link, there in found.items() if there.any())
        return {kind: used(found) for kind, found in self.arrivals.items()}

    @cached_property
    def shared(self) -> bool:
        """Whether F and B share permutes: a stage makes one message a tick, on a link of both.

        Only with branches: without them idle slots would compute on messages of the other kind.
        """
        both = {*self.links["F"]} & {*self.links["B"]} - {0}
        busy = self.table.cells[:, :, :2] >= 0
        return bool(both) and self.table.branches and not busy.all(axis=2).any()

    def arriving(self, kind: str, link: int, start: int, end: int) -> bool:
        """Whether anything that a task of these kinds made arrives by a link in these ticks."""
        return any(self.arrivals[k][link][start:end].any() for k in kind)

    def route(self, kind: str, link: int) -> list[tuple[int, int]]:
        """Return which stage sends to which on a link: activations up, their gradients down."""
        homes = [stage for stage, _ in self.table.homes]
        up = [(here, there) for here, there in pairwise(homes) if here != there]
        down = [(there, here) for here, there in up]
        on = lambda here, there: (there - here - link) % self.table.stages == 0
        return sorted({pair for pair in up * ("F" in kind) + down * ("B" in kind) if on(*pair)})

    @property
    def lines(self) -> list[tuple[str, int]]:
        """Kind and link of each message of a tick."""
        links = sorted({*self.links["F"], *self.links["B"]}, key=[*SIDES].index)
        apart = [(kind, link) for kind in "FB" for link in self.links[kind]]
        return [("FB", link) for link in links] if self.shared else apart


def compile_table(table: Table) -> Ticks:
    """Return the table with its slots, links and segments; a faulty table is refused.

    >>> from hfjax.parallel.schedules import Schedule
    >>> ticks = compile_table(Schedule("1f1b", microbatches=8).table(stages=4))
    >>> ticks.segments, ticks.depth["stash"]
    (((0, 3, 'F'), (3, 11, 'FB'), (11, 14, 'B')), 7)
    """
    values = list(_values(check(table)))
    columns, segments = _work(table), segments_of(table)
    columns |= {name: np.full_like(columns["F_chunk"], -1) for name in (*WRITES, *READS)}
    lives = {ring: [value for value in values if value.ring == ring] for ring in RINGS}
    depth = {ring: _place(lives[ring], columns, table) for ring in RINGS}
    comes = lambda ring, side: np.any(columns[f"{ring}_{side}"] >= 0, axis=1)
    rings = {"F": "x", "B": "dy"}.items()
    arrivals = {k: {hop: comes(r, side) for hop, side in SIDES.items()} for k, r in rings}
    for ring in RINGS:
        _fill(ring, lives[ring], columns, _runs(table, columns, segments), depth)
    return Ticks(table, columns, depth, segments, arrivals)


@dataclass(frozen=True)
class _Value:
    ring: str
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
        stage = table.homes[g][0]
        if kind == "F" and g > 0:
            sent = _arrival("x", table, g - 1, g, times[Task("F", g - 1, m)])
            yield _Value("x", stage, sent, (("F_x", tick),))
        elif kind == "B":
            yield from _values_of_backward(table, times, Task(kind, g, m))
        elif kind == "W":
            made, used = times[Task("F", g, m)], times[Task("B", g, m)]
            yield _Value("late", stage, ("F_late", made), (("B_late", used), ("W_late", tick)))
            yield _Value("cross", stage, ("B_cross", used), (("W_cross", tick),))


def _values_of_backward(table: Table, times: dict[Task, int], task: Task) -> Iterator[_Value]:
    _, g, m = task
    stage, made, tick = table.homes[g][0], times[Task("F", g, m)], times[task]
    yield _Value("stash", stage, ("F_stash", made), (("B_stash", tick),))
    if g == table.virtual - 1:
        yield _Value("dy", stage, ("H_dy", made), (("B_dy", tick),))
    else:
        sent = _arrival("dy", table, g + 1, g, times[Task("B", g + 1, m)])
        yield _Value("dy", stage, sent, (("B_dy", tick),))


def _arrival(ring: str, table: Table, source: int, target: int, tick: int) -> Use:
    """Return the column of the link by which a message comes, one tick after it was made."""
    return f"{ring}_{SIDES[hop_of(table, source, target)]}", tick + 1


def hop_of(table: Table, source: int, target: int) -> int:
    """Return the link from one virtual stage to another."""
    here, there = table.homes[source][0], table.homes[target][0]
    if here == there:
        return 0
    if table.stages == 2:  # left and right are the same stage: one link for each direction
        return target - source
    return 1 if (there - here) % table.stages == 1 else -1


def _work(table: Table) -> dict[str, np.ndarray]:
    """Return the columns that say which microbatch and which chunk each slot works on."""
    chunk_of = np.array([chunk for _, chunk in table.homes], np.int32)
    columns = {}
    for slot, kind in enumerate(KINDS):
        cells = table.cells[:, :, slot]
        idle = cells < 0
        columns[f"{kind}_microbatch"] = np.where(idle, -1, cells // table.virtual)
        columns[f"{kind}_chunk"] = np.where(idle, -1, chunk_of[cells % table.virtual])
    return {name: column.astype(np.int32) for name, column in columns.items()}


def segments_of(table: Table) -> tuple[tuple[int, int, str], ...]:
    """Return the runs of ticks that use the same kinds; with branches one run holds all."""
    used = np.any(table.cells >= 0, axis=1)
    if table.branches:
        used = np.broadcast_to(used.any(axis=0), used.shape)
    kinds = ["".join(k for k, on in zip(KINDS, row, strict=True) if on) for row in used]
    runs, tick = [], 0
    for run, same in groupby(kinds):
        first, tick = tick, tick + len(list(same))
        runs.append((first, tick, run))
    return tuple(runs)


def _place(values: list[_Value], columns: dict[str, np.ndarray], table: Table) -> int:
    """Give each value the first slot free at its birth, in all its columns; return the slots."""
    ends: list[list[int]] = [[] for _ in range(table.stages)]
    for value in sorted(values, key=lambda value: value.life):
        born, dies = value.life
        mine = ends[value.stage]
        slot = next((i for i, end in enumerate(mine) if end < born), len(mine))
        mine[slot : slot + 1] = [dies]
        for column, tick in (value.written, *value.read):
            columns[column][tick, value.stage] = slot
    return max(map(len, ends))


def _fill(
    ring: str,
    values: list[_Value],
    columns: dict[str, np.ndarray],
    runs: dict[str, np.ndarray],
    depth: dict[str, int],
) -> None:
    """Let idle stages write where nothing lives, else into one slot more."""
    ticks, stages = columns["F_chunk"].shape
    busy = np.zeros((ticks * 5, stages, depth[ring] + 1), bool)
    for value in values:
        born, dies = value.life
        busy[
            born : dies + 1, value.stage, columns[value.written[0]][value.written[1], value.stage]
        ] = True
    for name in (name for name, into in WRITES.items() if into == ring):
        column = columns[name]
        if (column < 0).all():
            continue
        phase = name.partition("_")[0]
        free = (~busy[PHASES[phase] :: 5]).argmax(axis=2)
        idle = (column < 0) & runs[phase]
        column[idle] = free[idle]
        depth[ring] = max(depth[ring], int(column.max()) + 1)


def _runs(
    table: Table, columns: dict[str, np.ndarray], segments: tuple[tuple[int, int, str], ...]
) -> dict[str, np.ndarray]:
    """Return in which ticks each stage runs each phase: messages arrive in all of them."""
    runs = {}
    for kind in KINDS:
        used = [np.full((end - first, 1), kind in kinds) for first, end, kinds in segments]
        runs[kind] = columns[f"{kind}_microbatch"] >= 0 if table.branches else np.concatenate(used)
    always = np.full((table.ticks, 1), True)
    return runs | {"H": runs["F"], "x": always, "dy": always}
