"""The best candidates again, by what their compiled programs tell: peak, and exposed transfers.

A program says which transfers it has, and what runs beside each. How long each takes is the
machine's (step_time.py), as for the formula; products, memory and bubble stay the formula's.
"""

from collections.abc import Iterable
from dataclasses import replace

from hfjax.hardware.machine import Machine
from hfjax.planner.comm_model import EXPERTS, GATHERS, GRID, MESSAGES, POSITIONS, SUMS, TENSOR, Sent
from hfjax.planner.memory_model import Sides
from hfjax.planner.peak_memory import Peak
from hfjax.planner.programs.compile_step import Compiled, CompiledTransfer
from hfjax.planner.score import Scored
from hfjax.planner.step_time import seconds_of


def corrected(s: Scored, found: Compiled, machine: Machine) -> Scored:
    """Return a candidate with the peak and the exposed transfers of its compiled program.

    Args:
        s: The candidate, by formula.
        found: What its program tells.
        machine: Whose links carry what is sent.
    """
    sides = s.candidate.mesh
    exposed: dict[str, float] = {}
    total = 0.0
    for t in found.transfers:
        axes = tuple(axis for axis in t.axes.split("+") if axis in sides)
        if not axes:
            continue
        one = Sent("", t.kind, axes, t.bytes * t.count, t.count)
        taken = seconds_of(one, sides, machine)
        hidden = min(t.covered * t.count, taken)
        name = purpose_of(t, axes, sides)
        rest = taken - hidden + machine.beside * hidden
        exposed[name] = exposed.get(name, 0.0) + rest
        total += taken
    return replace(
        s,
        time=replace(s.time, exposed=exposed, transfers=total),
        peak=_peak(s.peak, found),
        compiled=found,
    )


def _peak(formula: Peak, found: Compiled) -> Peak:
    """Return a peak whose sum is the program's; what the formula does not explain is spare."""
    known = formula.total - formula.spare
    return replace(formula, spare=found.peak - known)


def purpose_of(t: CompiledTransfer, axes: Iterable[str], sides: Sides) -> str:
    """Return what a collective of a program is for, as formulas call it."""
    over = set(axes)
    if "row" in over or (sides["row"] > 1 and "tensor" in over):
        return GRID
    for axis, purpose in (("tensor", TENSOR), ("pipe", MESSAGES)):
        if axis in over:
            return purpose
    if t.kind in ("all-to-all", "permute"):
        return EXPERTS if "expert" in over else POSITIONS
    return GATHERS if t.kind == "all-gather" else SUMS
