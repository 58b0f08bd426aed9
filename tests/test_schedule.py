"""Laws of schedules: every task once, in order, and nothing read that is not what it should be."""

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest

from hfjax.parallel.schedules.builders import v_stage_map
from hfjax.parallel.schedules.check_table import check_table
from hfjax.parallel.schedules.compile import WRITES, compile_table
from hfjax.parallel.schedules.lay_out import lay_out
from hfjax.parallel.schedules.named import SCHEDULES, Schedule, build_table, forward_table
from hfjax.parallel.schedules.table import Table, Task, dependencies
from tests.replay import Replay

MICROBATCHES = (1, 2, 3, 4, 5, 7, 8, 12, 13, 16)
ALL_SIZES = tuple(product(range(1, 9), MICROBATCHES))  # fewer, as many and more than stages
DAILY = tuple(product((1, 2, 3, 4), (1, 2, 3, 4, 5, 8)))
SIZES = [
    pytest.param(DAILY, id="up to 4 stages"),
    pytest.param(ALL_SIZES, id="up to 8 stages", marks=pytest.mark.slow),
]
# A new schedule is a row of SCHEDULES, and is here with the chunks that it can have.
KINDS_OF_TABLES = [
    (name, chunks)
    for name, builder in SCHEDULES.items()
    for chunks in ((builder.chunks,) if builder.fixed_chunks else (1, 2, 3))
]


@cache
def tables(name: str, chunks: int, sizes: tuple[tuple[int, int], ...]) -> list[Table]:
    """Return the tables of a schedule for sizes: (stages, microbatches)."""
    return [build_table(name, s, m, chunks) for s, m in sizes]


def every_task(kinds: str, virtual: int, microbatches: int) -> list[Task]:
    return [Task(k, g, m) for k in kinds for g in range(virtual) for m in range(microbatches)]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("name", "chunks"), KINDS_OF_TABLES)
def test_a_schedule_runs_every_task_once_at_home_and_in_order(name, chunks, sizes):
    for table in tables(name, chunks, sizes):
        assert check_table(table) is table
        assert table.name == name
        times = table.times()
        kinds = "F" + "B" * (name != "forward") + "W" * table.splits_backward
        assert sorted(times) == sorted(every_task(kinds, table.virtual, table.microbatches))
        for task, tick in times.items():
            assert all(
                times[need] + wait <= tick for need, wait in dependencies(task, table.virtual)
            )
        for task, _, stage in table.tasks():
            assert table.stage_map[task.virtual][0] == stage


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(("name", "chunks"), KINDS_OF_TABLES)
def test_a_replay_of_the_compiled_ticks_reads_what_was_written_for_it(name, chunks, sizes):
    """And what is compiled, segment by segment, does not grow with stages or microbatches."""
    for table in tables(name, chunks, sizes):
        ticks = compile_table(table)
        assert len(ticks.segments) <= (6 if table.splits_backward and not table.branches else 3)
        ran = Replay(ticks).run()
        assert set(ran.values()) == {1}
        kinds = 1 + table.trains + table.splits_backward
        assert len(ran) == kinds * table.virtual * table.microbatches


@pytest.mark.parametrize(
    "column",
    [
        "F_x",
        "F_stash",
        "F_w_residuals",
        "H_dy",
        "B_dy",
        "B_stash",
        "B_b_to_w",
        "W_w_residuals",
        "x_left",
    ],
)
def test_the_replay_finds_a_wrong_slot(column):
    """The test of the test: any one slot that a task uses, moved, is found."""
    ticks = compile_table(build_table("zb-h1", 3, 6, 1))
    task_of = {"x": "F", "H": "F"}.get(column[0], column[0])
    works = ticks.columns[f"{task_of}_microbatch"] >= 0
    if column == "x_left":
        works = np.roll(works, (1, 1), axis=(0, 1)) & (np.arange(3) > 0)  # sent a tick ago
    for tick, stage in np.argwhere(works & (ticks.columns[column] >= 0)):
        if (column == "F_x" and stage == 0) or (column == "H_dy" and stage < 2):
            continue
        slots = ticks.columns[column].copy()
        slots[tick, stage] = (slots[tick, stage] + 1) % max(2, ticks.depth[WRITES.get(column, "x")])
        wrong = replace(ticks, columns={**ticks.columns, column: slots})
        with pytest.raises((AssertionError, IndexError)):
            Replay(wrong).run()


