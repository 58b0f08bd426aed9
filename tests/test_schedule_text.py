"""A schedule as text: it prints, reads back; what cannot run is refused with its cell marked."""

import re
from typing import Any

import numpy as np
import pytest

from hfjax.parallel.schedules.builders import v_stage_map
from hfjax.parallel.schedules.check_table import check_table
from hfjax.parallel.schedules.named import SCHEDULES, Schedule, build_table, forward_table
from hfjax.parallel.schedules.table import Table
from hfjax.parallel.schedules.text import parse_table

ONE_F_ONE_B = """
    0F0 0F1 .       0B0     0B1
    .   1F0 1F1+1B0 1B1     .
"""


def test_the_grid_of_1f1b_is_the_one_of_the_paper():
    assert str(build_table("1f1b-published", 3, 4, 1)).splitlines() == [
        "0F0 0F1 0F2 .   .   0B0 0F3 0B1 .   0B2 .   0B3",
        ".   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 .   1B3 .",
        ".   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 .   .",
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_prints_and_reads_back(name):
    for stages, microbatches in ((1, 3), (2, 2), (3, 7), (4, 8)):
        table = build_table(name, stages, microbatches, SCHEDULES[name].chunks)
        again = parse_table(str(table), name, table.branches)
        assert (again.stage_map, again.name) == (table.stage_map, name)
        np.testing.assert_array_equal(again.cells, table.cells)


def test_a_whole_backward_of_a_split_table_is_both_parts_in_one_cell():
    table = parse_table("0F0 0B0 0F1 0I1 0W1")
    assert table.splits_backward
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
    assert parse_table(str(build_table("zb-v", 3, 5, 2))).stage_map == v_stage_map(3)
    assert parse_table("0F0 1F0 1B0 0B0").stage_map == ((0, 0), (0, 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_text_runs_with_branches_only_if_they_save_time(name):
    """Which is what the schedules by name do."""
    table = build_table(name, 3, 8, SCHEDULES[name].chunks)
    assert parse_table(str(table)).branches == table.branches
    assert parse_table(str(table), branches=True).branches
    assert not Schedule.from_text(str(table), branches=False).table(3).branches


NO_CELL = r"is no cell. Write tasks .* or . for idle\.\n"
WHOLE, HALVES = (str(build_table(name, 3, 4, 1)) for name in ("1f1b-published", "zb-h1"))


def changed(text: str, *words: str) -> str:
    """Return a text in which the first of two words, or of each two, is the second."""
    for old, new in zip(words[::2], words[1::2], strict=True):
        assert old in text
        text = text.replace(old, new, 1)
    return text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no task found. Write a line per stage"),
        (". . \n .", "no task found"),
        ("0F0 0X0", rf">0X0< {NO_CELL}  stage 0  0F0  >0X0<$"),
        ("0F0 0B0\n1F0 -1B0", rf">-1B0< {NO_CELL}(.*\n)+  stage 1  1F0  >-1B0<$"),
        ("0F0 0F1.0", f">0F1.0< {NO_CELL}"),
        ("0f0 0B0", f">0f0< {NO_CELL}"),
        ("0F0++0B0", rf">0F0\+\+0B0< {NO_CELL}"),
        ("0F0 0F1,0B0,0B1", f">0F0 0F1< {NO_CELL}"),
        (
            "0F0 0B0\n" * 40 + "0F0 x",
            r">x< (.|\n)*\n  stage 36 +0F0 +0B0\n(.|\n)*stage 40 +0F0 +>x<",
        ),
        ("0F0+0F1 0B0 0B1", ">0F0.0F1< has two tasks for the F slot(.|\n)*stage 0  >0F0.0F1<  0B0"),
        ("0F0+0B0+0W1 0F1 0I1", ">0F0.0B0.0W1< has two tasks for the W slot"),
        ("0F0,0B0,\n,,", r"stage 1 has no task\. Write .*\n.*\n  stage 1  >\.<"),
        # on the wrong line, or none
        ("0F0 0B0\n0F1 0B1", r"0F1 is on the line of stage 1, other .* same line\.\n.*\n.*>0F1<"),
        (
            "0F0 1B0 0B0\n1F0",
            "1B0 is on the line of stage 0, .* 1 are on that of stage 1.*\n.*>1B0<",
        ),
        (
            changed(WHOLE, "0B2", ".", "1B2", "0B2 1B2"),
            r"0B2 is on the line of stage 1(.|\n)*>0B2<",
        ),
        ("0F0 0B0\n2F0 2B0", r"virtual stage 1 has no task, and there is 2F0(.|\n)*>2F0<  2B0"),
        ("0F0 1F0 1B0 0B0\n2F0 2B0", r"3 virtual stages on 2 .*found 2 on stage 0(.|\n)*>1F0<"),
        ("0F0\n2F0\n1F0\n3F0", r"virtual stage 0 is on stage 0, .*: .*Put 1 on(.|\n)*>1F0<"),
        # one too many, one too few
        (
            "0F0 0B0 0F0\n1F0 1B0",
            r"0F0 is here a second time, first .* cell 1 of stage 0.*\n.*>0F0<",
        ),
        ("0F0 0B0 0I0 0W0", r"0I0 is here a second time, first as 0B0 in cell 2 .*\n.*>0I0<"),
        ("0F0 0I0", r">0I0< is without 0W0. Add that, or write 0B0 for .*\n  stage 0  0F0  >0I0<"),
        ("0F0 0W0", r">0W0< is without 0I0.*\n.*>0W0<"),
        (changed(HALVES, "1I1", "."), r">1W1< is without 1I1(.|\n)*>1W1<"),
        (changed(HALVES, "1I1", "1B1"), r"1W1 is here a second time, first as 1B1(.|\n)*>1W1<"),
        ("0F0 0B0\n1F0", r"1B0 is missing. Add it to stage 1, after 1F0 \(marked\)(.|\n)*>1F0<"),
        ("0F0 0F1 0B1\n1F1+1B1", r"1F0 is missing. .*stage 1, after 0F0(.|\n)*>0F0<"),
        (
            changed(WHOLE, "0F0", "."),
            r"0F0 is missing. .*stage 0, before 0B0 \(marked\)(.|\n)*>0B0<",
        ),
        (changed(HALVES, "1I1", ".", "1W1", "."), r"1B1 is missing. .* after 1F1(.|\n)*>1F1<"),
        (
            changed(WHOLE, "1B3", "1B3 1F4"),
            r"1F4 is of microbatch 4, which lacks 0F4, (.|\n)*>1F4<",
        ),
        (
            "0F0 0B0\n1F0 1B0 1F1",
            r"1F1 is of microbatch 1, which lacks 0F1, 0B1, 1B1\.(.|\n)*>1F1<",
        ),
        ("0F1 0B1", r"microbatch 0 has no task, and there is 0F1 (.|\n)*>0F1<"),
        ("0F0 0B0 0F2 0B2", r"microbatch 1 has no task, and there is 0F2 (.|\n)*>0F2<"),
        # in an order that cannot be
        (
            "0B0 0F0\n1F0 1B0",
            r"deadlock, .*:\n  stage 0  >0B0<  0F0   waits for 0F0 and 1B0\n  stage 1  >1F0< ",
        ),
        (
            "0F0 0B0 0F1 0B1\n1F1+1B1 1F0+1B0",
            r"deadlock, .*:\n.*>0B0<.* waits for 1B0\n.*>1F1\+1B1<.* waits for 0F1$",
        ),
        (
            changed(HALVES, "1I0", "here", "1W0", "1I0", "here", "1W0"),
            r"deadlock, (.|\n)*>1W0<.* waits for 1I0",
        ),
    ],
)
def test_a_text_that_cannot_run_is_refused_with_the_cell_marked(text, message):
    with pytest.raises(ValueError, match=f"^mine: {message}"):
        parse_table(text, "mine")


@pytest.mark.parametrize("digit", "１٣²₀①Ⅳ߁")
def test_digits_are_those_of_ascii(digit):
    with pytest.raises(ValueError, match=rf">{digit}F0< \('\\.*'\) {NO_CELL}(.|\n)*>{digit}F0<"):
        parse_table(f"0F0 0B0\n{digit}F0 1B0")


def test_an_order_that_lines_alone_allow_runs():
    assert check_table(parse_table("0F0 0F1 0B0 0B1\n1F1+1B1 1F0+1B0"))


def test_of_a_large_grid_what_is_around_the_cell_is_shown():
    large = changed(str(build_table("1f1b-published", 12, 64, 1)), "5B40", "5X40")
    with pytest.raises(ValueError, match=">5X40< is no cell") as caught:
        parse_table(large)
    lines = str(caught.value).splitlines()[1:]
    assert len(lines) == 12
    assert " ".join(lines[5].split()) == (
        "stage 5 … 5B38 5F45 5B39 5F46 >5X40< 5F47 5B41 5F48 5B42 …"
    )


def test_a_deadlock_of_cells_far_apart_is_drawn_with_each_line_around_its_own():
    swapped = changed(
        str(build_table("gpipe", 2, 9, 1)), "1F1", "here", "1B1", "1F1", "here", "1B1"
    )
    with pytest.raises(ValueError, match=r"^mine: deadlock, no stage can run") as caught:
        parse_table(swapped, "mine")
    assert str(caught.value).splitlines()[1:] == [
        "  stage 0  …  0F7  0F8    .     .   >0B0<  0B1  0B2  0B3  0B4  …   waits for 1B0",
        "  stage 1      .   1F0  >1B1<  1F2   1F3   1F4  1F5  1F6  1F7  …   waits for 1F1",
    ]


def drawn_text(number: int) -> str:
    """Return the text of a schedule, up to three pairs of cells exchanged within their lines."""
    rng = np.random.default_rng(number)
    name, stages, microbatches = rng.choice(list(SCHEDULES)), rng.integers(1, 7), rng.integers(1, 9)
    table = build_table(name, int(stages), int(microbatches), SCHEDULES[name].chunks)
    lines = [line.split() for line in str(table).splitlines()]
    for _ in range(rng.integers(1, 4)):
        line = lines[rng.integers(stages)]
        a, b = rng.choice([i for i, word in enumerate(line) if word != "."], 2)
        line[a], line[b] = line[b], line[a]
    return "\n".join(map(" ".join, lines))


def test_of_300_drawn_tables_each_runs_or_is_drawn_with_what_each_stage_waits_for():
    ran = 0
    for number in range(300):
        try:
            ran += bool(check_table(parse_table(drawn_text(number), "mine")))
        except ValueError as refused:
            head, *lines = str(refused).splitlines()
            assert head.startswith("mine: deadlock"), (number, head)
            waits = [line for line in lines if "waits for" in line]
            assert waits
            assert all(re.search(r" >\S+< .* waits for \d", line) for line in waits), lines
    assert 50 < ran < 250


def moved(table: Table, task: tuple[int, int, int], tick: int) -> Table:
    """Return the table with one task, given as (stage, slot, value), in another tick."""
    stage, slot, value = task
    cells = table.cells.copy()
    cells[cells[:, stage, slot] == value, stage, slot] = -1
    cells[tick, stage, slot] = value
    return Table(table.name, table.stages, table.microbatches, table.chunks, table.stage_map, cells)


def test_a_faulty_cell_is_marked_in_the_grid_around_it():
    table = build_table("1f1b-published", 3, 2, 1)
    wrong = moved(table, (1, 1, 1), 3)
    with pytest.raises(ValueError, match="1B0 in tick 3 needs 2B0, which runs in tick 3") as caught:
        check_table(wrong)
    assert str(caught.value).splitlines() == [
        "1f1b-published: 1B0 in tick 3 needs 2B0, which runs in tick 3. Move it to tick 4 or "
        "later.",
        "            0    1    2     3     4    5    6",
        "  stage 0  0F0  0F1   .     .     .   0B0   .",
        "  stage 1   .   1F0  1F1  >1B0<   .    .   1B1",
        "  stage 2   .    .   2F0   2B0   2F1  2B1   .",
    ]


def test_tables_made_by_hand_are_checked():
    table = build_table("1f1b", 2, 2, 1)
    edit: Any
    for edit, message, cell in (
        (lambda cells: cells[:, ::-1], "0F0 is on stage 1, virtual stage 0 on 0. Move it", "0F0"),
        (lambda cells: np.concatenate([cells, cells[:1] * 0 - 1]), "nobody works in tick 4", r"\."),
        (lambda cells: np.where(cells == 3, 5, cells), "1F2 is of microbatch 2, of 2", "1F2.*"),
        (lambda cells: cells[:-1], "0B1 is missing", "0F1"),
        (lambda cells: np.where(cells == 0, -1, cells), "0F0 is missing.*before 1F0", "1F0.*"),
    ):
        cells = edit(table.cells)
        with pytest.raises(ValueError, match=rf"{message}(.|\n)*>{cell}<"):
            check_table(Table("mine", 2, 2, 1, table.stage_map, cells))
    with pytest.raises(ValueError, match=r"1 for each stage, found 2 on stage 0(.|\n)*>1F0"):
        check_table(Table("mine", 2, 2, 1, ((0, 0), (0, 1)), table.cells))


def test_a_backward_whose_weights_wait_is_called_by_the_name_that_the_grid_has():
    table = build_table("zb-h1", 3, 4, 1)
    wrong = moved(table, (1, 1, 1), 3)  # B of microbatch 0
    with pytest.raises(ValueError, match=r"1I0 in tick 3 needs 2I0, which (.|\n)*>1I0<"):
        check_table(wrong)
    whole = parse_table("0F0 0B0 0F1 0I1 0W1")
    assert [whole.task_name(task) for task in whole.times()] == [
        "0F0",
        "0B0",
        "0W0",
        "0F1",
        "0I1",
        "0W1",
    ]


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


def test_a_table_of_ones_own_prints_as_its_grid():
    schedule = Schedule.from_text(ONE_F_ONE_B)
    assert str(schedule) == str(schedule.table(2))
    assert str(Schedule("1f1b", 8)).startswith("Schedule(name='1f1b', microbatches=8")
