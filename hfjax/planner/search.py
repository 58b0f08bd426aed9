"""Yields every candidate of a run: mesh, strategy, schedule, remat, at a fixed global batch size.

The table of refused pairs (checks/feature_conflicts.py) says what may go together, the rules of the
layout what divides, and the schedule which microbatches it takes. Here is only the order of the
search, and where it stops: no tensor axis across nodes, no more than `MAX_MICROBATCHES`
microbatches of a pipeline, since more hide no bubble that is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from hfjax.checks.feature_conflicts import refusals
from hfjax.hardware.machine import Machine
from hfjax.parallel.schedules.named import SCHEDULES
from hfjax.planner.candidate import ZERO_STAGES, Candidate, table_of

REMATS = ("none", "dots", "full")
OFFLOADS = ("0.5", "1")
# One of each idea: 1f1b-published is 1f1b, v and v-zb lie between 1f1b and zb-v.
PIPELINES = ("1f1b", "gpipe", "interleaved", "zb-h1", "zb-v", "dualpipe-v")
CHUNKS = (2, 4, 8)
MAX_MICROBATCHES = 128
FEW_EXAMPLES = 8  # examples of a microbatch on a device, up to which every number is tried


@dataclass(frozen=True)
class ModelFacts:
    """What a search needs to know of a model."""

    layers: int  # equal ones in the stack; 0: no pipeline is tried
    length: int  # positions of an example; 1: examples have none
    experts: int
    refused_axes: frozenset[str] = frozenset()  # axes that its class refuses
    supports_grid: bool = False  # it runs on grids: its linear maps are known
    has_layer_stack: bool = True


def candidates(
    batch_size: int, count: int, model: ModelFacts, machine: Machine
) -> Iterator[Candidate]:
    """Yield every way to lay out a global batch of this size on `count` devices."""
    for axis_sizes in mesh_shapes(count, model, machine):
        for zero in _zero_stages(axis_sizes, machine):
            for sequence in (False, True) if axis_sizes.get("tensor", 1) > 1 else (False,):
                if sequence and (
                    model.length % axis_sizes["tensor"] or axis_sizes.get("row", 1) > 1
                ):
                    continue
                pairs = tuple((a, n) for a, n in axis_sizes.items() if n > 1)
                first = Candidate(pairs, zero, batch_size, sequence)
                for variant in _execution_variants(first, model):
                    if is_compatible(candidate_features(variant)):
                        yield variant


def host_variants(c: Candidate, layers: int) -> Iterator[Candidate]:
    """Yield variants of a candidate with more in host memory, for one that does not fit.

    Residuals of unlike layers are not known one by one, so none of them are offloaded.
    """
    variants = [replace(c, host="host_optimizer")]
    if layers and c.schedule is None and c.remat == "none" and c.tensor_overlap_chunks == 1:
        variants += [replace(c, offload=ratio) for ratio in OFFLOADS]
        variants += [replace(c, offload="1", host="host_optimizer")]
    yield from (variant for variant in variants if is_compatible(candidate_features(variant)))


def mesh_shapes(count: int, model: ModelFacts, machine: Machine) -> Iterator[dict[str, int]]:
    """Yield the axis sizes of meshes of so many devices."""
    for tensor, row in _grids(count, model, machine):
        for context in _divisors(count // tensor // row):
            if context > 1 and not _allows_context(context, row, model):
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
    """Yield sizes of tensor and row, with all of their devices in one node."""
    for tensor in _divisors(count):
        if tensor > machine.per_node or ("tensor" in model.refused_axes and tensor > 1):
            continue
        for row in _divisors(count // tensor):
            no_grid = tensor == 1 or tensor * row > machine.per_node or not model.supports_grid
            if row == 1 or not no_grid:
                yield tensor, row


def _stages(count: int, model: ModelFacts) -> tuple[int, ...]:
    """Return the possible numbers of stages for so many devices."""
    if "pipe" in model.refused_axes:
        return (1,)
    return tuple(n for n in _divisors(count) if n <= max(model.layers, 1))


def _allows_context(context: int, row: int, model: ModelFacts) -> bool:
    divides = model.length % (2 * context) == 0 and model.length // context >= 64
    return divides and row == 1 and "context" not in model.refused_axes


@cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(n for n in range(1, number + 1) if number % n == 0)


def _zero_stages(axis_sizes: dict[str, int], machine: Machine) -> Iterator[str]:
    """Yield which of parameters, gradients and optimizer state are sharded."""
    shards = any(axis_sizes[axis] > 1 for axis in ("fsdp", "expert", "context"))
    has_replicas = shards or axis_sizes["data"] > 1
    for zero in ZERO_STAGES:
        if zero == "fsdp" and not shards:
            continue
        if (
            zero != "fsdp" and axis_sizes["fsdp"] > 1
        ):  # two levels: inside each node, and then across nodes
            inside = (
                axis_sizes["fsdp"]
                * axis_sizes["expert"]
                * axis_sizes["context"]
                * axis_sizes["tensor"]
            )
            if axis_sizes["data"] == 1 or inside * axis_sizes["row"] != machine.per_node:
                continue
        if zero in ("zero1", "zero2") and not has_replicas:
            continue
        yield zero


def _execution_variants(first: Candidate, model: ModelFacts) -> Iterator[Candidate]:
    """Yield the ways to run a layout's batch."""
    if first.batch_size % first.replicas:
        return
    share = first.batch_size // first.replicas
    if first.axis_size("row") > 1 and share % first.axis_size("row"):
        return
    two_levels = first.zero != "fsdp" and first.axis_size("fsdp") > 1
    reduction = "hierarchical" if two_levels else "flat"
    first = replace(first, gradient_reduction=reduction)
    least = first.axis_size("row")
    for microbatch_size in microbatch_sizes(share):
        if microbatch_size % least:
            continue
        num_microbatches = share // microbatch_size
        variants = (
            _pipeline_variants(first, num_microbatches, model)
            if first.axis_size("pipe") > 1
            else _accumulation_variants(first, num_microbatches)
        )
        yield from variants


