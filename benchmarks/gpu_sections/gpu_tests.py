"""The tests marked gpu, file by file: one that hangs or breaks the device ends alone."""

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_sections.rows import Reporter

TESTS = Path(__file__).parents[2] / "tests"
MARK = "mark.gpu"
BESIDE = 8  # files at once: most of a test is its compilation
WORKERS = 3  # of each file, where pytest-xdist is installed
SHOWN = 300  # characters of a failure
OPTIONS = (
    "-v",
    "--tb=short",
    "-p",
    "no:cacheprovider",
    "-m",
    "gpu",
    "-W",
    "ignore::DeprecationWarning",
)


def run(reporter: Reporter) -> None:
    """Run the tests of each file and print its row; a dry run collects those of one file."""
    end = time.monotonic() + reporter.left - 3
    chosen = [TESTS / "test_gpu.py"] if reporter.smoke else files()
    with ThreadPoolExecutor(BESIDE) as pool:
        for row in pool.map(lambda path: tested(path, end, reporter.smoke), chosen):
            reporter.row(**row)


def files() -> list[Path]:
    """Return the files that have tests for a GPU."""
    found = sorted(TESTS.glob("test_*.py"))
    return [path for path in found if MARK in path.read_text()]


def tested(path: Path, end: float, smoke: bool) -> dict[str, Any]:
    """Return the row of one file."""
    row = {"kernel": "tests", "case": path.name}
    if (seconds := end - time.monotonic()) < 5:
        return row | {"status": "no time left"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        given = [sys.executable, "-m", "pytest", *OPTIONS, f"--junitxml={report}", str(path)]
        if smoke:
            given += ["--collect-only"]
        elif find_spec("xdist"):
            given += ["-n", str(WORKERS)]
        said = _ran(given, seconds)
        if report.exists() and not smoke:
            return row | counted(report.read_text())
        tail = " ".join(said[-SHOWN:].split())
        passed = {} if smoke else {"passed": said.count("PASSED")}
        return row | passed | {"status": "ok" if smoke and tail.endswith("(exit 0)") else tail}


def _ran(command: Sequence[str], seconds: float) -> str:
    """Run pytest and return what it printed and how it ended."""
    settings = {"HFJAX_TEST_GPU": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    out, both = subprocess.PIPE, subprocess.STDOUT
    try:
        done = subprocess.run(
            command, stdout=out, stderr=both, text=True, timeout=seconds, env=os.environ | settings
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
        text = said.decode(errors="replace") if isinstance(said, bytes) else said
        return f"{text} (ended after {seconds:.0f} s)"
    print(done.stdout, file=sys.stderr)
    return f"{done.stdout} (exit {done.returncode})"


def counted(report: str) -> dict[str, Any]:
    """Return what a report of pytest says: how many passed, which failed and why.

    >>> counted('<t><testcase name="a"/><testcase name="b"><failure message="E 1"/></testcase></t>')
    {'passed': 1, 'skipped': 0, 'failed': {'b': 'E 1'}, 'status': 'failed: b'}
    """
    cases = list(ET.fromstring(report).iter("testcase"))
    bad: dict[str, str] = {}
    for case in cases:
        for kind in ("failure", "error"):
            for found in case.findall(kind):
                bad[case.get("name", "?")] = " ".join(found.get("message", "").split())[:SHOWN]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - skipped - len(bad)
    status = f"failed: {', '.join(bad)}" if bad else "ok" if passed else "none ran"
    return {"passed": passed, "skipped": skipped, "failed": bad, "status": status}
