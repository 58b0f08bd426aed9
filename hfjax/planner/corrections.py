"""Corrects the best candidates by their compiled programs: peak memory and exposed transfers.

A program shows its transfers and what runs beside each. How long each takes comes from the machine
(step_time.py), as in the formula; matmuls, memory traffic and bubble stay those of the formula.
"""

from collections.abc import Iterable
from dataclasses import replace

from hfjax.hardware.machine import Machine
from hfjax.planner.comm_model import (
    EXPERTS,
    GATHERS,
    GRID,
    MESSAGES,
    POSITIONS,
    SUMS,
    TENSOR,
    CommVolume,
)
from hfjax.planner.memory_model import MeshShape
from hfjax.planner.peak_memory import Peak
from hfjax.planner.programs.compile_step import CompiledTransfer, ProgramStats
from hfjax.planner.score import ScoredCandidate
from hfjax.planner.step_time import comm_seconds


def correct_score(s: ScoredCandidate, program: ProgramStats, machine: Machine) -> ScoredCandidate:
    """Return a candidate with the peak and the exposed transfers of its compiled program.

    Args:
        s: The candidate, scored by formula.
        program: The statistics of its compiled program.
        machine: The machine whose links carry the transfers.
    """
    mesh = s.candidate.mesh
    exposed: dict[str, float] = {}
    transfer_seconds = 0.0
    for t in program.transfers:
        axes = tuple(axis for axis in t.axes.split("+") if axis in mesh)
        if not axes:
            continue
        comm = CommVolume("", t.kind, axes, t.bytes * t.count, t.count)
        seconds = comm_seconds(comm, mesh, machine)
        hidden = min(t.covered * t.count, seconds)
        purpose = purpose_of(t, axes, mesh)
        exposed_seconds = seconds - hidden + machine.beside * hidden
        exposed[purpose] = exposed.get(purpose, 0.0) + exposed_seconds
        transfer_seconds += seconds
    return replace(
        s,
        time=replace(s.time, exposed=exposed, transfers=transfer_seconds),
        peak=_correct_peak(s.peak, program),
        compiled=program,
    )


def _correct_peak(formula: Peak, program: ProgramStats) -> Peak:
    """Return a peak with the program's total; what the formula does not explain is spare."""
    known = formula.total - formula.spare
    return replace(formula, spare=program.peak - known)


def purpose_of(t: CompiledTransfer, axes: Iterable[str], mesh: MeshShape) -> str:
    """Return the purpose of a program's collective, by the formulas' name for it."""
    axis_set = set(axes)
    if "row" in axis_set or (mesh["row"] > 1 and "tensor" in axis_set):
        return GRID
    for axis, purpose in (("tensor", TENSOR), ("pipe", MESSAGES)):
        if axis in axis_set:
            return purpose
    if t.kind in ("all-to-all", "permute"):
        return EXPERTS if "expert" in axis_set else POSITIONS
    return GATHERS if t.kind == "all-gather" else SUMS
