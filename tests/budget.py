"""What each file of tests costs, beside the table of what it may cost (tests/budget.json).

`pytest --budget` counts, by file: programs that are traced, lowered and compiled (those of eager
operations, and of functions that JAX and hfjax keep jitted, are not counted: an earlier file may
have paid for them) and processes that are started. Counts are exact, whatever the machine does. A
file that counts more than the table fails the run; `pytest --budget=accept` writes the table anew.
Processor seconds are printed by file: their sum may be 1.25 times the table's. The table also has
the slowest files, which run first.
"""

import json
import resource
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import pytest
from jax.extend.core import Primitive

TABLE = Path(__file__).with_name("budget.json")
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "traced",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lowered",
    "/jax/core/compile/backend_compile_duration": "compiled",
}
STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork")
SLACK = 1.25  # of processor seconds: machines differ
SLOWEST = 4  # seconds of a file that begins before the others


class Budget:
    """Counts of one process, by file of tests; those of all workers where they end."""

    def __init__(self, mode: str | None):
        self.mode, self.file = mode, ""
        self.programs: dict[str, Counter[str]] = {}  # {file: {"compiled step": number}}
        self.shared: set[str] = set()
        self.counts: dict[str, Counter[str]] = {}
        self.seconds: dict[str, float] = {}
        self.errors: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(self._on_program)
        sys.addaudithook(self._on_start)

    def _on_program(self, event: str, duration_secs: float, **about: Any) -> None:
        if self.file and (kind := EVENTS.get(event)):
            name = str(about.get("fun_name")).removeprefix("jit(").removesuffix(")")
            self.programs.setdefault(self.file, Counter())[f"{kind} {name}"] += 1

    def _on_start(self, event: str, arguments: tuple) -> None:
        if self.file and event in STARTS:
            self.counts.setdefault(self.file, Counter())["processes"] += 1

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Count what a test and its fixtures do as its file's."""
        self.file, before = item.nodeid.split("::")[0], _processor_seconds()
        try:
            return (yield)
        finally:
            spent = _processor_seconds() - before
            self.seconds[self.file] = self.seconds.get(self.file, 0.0) + spent
            self.file = ""

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker hands over what it saw; the one process of a session, or its head, judges."""
        self.shared |= shared_names()
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            programs, counts = ({k: dict(v) for k, v in x.items()} for x in self._seen)
            output["budget"] = [programs, counts, dict(self.seconds), [*self.shared]]
        elif self.mode and self.seconds:
            self._count()
            session.exitstatus = self.judge() or session.exitstatus

    @property
    def _seen(self) -> tuple[dict[str, Counter[str]], dict[str, Counter[str]]]:
        return self.programs, self.counts

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Add what a worker saw."""
        *seen, seconds, shared = getattr(node, "workeroutput", {}).get("budget", [{}, {}, {}, []])
        for ours, theirs in zip(self._seen, seen, strict=True):
            for file, count in theirs.items():
                ours.setdefault(file, Counter()).update(count)
        for file, spent in seconds.items():
            self.seconds[file] = self.seconds.get(file, 0.0) + spent
        self.shared |= {*shared}

    def _count(self) -> None:
        """Count the programs of each file but those whose names are shared in some worker."""
        for file, programs in self.programs.items():
            steps = {key.partition(" ")[2] for key in programs if key.startswith("lowered ")}
            for key, count in programs.items():
                kind, _, name = key.partition(" ")
                if name in steps - self.shared:
                    self.counts.setdefault(file, Counter())[kind] += count

    def judge(self) -> int:
        """Compare with the table, or write it."""
        counts = {file: dict(sorted(self.counts.get(file, {}).items())) for file in self.seconds}
        if self.mode == "accept":
            dear = [file for file, spent in self.seconds.items() if spent >= SLOWEST]
            slowest = sorted(dear, key=lambda file: -self.seconds[file])
            total = round(sum(self.seconds.values()))
            table = {"seconds": total, "slowest": slowest, "files": counts}
            TABLE.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
            return 0
        table = json.loads(TABLE.read_text())
        self.errors = list(grown(counts, table["files"]))
        total, most = sum(self.seconds.values()), SLACK * table["seconds"]
        if total > most:
            self.errors.append(f"{total:.0f} processor seconds: at most {most:.0f} are allowed")
        return int(bool(self.errors))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the dearest files, and those that have grown."""
        if not self.mode or not self.seconds:
            return
        total = sum(self.seconds.values())
        terminalreporter.section(f"{total:.0f} processor seconds")
        dearest = sorted(self.seconds.items(), key=lambda item: -item[1])
        for file, seconds in dearest[: None if self.mode == "all" else 25]:
            counts = ", ".join(f"{v} {k}" for k, v in sorted(self.counts.get(file, {}).items()))
            terminalreporter.line(f"{seconds:7.1f} s  {file}: {counts}")
        for error in self.errors:
            terminalreporter.line(f"budget: {error}", red=True)
        if self.errors:
            words = (
                "make it cheaper, mark cases `short`, or accept: make test BUDGET=--budget=accept"
            )
            terminalreporter.line(f"budget: {words}")


def slowest_first(items: list[pytest.Item]) -> None:
    """Bring the dearest files to the front, so that no worker ends with one alone."""
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    rank = {file: n for n, file in enumerate(table.get("slowest", ()))}
    items.sort(key=lambda item: rank.get(item.nodeid.split("::")[0], len(rank)))


def grown(counts: dict[str, dict[str, int]], table: dict[str, dict[str, int]]) -> Iterator[str]:
    """Yield a sentence for each count of a file that is above the table's."""
    for file, found in sorted(counts.items()):
        for kind, count in found.items():
            if count > (most := table.get(file, {}).get(kind, 0)):
                yield f"{file}: {count} {kind}, {most} in tests/budget.json"


def _processor_seconds() -> float:
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def shared_names() -> set[str]:
    """Return the names of what stays jitted for a process: primitives, functions of modules."""
    jitted = type(jax.jit(lambda: None)), jax.numpy.ufunc
    modules = [m for name, m in [*sys.modules.items()] if not name.startswith("tests")]
    values = [x for m in modules if isinstance(m, ModuleType) for x in [*vars(m).values()]]
    primitives = {x.name for x in values if isinstance(x, Primitive)}
    return primitives | {str(getattr(x, "__name__", "")) for x in values if isinstance(x, jitted)}
