"""Scores the one layout that flags or a second file describe, even if it is not among the best."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hfjax.parallel.mesh import AXES
from hfjax.parallel.schedules.named import SCHEDULES
from hfjax.planner.candidate import ZERO_STAGES, Candidate, effective_zero
from hfjax.planner.make_plan import BuildCheck, StepPlan, fits_memory, limit_of, model_facts, rank
from hfjax.planner.score import ScoredCandidate
from hfjax.planner.search import candidates, host_variants
from hfjax.trainer.config import TrainConfig
from hfjax.trainer.strategy import mesh_sizes, zero_stage

# Flag of `hfjax train` -> field of a candidate; mesh.AXIS is the size of an axis.
FIELDS = {
    "zero": "zero",
    "sequence_parallel": "sequence",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "remat": "remat",
    "tensor_overlap_chunks": "tensor_overlap_chunks",
    "gradient_reduction": "gradient_reduction",
    "pipeline.schedule": "schedule",
    "pipeline.microbatches": "microbatches",
    "pipeline.chunks": "chunks",
    "offload.activations": "offload",
    "offload.optimizer": "host_optimizer",
    **{f"mesh.{axis}": axis for axis in AXES},
}
FLAGS = {field: f"--{flag.replace('_', '-')}" for flag, field in FIELDS.items()}
OPTIONS = (
    "gradient_accumulation_steps",
    "microbatches",
    "chunks",
    "tensor_overlap_chunks",
    "remat",
    "offload",
    "gradient_reduction",
)
HOST_SETTINGS = ("offload", "host_optimizer")
MAX_TRIED = 12  # matching candidates of which hfjax is asked whether it runs them


@dataclass(frozen=True)
class Answer:
    """The score of a layout.

    Attributes:
        scored: The configuration with its seconds and bytes; None: it does not run.
        fits: Whether it fits in memory.
        refusal: Why it does not run, in hfjax's own words.
        num_matches: Number of searched candidates that match the query; 0: none.
        queried_candidate: The configuration of the query, as far as it is known.
    """

    scored: ScoredCandidate | None
    fits: bool
    refusal: str = ""
    num_matches: int = 0
    queried_candidate: Candidate | None = None


def query_of(config: TrainConfig, flags: Sequence[str], count: int) -> dict[str, Any]:
    """Return the fields of candidates that flags fix.

    Args:
        config: A configuration with the values of the flags.
        flags: The flags, without dashes.
        count: Number of devices.

    >>> from hfjax.trainer.config import MeshConfig
    >>> query_of(TrainConfig(mesh=MeshConfig(pipe=8, fsdp=2)), ["mesh.pipe", "mesh.fsdp"], 64)
    {'pipe': 8, 'fsdp': 2, 'zero': 'fsdp'}

    Raises:
        ValueError: Axis sizes do not divide the devices.
    """
    sizes, zero = vars(config.mesh), ZERO_STAGES[zero_stage(config)]
    if any(size is not None and size < 1 for size in sizes.values()):
        sizes = mesh_sizes(config.mesh, count)  # with -1 the flags say the size of every axis
        flags, zero = [*flags, *(f"mesh.{axis}" for axis in AXES)], effective_zero(zero, sizes)
    values = {
        "zero": zero,
        "sequence": config.sequence_parallel and sizes["row"] == 1,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "remat": config.remat,
        "tensor_overlap_chunks": config.tensor_overlap_chunks,
        "gradient_reduction": config.gradient_reduction,
        **vars(config.pipeline),
        "offload": config.offload.activations,
        "host_optimizer": config.offload.optimizer,
        **sizes,
    }
    fields = [FIELDS[flag] for flag in flags if flag in FIELDS]
    none = ("offload",)  # fields of which None is a value; elsewhere it leaves the field open
    query = {name: values[name] for name in fields if values[name] is not None or name in none}
    _check_axis_sizes({axis: n for axis, n in query.items() if axis in AXES}, count)
    return {**query, "zero": zero} if query.get("fsdp", 1) > 1 else query


def full_query(config: TrainConfig, count: int) -> dict[str, Any]:
    """Return the fields of candidates that a configuration fixes: all that it has.

    >>> query = full_query(TrainConfig(), 8)
    >>> query["data"], query["gradient_accumulation_steps"]
    (8, 1)
    """
    c = Candidate.of(config, count)
    sizes = {axis: c.axis_size(axis) for axis in AXES}
    query = {**sizes, "zero": c.zero, "host_optimizer": bool(c.host), "sequence": c.sequence}
    query |= {
        name: getattr(c, name)
        for name in ("remat", "offload", "tensor_overlap_chunks", "gradient_reduction")
    }
    query["gradient_accumulation_steps"] = c.gradient_accumulation_steps
    if c.schedule is None:
        return query
    return {**query, "schedule": c.schedule, "microbatches": c.microbatches, "chunks": c.chunks}


def _check_axis_sizes(axis_sizes: Mapping[str, int], count: int) -> None:
    product = math.prod(axis_sizes.values())
    if count % product == 0:
        return
    text = " ".join(f"--mesh.{a} {n}" for a, n in axis_sizes.items())
    would = []
    for axis, size in axis_sizes.items():
        others = product // size
        fit = [n for n in range(1, count + 1) if count % (others * n) == 0]
        if fit:
            near = min(fit, key=lambda n: (abs(n - size), n))
            would.append(f"--mesh.{axis} {near}")
    todo = f"{' or '.join(would)} would do, or " if would else ""
    raise ValueError(
        f"{text}: {product} devices, which do not divide --count {count}. {todo}--count {product}."
    )


def matches_query(c: Candidate, query: Mapping[str, Any]) -> bool:
    """Return whether a candidate matches a query."""
    return all(_setting(c, name) == value for name, value in query.items())


def _setting(c: Candidate, name: str) -> Any:
    if name in AXES:
        return c.axis_size(name)
    if name == "host_optimizer":
        return c.host == name
    return getattr(c, name)


def find_answer(plan: StepPlan, query: Mapping[str, Any], log: Callable[[str], Any]) -> Answer:
    """Return the configuration that a query means: the best match of the search, or a new one.

    Args:
        plan: The plan, whose best it is compared with.
        query: The result of `query_of` or `full_query`.
        log: Called with progress messages.
    """
    build_check = BuildCheck(plan.scorer)
    matches = sorted(
        (_as_planned(s, plan) for s in _matching_candidates(plan, query)),
        key=lambda s: (not fits_memory(s, plan.memory), rank(s)),
    )
    log(f"{len(matches):,} of those searched agree")
    refusal = ""
    for s in matches[:MAX_TRIED]:
        why = build_check.refusal(s.candidate)
        if why is None:
            return Answer(s, fits_memory(s, plan.memory), "", len(matches), s.candidate)
        refusal = refusal or why
    if matches:
        return Answer(None, False, refusal, len(matches), matches[0].candidate)
    return _build_answer(plan, query, build_check)


def _as_planned(s: ScoredCandidate, plan: StepPlan) -> ScoredCandidate:
    """Return a candidate with the numbers of its entry in the plan, which may be compiled."""
    entries = (entry for entry in (*plan.entries, *plan.others) if entry.candidate == s.candidate)
    entry = next(entries, None)
    if entry is None:
        return s
    return ScoredCandidate(entry.candidate, entry.time, entry.peak, entry.compiled)


def _matching_candidates(plan: StepPlan, query: Mapping[str, Any]) -> Iterator[ScoredCandidate]:
    """Yield the matches; with more in host memory if the query says so, or if they do not fit."""
    scorer, limit = plan.scorer, limit_of(plan.memory)
    on_host = {name: value for name, value in query.items() if name in HOST_SETTINGS}
    others = {name: value for name, value in query.items() if name not in HOST_SETTINGS}
    for c in candidates(
        plan.config.global_batch_size, plan.count, model_facts(scorer), plan.machine
    ):
        if not matches_query(c, others):
            continue
        try:
            plain = scorer.score(c)
        except ValueError:
            continue
        if matches_query(c, on_host):
            yield plain
        if on_host or plain.peak.total > limit:
            yield from (
                scorer.score(other)
                for other in host_variants(c, scorer.layers)
                if matches_query(other, on_host)
            )


def _build_answer(plan: StepPlan, query: Mapping[str, Any], build_check: BuildCheck) -> Answer:
    """Return the answer for what was not searched: built as far as it goes."""
    c = candidate_of(query, plan.config.global_batch_size, plan.count)
    if why := next(_indivisible_reasons(c, query, plan), None):
        return Answer(None, False, why, 0, c)
    try:
        if why := build_check.refusal(c):
            return Answer(None, False, why, 0, c)
        scored = plan.scorer.score(c)
    except ValueError as wrong:
        return Answer(None, False, str(wrong), 0, c)
    return Answer(scored, fits_memory(scored, plan.memory), "", 0, c)


def candidate_of(query: Mapping[str, Any], batch_size: int, count: int) -> Candidate:
    """Return a configuration of a query; what it leaves open has the default of `hfjax train`.

    >>> c = candidate_of({"tensor": 2, "remat": "every:2"}, 32, 8)
    >>> c.axis_sizes, c.zero, c.sequence
    ((('data', 4), ('tensor', 2)), 'ddp', True)
    """
    axis_sizes = {axis: query.get(axis, 1) for axis in AXES}
    rest = count // math.prod(axis_sizes.values())
    spare = [axis for axis in ("data", "fsdp") if axis not in query]
    if rest > 1 and spare:
        axis_sizes[spare[0]] = rest
    zero = query.get("zero", "fsdp" if axis_sizes["fsdp"] > 1 else "ddp")
    options = {n: query[n] for n in OPTIONS if n in query}
    tensor = axis_sizes["tensor"] > 1 and axis_sizes["row"] == 1
    c = Candidate(
        tuple((axis, n) for axis, n in axis_sizes.items() if n > 1),
        zero,
        batch_size,
        query.get("sequence", True) and tensor,
        query.get("schedule"),
        host="host_optimizer" if query.get("host_optimizer") else "",
        **options,
    )
    if c.axis_size("pipe") > 1 or c.schedule is not None:
        name = c.schedule or "1f1b"
        chunks = c.chunks or SCHEDULES[name].chunks
        many = c.microbatches or min(4 * c.axis_size("pipe"), max(batch_size // c.replicas, 1))
        return replace(c, schedule=name, chunks=chunks, microbatches=many)
    return c


def _indivisible_reasons(c: Candidate, query: Mapping[str, Any], plan: StepPlan) -> Iterator[str]:
    """Yield what does not divide, and what would."""
    if c.devices != plan.count:
        text = " ".join(f"--mesh.{axis} {n}" for axis, n in c.axis_sizes)
        yield (
            f"{text}: that is a mesh of {c.devices} of the {plan.count} devices. Leave out the "
            f"size of an axis, or give --count {c.devices}."
        )
    if (query.get("schedule") or query.get("microbatches")) and c.axis_size("pipe") == 1:
        yield (
            "--pipeline.schedule and --pipeline.microbatches are of a pipeline, and --mesh.pipe is "
            "1. Give --mesh.pipe 2 too, or --gradient-accumulation-steps 4 in their place."
        )
    if c.axis_size("pipe") > 1 and c.gradient_accumulation_steps > 1:
        yield (
            f"--gradient-accumulation-steps {c.gradient_accumulation_steps} beside --mesh.pipe "
            f"{c.axis_size('pipe')}: microbatches of a pipeline do the same. Give "
            f"--pipeline.microbatches {c.num_microbatches} in its place."
        )
    yield from _batch_errors(c)


def _batch_errors(c: Candidate) -> Iterator[str]:
    over = " x ".join(
        f"{a}={c.axis_size(a)}" for a in ("data", "fsdp", "expert") if c.axis_size(a) > 1
    )
    if c.batch_size % c.replicas:
        low = c.batch_size // c.replicas * c.replicas
        would = f"{low} or {low + c.replicas}" if low else f"{c.replicas}"
        yield (
            f"{c.batch_size} examples do not divide over {over}. --global-batch-size {would} would."
        )
        return
    share = c.batch_size // c.replicas
    if share % c.num_microbatches:
        flag = FLAGS["microbatches" if c.microbatches else "gradient_accumulation_steps"]
        fit = [str(n) for n in range(1, share + 1) if share % n == 0]
        yield (
            f"{flag} {c.num_microbatches}: a device has {share} examples ({c.batch_size} over "
            f"{over or 'one device'}), which so many do not divide. These do: "
            f"{', '.join(_few(fit))}."
        )
    elif share // c.num_microbatches % c.tensor_overlap_chunks:
        yield (
            f"{FLAGS['tensor_overlap_chunks']} {c.tensor_overlap_chunks}: a microbatch has "
            f"{share // c.num_microbatches} examples on a device, which so many do not divide. "
            "Fewer microbatches have more."
        )


def _few(fit: Sequence[str]) -> Sequence[str]:
    return fit if len(fit) <= 10 else [*fit[:8], "…", fit[-1]]
