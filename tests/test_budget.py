"""What `make test` runs, and what it may cost: `short` cases, and the table of counts."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.budget import TABLE, grown
from tests.workers import environment

ROOT = Path(__file__).parents[1]

SUITE = """
import subprocess, sys
import jax, pytest

@pytest.mark.short("a", "b c")
@pytest.mark.parametrize("case", ["a", "b c", "d"])
def test_cases(case):
    assert case != "d"

def step(x):
    return x * 2

@pytest.mark.parametrize("size", range({sizes}))
def test_steps(size):
    jax.jit(step)(jax.numpy.zeros(size + 2))

def test_processes():
    subprocess.run([sys.executable, "-c", ""], check=True)
"""


@pytest.fixture
def suite(tmp_path):
    """Return what runs a suite of one file beside this repository's conftest.py."""
    (tmp_path / "conftest.py").write_text(
        "from conftest_of_hfjax import *\nimport tests.budget as b, pathlib\n"
        f"b.TABLE = pathlib.Path({str(tmp_path / 'budget.json')!r})\n"
    )
    (tmp_path / "conftest_of_hfjax.py").write_text((ROOT / "conftest.py").read_text())
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    short\n    slow\n    gpu\n")

    def run(*arguments, sizes=2, text=SUITE):
        (tmp_path / "test_it.py").write_text(text.format(sizes=sizes))
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
        path = f"{tmp_path}:{ROOT}"
        return subprocess.run(
            command,
            cwd=tmp_path,
            env=environment(PYTHONPATH=path),
            text=True,
            capture_output=True,
        )

    return run, tmp_path / "budget.json"


@pytest.mark.slow
def test_a_file_that_compiles_more_than_the_table_says_fails_the_run(suite):
    run, table = suite
    accept = run("-m", "not slow", "--budget=accept")
    assert accept.returncode == 0
    assert "5 passed, 1 deselected" in accept.stdout
    accepted = json.loads(table.read_text())
    counts = {"compiled": 2, "lowered": 2, "processes": 1, "traced": 2}
    assert accepted["files"] == {"test_it.py": counts}
    table.write_text(json.dumps(accepted | {"seconds": 1000}))
    assert run("-m", "not slow", "--budget").returncode == 0
    more = run("-m", "not slow", "--budget", sizes=3)
    assert more.returncode == 1
    assert "budget: test_it.py: 3 compiled, 2 in tests/budget.json" in more.stdout
    assert "make test BUDGET=--budget=accept" in more.stdout


def test_only_named_cases_are_short_and_each_name_is_a_case(suite):
    run, _ = suite
    assert "1 failed, 5 passed" in run().stdout
    unknown = run(text=SUITE.replace('short("a", ', 'short("e", '))
    assert unknown.returncode == 4
    assert "test_it.py::test_cases: short('e',): it has the cases" in unknown.stderr


def test_counts_that_fall_are_no_growth():
    counts = {"a": {"compiled": 3}, "b": {"compiled": 1}, "c": {"processes": 1}}
    table = {"a": {"compiled": 2}, "b": {"compiled": 2}}
    words = ["a: 3 compiled, 2 in tests/budget.json", "c: 1 processes, 0 in tests/budget.json"]
    assert list(grown(counts, table)) == words


def test_the_table_names_files_that_are_there():
    files = json.loads(TABLE.read_text())["files"]
    assert not [file for file in files if not (ROOT / file).exists()]
