"""A schedule as text: it prints, reads back; what cannot run is refused with its cell marked."""

from typing import Any

import numpy as np
import pytest

from hfjax.parallel.notation import parse_table
from hfjax.parallel.schedule import Table, check
from hfjax.parallel.schedules import SCHEDULES, Schedule, forward_table
from hfjax.parallel.vees import vee

ONE_F_ONE_B = """
    0F0 0F1 .       0B0     0B1
    .   1F0 1F1+1B0 1B1     .
"""


def test_the_grid_of_1f1b_is_the_one_of_the_paper():
    assert str(SCHEDULES["1f1b-half"](3, 4, 1)).splitlines() == [
        "0F0 0F1 0F2 .   .   0B0 0F3 0B1 .   0B2 .   0B3",
        ".   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 .   1B3 .",
        ".   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 .   .",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_prints_and_reads_back(name):
    for stages, microbatches in ((1, 3), (2, 2), (3, 7), (4, 8)):
        table = SCHEDULES[name](stages, microbatches, SCHEDULES[name].chunks)
        again = parse_table(str(table), name, table.branches)
        assert (again.homes, again.name) == (table.homes, name)
        np.testing.assert_array_equal(again.cells, table.cells)


def test_a_whole_backward_of_a_split_table_is_both_parts_in_one_cell():
    table = parse_table("0F0 0B0 0F1 0I1 0W1")
    assert table.split
    assert str(table) == "0F0 0B0 0F1 0I1 0W1"
    assert table.cells[1, 0].tolist() == [-1, 0, 0]
    assert str(parse_table("0F0 0I0+0W0 0F1 0I1 0W1")) == "0F0 0B0 0F1 0I1 0W1"


def test_cells_that_can_run_as_they_stand_are_ticks_and_else_only_the_order_counts():
    with_a_rest = "0F0 . . 0B0 \n . 1F0 1B0 ."
    assert str(parse_table(with_a_rest)).splitlines() == ["0F0 .   .   0B0", ".   1F0 1B0 ."]
    order = "0F0 0F1 0B0 0B1 \n 1F0+1B0 1F1+1B1"
    assert str(parse_table(order)).splitlines() == [
        "0F0 0F1     0B0     0B1",
        ".   1F0+1B0 1F1+1B1 .",
    ]


def test_a_csv_has_a_row_per_stage_with_nothing_where_it_is_idle(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("# from a spreadsheet\n0F0,0F1,,0B0,0B1\n,1F0, 1F1+1B0 ,1B1,\n")
    schedule = Schedule.from_csv(path)
    assert (schedule.name, schedule.microbatches, schedule.chunks) == ("mine", 2, 1)
    np.testing.assert_array_equal(schedule.table(2).cells, parse_table(ONE_F_ONE_B).cells)


def test_a_placement_is_read_from_the_lines():
    assert parse_table(str(SCHEDULES["zb-v"](3, 5, 2))).homes == vee(3)
    assert parse_table("0F0 1F0 1B0 0B0").homes == ((0, 0), (0, 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_text_runs_with_branches_only_if_they_save_time(name):
    """Which is what the schedules by name do."""
    table = SCHEDULES[name](3, 8, SCHEDULES[name].chunks)
    assert parse_table(str(table)).branches == table.branches
    assert parse_table(str(table), branches=True).branches
    assert not Schedule.from_text(str(table), branches=False).table(3).branches


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no task found. Write a line per stage"),
        ("0F0 0X0", "line 1, cell 2: >0X0< is no cell. Write tasks .* or . for idle"),
        ("0F0 0B0\n1F0 -1B0", "line 2, cell 2: >-1B0< is no cell"),
        ("0F0+0F1 0B0 0B1", "line 1, cell 1: >0F0.0F1< has two tasks for the F slot"),
        ("0F0 0B0\n0F1 0B1", "virtual stage 0 is on stage 0 and 1. .*all tasks of one on the same"),
        ("0F0 0B0\n2F0 2B0", "virtual stage 1 is on stage none. .*numbered 0 to 2"),
        ("0F0 1F0 1B0 0B0\n2F0 2B0", "3 virtual stages on 2 stages .*found 2 on stage 0"),
        (
            "0F0\n2F0\n1F0\n3F0",
            "virtual stage 0 is on stage 0, the next one on stage 2: .*Put 1 on",
        ),
        ("0F0 0B0\n1F0", r"1B0 is missing. Add it to stage 1, after 1F0 \(marked\)(.|\n)*>1F0<"),
        ("0F0 0I0", ">0I0< is without 0W0. Add that, or write 0B0 for the whole backward"),
        ("0F0 0W0", ">0W0< is without 0I0"),
        ("0F0 0F1 0B1\n1F1+1B1", "1F0 is missing. Add it to stage 1, after 0F0"),
        ("0F1 0B1", "0F0 is missing. Add it to stage 0"),
        ("0F0 0B0 0F0\n1F0 1B0", r"0F0 is here a second time, first in tick 0(.|\n)*>0F0<"),
        ("0B0 0F0\n1F0 1B0", "deadlock in tick 0, .*(.|\n)*stage 0  >0B0<  waits for 0F0 and 1B0"),
        ("0F0 0F1 0B0 0B1\n1F1+1B1 1F0+1B0", None),
        (
            "0F0 0B0 0F1 0B1\n1F1+1B1 1F0+1B0",
            "deadlock in tick 1(.|\n)*>0B0<  waits for 1B0(.|\n)*>1F1",
        ),
    ],
)
def test_a_text_that_cannot_run_is_refused(text, message):
    if message is None:
        assert check(parse_table(text))
        return
    with pytest.raises(ValueError, match=message):
        parse_table(text, "mine")


def moved(table: Table, task: tuple[int, int, int], tick: int) -> Table:
    """Return the table with one task, given as (stage, slot, value), in another tick."""
    stage, slot, value = task
    cells = table.cells.copy()
    cells[cells[:, stage, slot] == value, stage, slot] = -1
    cells[tick, stage, slot] = value
    return Table(table.name, table.stages, table.microbatches, table.chunks, table.homes, cells)


def test_a_faulty_cell_is_marked_in_the_grid_around_it():
    table = SCHEDULES["1f1b-half"](3, 2, 1)
    wrong = moved(table, (1, 1, 1), 3)
    with pytest.raises(ValueError, match="1B0 in tick 3 needs 2B0, which runs in tick 3") as caught:
        check(wrong)
    assert str(caught.value).splitlines() == [
        "1f1b-half: 1B0 in tick 3 needs 2B0, which runs in tick 3. Move it to tick 4 or later.",
        "            0    1    2     3     4    5    6",
        "  stage 0  0F0  0F1   .     .     .   0B0   .",
        "  stage 1   .   1F0  1F1  >1B0<   .    .   1B1",
        "  stage 2   .    .   2F0   2B0   2F1  2B1   .",
    ]


def test_tables_made_by_hand_are_checked():
    table = SCHEDULES["1f1b"](2, 2, 1)
    edit: Any
    for edit, message in (
        (lambda cells: cells[:, ::-1], "0F0 is on stage 1, virtual stage 0 on 0. Move it"),
        (lambda cells: np.concatenate([cells, cells[:1] * 0 - 1]), "nobody works in tick 4"),
        (lambda cells: np.where(cells == 3, 5, cells), "1F2 is of microbatch 2, of 2. Remove it"),
        (lambda cells: cells[:-1], "0B1 is missing"),
    ):
        cells = edit(table.cells)
        with pytest.raises(ValueError, match=message):
            check(Table("mine", 2, 2, 1, table.homes, cells))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": "1b1f"}, "no schedule '1b1f'. Schedules: gpipe, 1f1b, .*Schedule.from_text"),
        ({"microbatches": 0}, "microbatches=0: a positive number of microbatches"),
        ({"microbatches": True}, "microbatches=True: a positive"),
        ({"chunks": 2}, "chunks=2: 1f1b has 1 on each stage. .*any number: interleaved, "),
        ({"name": "zb-v", "chunks": 1}, "chunks=1: zb-v has 2 on each stage"),
        ({"name": "interleaved", "chunks": 0}, "chunks=0: a positive number of chunks"),
        ({"balance": "best"}, "balance='best': one of even, parameters, flops, or the number of"),
        ({"balance": (3, 0)}, r"balance=\(3, 0\): one of even"),
        ({"own": parse_table("0F0 0B0"), "microbatches": 4}, "microbatches=4, the table has 1"),
        ({"own": parse_table("0F0 0B0"), "name": "zb"}, "name='zb', the table has 'own'"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**given)


def test_a_table_is_for_its_own_number_of_stages():
    schedule = Schedule.from_text(ONE_F_ONE_B)
    assert schedule.table(2).stages == 2
    with pytest.raises(
        ValueError, match=r"own is a table for 2 stages, the mesh has 4. Use pipe=2"
    ):
        schedule.table(4)
    with pytest.raises(ValueError, match="stages=0: a positive number of stages"):
        Schedule("gpipe").table(0)


def test_schedules_are_hashable_and_fill_in_their_chunks():
    assert hash(Schedule("zb", 4)) == hash(Schedule("zb", 4))
    assert Schedule("zb", 4) == Schedule("zb", 4, chunks=1)
    assert (Schedule("v").chunks, Schedule("interleaved").chunks) == (2, 2)
    own = Schedule.from_text(ONE_F_ONE_B)
    assert {own: 1}[own] == 1


def test_an_evaluation_on_a_placement_that_leaps_is_refused():
    with pytest.raises(ValueError, match="forward: virtual stage 0 is on stage 0, the next one on"):
        forward_table(((0, 0), (2, 0), (1, 0), (3, 0)), 4)
