"""Every candidate of a run: sides, strategy, schedule, recomputation, at fixed rows of a step.

What may go together is asked of the table of refused pairs (checks/combinations.py), what divides
of the layout's rules, which microbatches a schedule takes of the schedule. Here is only the order
in which things are tried, and where a search stops: no axis of tensor across nodes, no more than
`MOST_PIECES` microbatches of a pipeline, of which more hide no bubble that is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from hfjax.checks.combinations import refusals
from hfjax.hardware.machine import Machine
from hfjax.parallel.schedules.named import SCHEDULES
from hfjax.planner.candidate import Candidate, table_of

ZEROS = ("ddp", "zero1", "zero2", "fsdp")
REMATS = ("none", "dots", "full")
OFFLOADS = ("0.5", "1")
# Those of one idea: 1f1b-published is 1f1b, v and v-zb lie between 1f1b and zb-v.
PIPELINES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
CHUNKS = (2, 4, 8)
MOST_PIECES = 128
FEW = 8  # rows of a microbatch on a device, up to which every number is tried


@dataclass(frozen=True)
class ModelFacts:
    """What a search asks of a model."""

    layers: int  # equal ones that are stacked; 0: no pipeline is tried
    length: int  # positions of a row; 1: rows have none
    experts: int
    refuses: frozenset[str] = frozenset()  # axes that its class refuses
    row_maps: bool = False  # it runs on grids: its linear maps are known
    in_parts: bool = True


def candidates(rows: int, count: int, model: ModelFacts, machine: Machine) -> Iterator[Candidate]:
    """Yield every way to lay out so many rows of a step on so many devices."""
    for sides in all_sides(count, model, machine):
        for zero in _zeros(sides, machine):
            for sequence in (False, True) if sides.get("tensor", 1) > 1 else (False,):
                if sequence and (model.length % sides["tensor"] or sides.get("row", 1) > 1):
                    continue
                pairs = tuple((a, n) for a, n in sides.items() if n > 1)
                first = Candidate(pairs, zero, rows, sequence)
                for found in _runs(first, model):
                    if goes_together(features_of(found)):
                        yield found


def with_host(c: Candidate, layers: int) -> Iterator[Candidate]:
    """Yield the ways to run a candidate with more on the host: for one that does not fit.

    What unlike layers keep is not known one by one, so that none of it is offloaded.
    """
    found = [replace(c, host="host_optimizer")]
    if layers and c.schedule is None and c.remat == "none" and c.split_rows == 1:
        found += [replace(c, offload=part) for part in OFFLOADS]
        found += [replace(c, offload="1", host="host_optimizer")]
    yield from (one for one in found if goes_together(features_of(one)))


def all_sides(count: int, model: ModelFacts, machine: Machine) -> Iterator[dict[str, int]]:
    """Yield the sides of meshes of so many devices."""
    for tensor, row in _grids(count, model, machine):
        for context in _divisors(count // tensor // row):
            if context > 1 and not _shares_rows(context, row, model):
                continue
            rest = count // tensor // row // context
            for expert in _divisors(rest):
                if expert > 1 and (not model.experts or model.experts % expert or row > 1):
                    continue
                for pipe in _stages(rest // expert, model):
                    left = rest // expert // pipe
                    for fsdp in _divisors(left):
                        yield {
                            **{"pipe": pipe, "data": left // fsdp, "fsdp": fsdp, "expert": expert},
                            **{"context": context, "row": row, "tensor": tensor},
                        }


def _grids(count: int, model: ModelFacts, machine: Machine) -> Iterator[tuple[int, int]]:
    """Yield how many devices tensor and row have: all of them in one node."""
    for tensor in _divisors(count):
        if tensor > machine.per_node or ("tensor" in model.refuses and tensor > 1):
            continue
        for row in _divisors(count // tensor):
            alone = tensor == 1 or tensor * row > machine.per_node or not model.row_maps
            if row == 1 or not alone:
                yield tensor, row


def _stages(count: int, model: ModelFacts) -> tuple[int, ...]:
    """Return how many stages there may be of so many devices."""
    if "pipe" in model.refuses:
        return (1,)
    return tuple(n for n in _divisors(count) if n <= max(model.layers, 1))


def _shares_rows(context: int, row: int, model: ModelFacts) -> bool:
    divides = model.length % (2 * context) == 0 and model.length // context >= 64
    return divides and row == 1 and "context" not in model.refuses


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def _zeros(sides: dict[str, int], machine: Machine) -> Iterator[str]:
    """Yield which of parameters, gradients and moments are split."""
    shards = any(sides[axis] > 1 for axis in ("fsdp", "expert", "context"))
    samples = shards or sides["data"] > 1
    for zero in ZEROS:
        if zero == "fsdp" and not shards:
            continue
        if zero != "fsdp" and sides["fsdp"] > 1:  # two levels: what lies in a node, and the rest
            inside = sides["fsdp"] * sides["expert"] * sides["context"] * sides["tensor"]
            if sides["data"] == 1 or inside * sides["row"] != machine.per_node:
                continue
        if zero in ("zero1", "zero2") and not samples:
            continue
        yield zero


def _runs(first: Candidate, model: ModelFacts) -> Iterator[Candidate]:
    """Yield the ways in which a layout's rows run."""
    if first.rows % first.replicas:
        return
    share = first.rows // first.replicas
    if first.side("row") > 1 and share % first.side("row"):
        return
    two_levels = first.zero != "fsdp" and first.side("fsdp") > 1
    reduction = "hierarchical" if two_levels else "flat"
    first = replace(first, reduction=reduction)
    least = first.side("row")
    for at_once in rows_at_once(share):
        if at_once % least:
            continue
        pieces = share // at_once
        runs = _staged(first, pieces, model) if first.side("pipe") > 1 else _plain(first, pieces)
        yield from runs