def test_a_ring_has_as_many_slots_as_values_live_at_once_and_one_for_junk_if_need_be():
    for stages, microbatches in product(range(1, 9), MICROBATCHES):
        depth = compile_table(build_table("1f1b", stages, microbatches, 1)).depth
        kept = min(microbatches, 2 * stages - 1)
        assert depth["stash"] in (kept, kept + 1)
        assert depth["x"] == (stages > 1)
    one = compile_table(build_table("1f1b", 1, 8, 1))
    assert one.depth == {"x": 0, "dy": 1, "stash": 1, "w_residuals": 0, "b_to_w": 0}
    assert one.links == {"F": (), "B": ()}


def test_writes_never_lack_a_slot_and_links_are_those_in_use():
    for name, chunks in KINDS_OF_TABLES:
        ticks = compile_table(build_table(name, 4, 6, chunks))
        homes, branches = [stage for stage, _ in ticks.table.stage_map], ticks.table.branches
        steps = {(b - a + 1) % 4 - 1 for a, b in pairwise(homes)}  # after the last comes the first
        assert set(ticks.links["F"]) == steps
        assert set(ticks.links["B"]) == ({-step for step in steps} if ticks.table.trains else set())
        for first, end, kinds in ticks.segments:
            assert kinds
            for column in ("F_stash", "H_dy") if "F" in kinds and ticks.table.trains else ():
                runs = ticks.columns["F_microbatch"][first:end] >= 0
                assert (ticks.columns[column][first:end] >= 0)[runs | (not branches)].all()
    two = compile_table(build_table("v", 2, 6, 2))
    assert two.links == {"F": (0, 1), "B": (0, -1)}  # left and right are the same stage


def test_forward_and_backward_share_permutes_where_a_stage_makes_one_message_a_tick():
    """zb-v on 4 stages: two permutes in a tick, not four. dualpipe-v makes two messages in one."""
    shared = {
        name for name, chunks in KINDS_OF_TABLES if compiled_on_four(name, chunks).shares_permutes
    }
    assert shared == {"zb-v"}
    assert sum(link != 0 for _, link in compiled_on_four("zb-v", 2).messages) == 2
    assert sum(link != 0 for _, link in compiled_on_four("dualpipe-v", 2).messages) == 4
    never = replace(build_table("zb-v", 4, 8, 2), branches=False)
    assert not compile_table(never).shares_permutes


def compiled_on_four(name, chunks):
    return compile_table(build_table(name, 4, 8, chunks))


def test_segments_cover_the_ticks_with_the_kinds_that_they_use():
    table = build_table("zb", 4, 16, 1)
    segments = compile_table(table).segments
    assert segments == ((0, 3, "F"), (3, 6, "FB"), (6, 19, "FBW"), (19, 22, "BW"))
    assert compile_table(build_table("zb-h1", 4, 16, 1)).segments == ((0, 51, "FBW"),)


@pytest.mark.parametrize(
    "homes", [v_stage_map(4), ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1))]
)
def test_an_evaluation_runs_on_any_placement(homes):
    for microbatches in MICROBATCHES:
        ticks = compile_table(forward_table(homes, microbatches))
        assert len(Replay(ticks).run()) == len(homes) * microbatches
        assert ticks.depth["x"] <= len(homes) + 1
        assert set(ticks.depth.values()) <= {0, ticks.depth["x"]}


def own_table(seed: int) -> Table:
    """Return a table of random order: on a random placement, split or not, branches or not."""
    draw = random.Random(seed)
    stages, microbatches, split = draw.randint(1, 5), draw.randint(1, 6), draw.random() < 0.5
    ring = [s for turn in range(draw.randint(1, 3)) for s in range(stages)[:: draw.choice((1, -1))]]
    homes = tuple((s, ring[:g].count(s)) for g, s in enumerate(ring))
    kinds = "FBW" if split else "FB"
    left = every_task(kinds, len(homes), microbatches)
    lines, done = [[] for _ in range(stages)], set()
    while left:
        ready = [t for t in left if all(need in done for need, _ in dependencies(t, len(homes)))]
        task = draw.choice(ready)
        left.remove(task)
        done.add(task)
        lines[homes[task.virtual][0]].append((task,))
    return lay_out("own", homes, [[line] for line in lines], branches=draw.random() < 0.5)


@pytest.mark.parametrize("seed", range(150))
@pytest.mark.short(*map(str, range(20)))
def test_any_order_of_any_user_compiles_and_replays(seed):
    table = check_table(own_table(seed))
    assert set(Replay(compile_table(table)).run().values()) == {1}
    again = Schedule.from_text(str(table), branches=table.branches).table(table.stages)
    assert (again.stage_map, again.branches) == (table.stage_map, table.branches)
    np.testing.assert_array_equal(again.cells, table.cells)


def test_a_table_is_built_once_and_nobody_can_change_it():
    table = Schedule("zb-v", 8).table(4)
    assert Schedule("zb-v", 8).table(4) is table
    with pytest.raises(ValueError, match="read-only"):
        table.cells[0] = -1
