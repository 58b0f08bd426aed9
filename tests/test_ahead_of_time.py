"""The table of steps that are compiled for H200s: its cases, and what is told of a program."""

import pytest

from benchmarks import ahead_of_time
from benchmarks.ahead_of_time import CASES, COLUMNS, MODELS, Numbers, cells, measured

GATHER = "all-gather fsdp"
TOLD = {
    **{"state": 2**30, "temporaries": 2**31, "peak": 3 * 2**30, "accessed": 5e9, "compiled": 7.0},
    **{(GATHER, "count"): 8, (GATHER, "bytes"): 2**22, (GATHER, "hidden"): 2**21},
    **{"seconds": 4e-3, "exposed": 1e-3, "products": 2e-3},
}


def test_cases_are_of_models_that_are_there_and_of_eight_devices_or_more():
    for name, case in CASES.items():
        assert case.model in MODELS, name
        assert sum(size > 1 for size in case.mesh.values()) >= 1, name


def test_a_row_shows_what_a_program_tells():
    row = ("0.12", "fsdp", *cells(Numbers(float, TOLD)))
    assert len(row) == len(COLUMNS)
    assert row[2:9] == (
        *("1.00 GiB", "2.00 GiB", "3.00 GiB", "5 GB", "50.0%", "75.0%", "1.00 of 4.00 ms"),
    )
    assert row[9:] == ("2.00 ms", "7 s", "8 all-gather fsdp 4.0 MiB 50%")


def test_a_row_of_one_layer_is_the_difference_of_two_programs(monkeypatch):
    of = lambda case, layers=6: Numbers(
        float, {name: value * layers for name, value in TOLD.items()}
    )
    monkeypatch.setattr(ahead_of_time, "numbers", of)
    assert measured(CASES["tensor, layer of 70B, whole"]) == TOLD
    assert measured(CASES["tensor, medium, whole"])["state"] == 6 * TOLD["state"]


def test_a_name_that_no_case_has_is_refused_with_those_that_there_are(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["ahead_of_time", "fdsp"])
    with pytest.raises(SystemExit):
        ahead_of_time.main()
    assert "no case is called fdsp: one of ddp, default;" in capsys.readouterr().err