@cache
def rows_at_once(share: int) -> tuple[int, ...]:
    """Return how many of a device's rows a microbatch may have: few, powers of two, or all.

    >>> rows_at_once(24), rows_at_once(56)
    ((1, 2, 3, 4, 6, 8, 24), (1, 2, 4, 7, 8, 56))
    """
    tried = lambda n: n <= FEW or n & (n - 1) == 0 or n == share
    return tuple(n for n in _divisors(share) if tried(n))


def _plain(first: Candidate, pieces: int) -> Iterator[Candidate]:
    at_once = first.rows // first.replicas // pieces
    for remat in REMATS:
        run = replace(first, accumulate=pieces, remat=remat)
        yield run
        if first.sequence and at_once % 2 == 0:
            yield replace(run, split_rows=2)


def _staged(first: Candidate, pieces: int, model: ModelFacts) -> Iterator[Candidate]:
    stages = first.side("pipe")
    if not stages <= pieces <= max(MOST_PIECES, 4 * stages):
        return
    for name in PIPELINES:
        builder = SCHEDULES[name]
        for chunks in (builder.chunks,) if builder.fixed else CHUNKS:
            if stages * chunks > model.layers or not _takes(name, chunks, pieces, stages):
                continue
            for remat in REMATS:
                how = {"schedule": name, "chunks": chunks, "microbatches": pieces}
                yield replace(first, **how, remat=remat)


@cache
def _takes(name: str, chunks: int, microbatches: int, stages: int) -> bool:
    """Return whether a schedule takes so many microbatches on so many stages."""
    try:
        table_of(name, microbatches, chunks, stages)
    except ValueError:
        return False
    return True


# -- what goes together ---------------------------------------------------------------------


def features_of(c: Candidate) -> frozenset[str]:
    """Return the features that a candidate turns on, as the table of refused pairs names them."""
    least = replace(c, rows=1, accumulate=min(c.accumulate, 2), microbatches=None, chunks=None)
    return _features(least)


@cache
def _features(c: Candidate) -> frozenset[str]:
    mesh = c.mesh
    builder = SCHEDULES.get(c.schedule or "")
    uses = {
        "accumulate": c.accumulate > 1,
        "remat": c.remat != "none",
        "offload": c.offload is not None,
        "reduction=hierarchical": c.reduction != "flat",
        "split_rows": c.split_rows > 1,
        "schedule": builder is not None,
        "ZERO1": c.zero == "zero1",
        "ZERO2": c.zero == "zero2",
        "FSDP": c.zero == "fsdp",
        "TENSOR": mesh["tensor"] > 1 and mesh["row"] == 1,
        "SEQUENCE": c.sequence,
        "GRID": mesh["row"] > 1,
        "EXPERT": mesh["expert"] > 1,
        "CONTEXT": mesh["context"] > 1,
        "HOST_OPTIMIZER": bool(c.host),
    }
    return frozenset(name for name, used in uses.items() if used)


@cache
def goes_together(features: frozenset[str]) -> bool:
    """Return whether no two of these features are refused, whatever else is so."""
    names = sorted(features)
    pairs = ((a, b) for n, a in enumerate(names) for b in names[n + 1 :])
    return not any(r.everywhere for a, b in pairs for r in refusals(a, b))
