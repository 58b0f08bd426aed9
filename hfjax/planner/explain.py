"""Explains in a phrase why a candidate loses: the largest part of its loss."""

from hfjax.hardware.machine import Machine
from hfjax.planner.comm_model import (
    EXPERTS,
    GATHERS,
    GRID,
    MESSAGES,
    NEW_PARAMS,
    POSITIONS,
    SUMS,
    TENSOR,
)
from hfjax.planner.score import ScoredCandidate
from hfjax.planner.search import REMATS
from hfjax.planner.step_time import node_membership
from hfjax.utils.tables import human

MIN_DIFFERENCE = 0.0005  # of the best time: a smaller difference counts as none
# part of a peak -> its name for users
MEMORY_NAMES = {
    "state": "parameters and optimizer state",
    "gradients": "gradients",
    "kept": "activations",
    "weights": "gathered weights",
    "messages": "messages of stages",
    "spare": "gaps between arrays",
}
AXES_OF = {
    GATHERS: ("fsdp", "expert", "context"),
    SUMS: ("data", "fsdp", "expert", "context"),
    NEW_PARAMS: ("data", "fsdp", "expert", "context"),
    TENSOR: ("tensor",),
    POSITIONS: ("context",),
    EXPERTS: ("expert",),
    MESSAGES: ("pipe",),
    GRID: ("row", "tensor"),
}


def reason_of(s: ScoredCandidate, best: ScoredCandidate, fits: bool, machine: Machine) -> str:
    """Return why a candidate is not the best: what does not fit, or the largest part of its loss.

    Args:
        s: The candidate.
        best: The best candidate.
        fits: Whether it fits in memory.
        machine: The machine, for its node size.
    """
    if not fits:
        return f"{human(s.peak.total)}: {largest_memory_part(s)}"
    name, more = largest_loss(s, best)
    step_seconds = s.time.total
    if more < MIN_DIFFERENCE * best.time.total:
        return "as fast"
    if name.startswith("exposed: "):
        purpose = name.removeprefix("exposed: ")
        share = s.time.exposed[purpose] / step_seconds
        return f"{_percent(share)} exposed: {purpose}{_link_suffix(purpose, s, machine)}"
    phrases = {
        "products": "computed again" if _recomputes_more(s, best) else "smaller products",
        "memory": "passes through memory",
        "bubble": "stages wait",
        "optimizer": "the optimizer's state through memory",
        "host": "what goes to the host and back",
    }
    return f"+{_percent(more / best.time.total)}: {phrases[name]}"


def _percent(fraction: float) -> str:
    """Return a fraction as percent; small ones with one more digit."""
    return f"{fraction:.0%}" if fraction >= 0.0095 else f"{fraction:.1%}"


def largest_memory_part(s: ScoredCandidate) -> str:
    """Return the largest part of a peak, by its name for users."""
    sizes = dict(s.peak.parts)
    name = max(sizes, key=lambda key: sizes[key])
    return s.peak.moment_kind if name == "moment" else MEMORY_NAMES[name]


def largest_loss(s: ScoredCandidate, best: ScoredCandidate) -> tuple[str, float]:
    """Return the part of the time by which a candidate loses most, and its seconds."""
    mine, theirs = s.time.parts, best.time.parts
    names = mine.keys() | theirs.keys()
    more = {name: mine.get(name, 0.0) - theirs.get(name, 0.0) for name in names}
    name = max(sorted(more), key=lambda n: more[n])
    return name, more[name]


def _recomputes_more(s: ScoredCandidate, best: ScoredCandidate) -> bool:
    return REMATS.index(s.candidate.remat) > REMATS.index(best.candidate.remat)


def _link_suffix(purpose: str, s: ScoredCandidate, machine: Machine) -> str:
    axes = tuple(a for a in AXES_OF.get(purpose, ()) if s.candidate.axis_size(a) > 1)
    if not axes:
        return ""
    inside, _ = node_membership(axes, s.candidate.mesh, machine.per_node)
    return " in a node" if inside else " across nodes"