@cache
def microbatch_sizes(share: int) -> tuple[int, ...]:
    """Return the sizes to try of a microbatch on a device: few, powers of two, or all examples.

    >>> microbatch_sizes(24), microbatch_sizes(56)
    ((1, 2, 3, 4, 6, 8, 24), (1, 2, 4, 7, 8, 56))
    """
    tried = lambda n: n <= FEW_EXAMPLES or n & (n - 1) == 0 or n == share
    return tuple(n for n in _divisors(share) if tried(n))


def _accumulation_variants(first: Candidate, num_microbatches: int) -> Iterator[Candidate]:
    microbatch_size = first.batch_size // first.replicas // num_microbatches
    for remat in REMATS:
        run = replace(first, gradient_accumulation_steps=num_microbatches, remat=remat)
        yield run
        if first.sequence and microbatch_size % 2 == 0:
            yield replace(run, tensor_overlap_chunks=2)


def _pipeline_variants(
    first: Candidate, num_microbatches: int, model: ModelFacts
) -> Iterator[Candidate]:
    stages = first.axis_size("pipe")
    if not stages <= num_microbatches <= max(MAX_MICROBATCHES, 4 * stages):
        return
    for name in PIPELINES:
        builder = SCHEDULES[name]
        for chunks in (builder.chunks,) if builder.fixed_chunks else CHUNKS:
            if stages * chunks > model.layers or not _takes(name, chunks, num_microbatches, stages):
                continue
            for remat in REMATS:
                pipeline = {"schedule": name, "chunks": chunks, "microbatches": num_microbatches}
                yield replace(first, **pipeline, remat=remat)


@cache
def _takes(name: str, chunks: int, microbatches: int, stages: int) -> bool:
    """Return whether a schedule takes so many microbatches on so many stages."""
    try:
        table_of(name, microbatches, chunks, stages)
    except ValueError:
        return False
    return True


# -- what goes together ---------------------------------------------------------------------


def candidate_features(c: Candidate) -> frozenset[str]:
    """Return the features that a candidate uses, by their names in the table of refused pairs."""
    least = replace(
        c,
        batch_size=1,
        gradient_accumulation_steps=min(c.gradient_accumulation_steps, 2),
        microbatches=None,
        chunks=None,
    )
    return _features(least)


@cache
def _features(c: Candidate) -> frozenset[str]:
    mesh = c.mesh
    builder = SCHEDULES.get(c.schedule or "")
    uses = {
        "gradient_accumulation_steps": c.gradient_accumulation_steps > 1,
        "remat": c.remat != "none",
        "offload": c.offload is not None,
        "gradient_reduction=hierarchical": c.gradient_reduction != "flat",
        "tensor_overlap_chunks": c.tensor_overlap_chunks > 1,
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
def is_compatible(features: frozenset[str]) -> bool:
    """Return whether no two of these features are refused unconditionally."""
    names = sorted(features)
    pairs = ((a, b) for n, a in enumerate(names) for b in names[n + 1 :])
    return not any(r.is_unconditional for a, b in pairs for r in refusals(a, b))
