"""Why a candidate loses, in a phrase: the largest part by which it does."""

from hfjax.hardware.machine import Machine
from hfjax.planner.comm_model import EXPERTS, GATHERS, GRID, MESSAGES, NEW, POSITIONS, SUMS, TENSOR
from hfjax.planner.score import Scored
from hfjax.planner.search import REMATS
from hfjax.planner.step_time import in_a_node
from hfjax.utils.tables import human

LEAST = 0.0005  # of the time of the first: a smaller difference is none
# part of a peak -> what people call it
HELD = {
    "state": "parameters and moments",
    "gradients": "gradients",
    "kept": "activations",
    "weights": "gathered weights",
    "messages": "messages of stages",
    "spare": "gaps between arrays",
}
AXES_OF = {
    GATHERS: ("fsdp", "expert", "context"),
    SUMS: ("data", "fsdp", "expert", "context"),
    NEW: ("data", "fsdp", "expert", "context"),
    TENSOR: ("tensor",),
    POSITIONS: ("context",),
    EXPERTS: ("expert",),
    MESSAGES: ("pipe",),
    GRID: ("row", "tensor"),
}


def reason_of(s: Scored, best: Scored, fits: bool, machine: Machine) -> str:
    """Return why a candidate is not the first: what does not fit, or the largest part it loses by.

    Args:
        s: The candidate.
        best: The first.
        fits: Whether memory has room for it.
        machine: Whose nodes they are on.
    """
    if not fits:
        return f"{human(s.peak.total)}: {largest_held(s)}"
    name, more = largest_loss(s, best)
    total = s.time.total
    if more < LEAST * best.time.total:
        return "as fast"
    if name.startswith("exposed: "):
        purpose = name.removeprefix("exposed: ")
        share = s.time.exposed[purpose] / total
        return f"{_percent(share)} exposed: {purpose}{_where(purpose, s, machine)}"
    words = {
        "products": "computed again" if _again(s, best) else "smaller products",
        "memory": "passes through memory",
        "bubble": "stages wait",
        "optimizer": "the optimizer's state through memory",
        "host": "what goes to the host and back",
    }
    return f"+{_percent(more / best.time.total)}: {words[name]}"


def _percent(part: float) -> str:
    """Return a part as percent; small ones with a digit more."""
    return f"{part:.0%}" if part >= 0.0095 else f"{part:.1%}"


def largest_held(s: Scored) -> str:
    """Return the largest part of a peak, as people call it."""
    parts = dict(s.peak.parts)
    name = max(parts, key=lambda part: parts[part])
    return s.peak.what if name == "moment" else HELD[name]


def largest_loss(s: Scored, best: Scored) -> tuple[str, float]:
    """Return the part of the time by which a candidate loses most, and its seconds."""
    mine, theirs = s.time.parts, best.time.parts
    names = mine.keys() | theirs.keys()
    more = {name: mine.get(name, 0.0) - theirs.get(name, 0.0) for name in names}
    name = max(sorted(more), key=lambda n: more[n])
    return name, more[name]


def _again(s: Scored, best: Scored) -> bool:
    return REMATS.index(s.candidate.remat) > REMATS.index(best.candidate.remat)


def _where(purpose: str, s: Scored, machine: Machine) -> str:
    axes = tuple(a for a in AXES_OF.get(purpose, ()) if s.candidate.side(a) > 1)
    if not axes:
        return ""
    inside, _ = in_a_node(axes, s.candidate.mesh, machine.per_node)
    return " in a node" if inside else " across nodes"
