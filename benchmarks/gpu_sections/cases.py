"""A kernel's case: candidates of a kernel, what it is compared with, and how it is judged.

First every candidate's result is compared with an oracle in float32; one that is wrong is told and
drops out. The others are timed briefly, the best of them in turn with its rivals.
"""

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax

from benchmarks.gpu_sections.rows import Reporter
from benchmarks.gpu_sections.timing import (
    Program,
    compile_all,
    error,
    in_turn,
    sets_of,
    told,
)

BRIEF, ROUNDS = 3, 9
LEAST_S = 3.0  # a case is not begun with less than that left
BF16, FP32 = 2e-2, 1e-4  # errors allowed


@dataclass(frozen=True)
class Goal:
    """What issue and house ask of a kernel."""

    what: str  # ratio (rival's time over ours), of_ceiling, memory (ours over the rival's)
    bound: float


@dataclass
class Case:
    """One kernel at one size. `kept` operands are replaced by the first results, in place."""

    kernel: str
    name: str
    operands: Callable[[int], tuple]  # of a seed
    candidates: Mapping[str, Callable]  # by tuning; the first is what users get
    rivals: Mapping[str, Callable]  # the first is the one that counts
    oracle: Callable | None  # of the same operands, in float32
    flops: float
    bytes: float
    allowed: float = BF16
    part: Callable = lambda result: result  # of a result, what the oracle tells of
    kept: int = 0
    rotate: bool = True
    goals: Sequence[Goal] = ()
    shape: Mapping[str, int] = field(default_factory=dict)  # as steps tell it: kernels="auto"
    notes: dict[str, Any] = field(default_factory=dict)


def tunings(default: Any, *changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return tunings by what is told of them: the default, and changes that are not refused.

    >>> @dataclass(frozen=True)
    ... class Tuning:
    ...     rows: int = 1
    >>> list(tunings(Tuning(), {"rows": 2}, {"rows": 1}))
    ['default', 'rows=2']
    """
    found = {"default": default}
    for change in changes:
        try:
            made = replace(default, **change)
        except ValueError:
            continue
        if made not in found.values():
            text = ", ".join(f"{name}={value}" for name, value in change.items())
            found[text] = made
    return found


def run_cases(reporter: Reporter, cases: Callable[[bool], Iterable[Case]]) -> None:
    """Measure each case and print its row; a case that fails is a row that says so."""
    for case in cases(reporter.smoke):
        if reporter.left < LEAST_S and not reporter.smoke:
            reporter.row(kernel=case.kernel, case=case.name, status="no time left")
            continue
        print(f"measuring {case.kernel}, {case.name}", file=sys.stderr, flush=True)
        try:
            reporter.row(**measured(case, reporter.smoke))
        except Exception as wrong:
            of = {"kernel": case.kernel, "case": case.name, "shape": dict(case.shape)}
            reporter.row(**of, rival=next(iter(case.rivals)), status=f"failed: {told(wrong)}")


def measured(case: Case, smoke: bool = False) -> dict[str, Any]:
    """Return the row of a case."""
    ours = [Program(name, f, case.kept) for name, f in case.candidates.items()]
    rivals = [Program(name, f, case.kept) for name, f in case.rivals.items()]
    sets = sets_of(case.operands, case.rotate and not smoke)
    compile_all([*ours, *rivals], sets[0])
    wrong = _check(case, [*ours, *rivals], sets[0])
    right = [p for p in ours if p.failure is None and p.name not in wrong]
    able = [p for p in rivals if p.failure is None]
    best = _best(case, right, sets, 1 if smoke else BRIEF)
    if best is not None:
        usual = [p for p in right[:1] if p is not best and p.failure is None]
        beside = [best, *usual, *able]
        for program in beside:
            program.ms = []
        in_turn(beside, {p.name: _own(case, sets) for p in beside}, 2 if smoke else ROUNDS)
    return _row(case, ours, rivals, best, wrong)


def _own(case: Case, sets: list[tuple]) -> list[tuple]:
    """Return sets for one program, which takes those that it writes to for itself."""
    return sets if not case.kept else [case.operands(seed) for seed in range(len(sets))]


def _check(case: Case, programs: Sequence[Program], operands: tuple) -> dict[str, float]:
    """Return the errors of programs; only those that are wrong. All errors go into the notes."""
    if case.oracle is None:
        return {}
    with jax.default_matmul_precision("highest"):
        expected = jax.block_until_ready(jax.jit(case.oracle)(*operands))
    errors: dict[str, float] = {}
    for program in programs:
        if program.failure is None:
            given = case.operands(0) if case.kept else operands
            try:
                found = case.part(jax.block_until_ready(program.compiled(*given)))
                errors[program.name] = error(found, expected)
            except Exception as wrong:
                program.failure = told(wrong)
    case.notes["errors"] = errors
    return {name: e for name, e in errors.items() if not e <= case.allowed}


def _best(case: Case, programs: list[Program], sets: list[tuple], rounds: int) -> Program | None:
    """Time candidates briefly, one after the other, and return the fastest that ran."""
    for program in programs:
        try:
            in_turn([program], {program.name: _own(case, sets)}, rounds)
        except Exception as wrong:
            program.failure = told(wrong)
    ran = [p for p in programs if p.failure is None]
    return min(ran, key=lambda p: p.median or float("inf"), default=None)


def _row(
    case: Case, ours: list[Program], rivals: list[Program], best: Program | None, wrong: Mapping
) -> dict[str, Any]:
    first = rivals[0] if rivals else None
    shown = best or (ours[0] if ours else None)
    row: dict[str, Any] = {
        "kernel": case.kernel,
        "case": case.name,
        "shape": dict(case.shape),
        "status": _status(ours, best, wrong),
        "flops": case.flops,
        "bytes": case.bytes,
        "allowed": case.allowed,
        "goals": [vars(goal) for goal in case.goals],
    }
    if best is not None:
        row |= {"ms": best.median, "spread": best.spread, "tuning": best.name}
        row |= {"default_ms": ours[0].median if ours[0].name not in wrong else None}
    if shown is not None:
        row |= {"error": case.notes.get("errors", {}).get(shown.name), "memory": shown.memory}
    if first is not None:
        row |= {"rival": first.name, "rival_ms": first.median, "rival_memory": first.memory}
        row |= {"rival_failure": first.failure}
    told_of = lambda p: (
        p.failure or (f"wrong: {wrong[p.name]:.1e}" if p.name in wrong else p.median)
    )
    row["candidates"] = {p.name: told_of(p) for p in ours}
    row["rivals"] = {p.name: told_of(p) for p in rivals}
    return row | case.notes


def _status(ours: list[Program], best: Program | None, wrong: Mapping[str, float]) -> str:
    if best is not None:
        return "ok"
    if any(p.name in wrong for p in ours):
        return "WRONG"
    return f"failed: {ours[0].failure}" if ours else "failed: no candidate"
