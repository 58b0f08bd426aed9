"""--why: scores the one configuration that a query means, even if it is not among the best."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hfjax.parallel.mesh import AXES
from hfjax.parallel.offload.activations import Offload
from hfjax.parallel.remat import Remat
from hfjax.parallel.schedules.named import SCHEDULES
from hfjax.planner.candidate import Candidate
from hfjax.planner.make_plan import BuildCheck, StepPlan, limit_of, model_facts
from hfjax.planner.score import ScoredCandidate
from hfjax.planner.search import ZERO_STAGES, candidates, host_variants
from hfjax.utils.keywords import name_hint

NUMBERS = ("accumulate", "microbatches", "chunks", "split_rows")
OPTIONS = {  # setting -> its values
    "zero": ZERO_STAGES,
    "schedule": tuple(SCHEDULES),
    "reduction": ("flat", "hierarchical"),
    "remat": None,  # checked by Remat and Offload
    "offload": None,
}
FLAGS = ("sequence", "host_optimizer")
HOST_SETTINGS = ("offload", "host_optimizer")
KNOWN = (*AXES, *NUMBERS, *OPTIONS, *FLAGS)
MAX_TRIED = 12  # matching candidates of which hfjax is asked whether it runs them


@dataclass(frozen=True)
class Answer:
    """The result of --why.

    Attributes:
        scored: The configuration with its seconds and bytes; None: it does not run.
        fits: Whether it fits in memory.
        refusal: Why it does not run, in hfjax's own words.
        num_matches: Number of searched candidates that match the query; 0: none.
        candidate: The configuration of the query, as far as it is known.
    """

    scored: ScoredCandidate | None
    fits: bool
    refusal: str = ""
    num_matches: int = 0
    candidate: Candidate | None = None


def parse_query(text: str, count: int) -> dict[str, Any]:
    """Return the settings in a query of --why.

    >>> parse_query("pipe=8 zero=fsdp sequence", 64)
    {'pipe': 8, 'zero': 'fsdp', 'sequence': True}

    Raises:
        ValueError: A word is no axis or setting, or axis sizes do not divide the devices.
    """
    query: dict[str, Any] = {}
    for term in text.replace(",", " ").split():
        name, equals, value = term.removeprefix("--").partition("=")
        name = name.removeprefix("mesh.").replace("-", "_")
        if name not in KNOWN:
            raise ValueError(
                f"--why {term}: no axis or setting {name!r}.{name_hint(name, KNOWN)} Axes: "
                f"{', '.join(AXES)}. Settings: {', '.join(KNOWN[len(AXES) :])}. For instance "
                '--why "pipe=8 tensor=8 remat=full".'
            )
        if name in query:
            raise ValueError(f"--why {term}: {name} is there twice. Say it once.")
        query[name] = _parse_value(term, name, value if equals else None)
    if not query:
        raise ValueError('--why: it is empty. Say what is meant: --why "pipe=8 tensor=8".')
    _check_axis_sizes({a: n for a, n in query.items() if a in AXES}, count)
    return query


def _parse_value(term: str, name: str, value: str | None) -> Any:
    if name in FLAGS:
        known = {None: True, "yes": True, "true": True, "no": False, "false": False}
        if value in known:
            return known[value]
        raise ValueError(f"--why {term}: {name}, or {name}=no, is expected.")
    if name in AXES or name in NUMBERS:
        if value is not None and value.isdecimal() and int(value) > 0:
            return int(value)
        raise ValueError(f"--why {term}: {name}=NUMBER is expected, from 1 on.")
    allowed = OPTIONS[name]
    if not value or (allowed is not None and value not in allowed):
        raise ValueError(f"--why {term}: {name}= one of {', '.join(allowed or ('none', 'full'))}.")
    if name == "remat":
        Remat.of(value)
    if name == "offload":
        if value == "none":
            return None
        Offload.of(value)
    return value


def _check_axis_sizes(axis_sizes: Mapping[str, int], count: int) -> None:
    product = math.prod(axis_sizes.values())
    if count % product == 0:
        return
    text = " ".join(f"{a}={n}" for a, n in axis_sizes.items())
    would = []
    for axis, size in axis_sizes.items():
        others = product // size
        fit = [n for n in range(1, count + 1) if count % (others * n) == 0]
        if fit:
            near = min(fit, key=lambda n: (abs(n - size), n))
            would.append(f"{axis}={near}")
    todo = f"{' or '.join(would)} would do, or " if would else ""
    raise ValueError(
        f"--why {text}: {product} devices, which do not divide --count {count}. {todo}--count "
        f"{product}."
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


def is_complete(query: Mapping[str, Any], count: int) -> bool:
    """Return whether a query leaves nothing to search: all axis sizes, and how the batch runs.

    >>> is_complete(parse_query("fsdp=8 zero=fsdp remat=none accumulate=1", 8), 8)
    True
    >>> is_complete(parse_query("fsdp=8 zero=fsdp", 8), 8)
    False
    """
    devices = math.prod(n for name, n in query.items() if name in AXES)
    has_microbatches = "accumulate" in query or {"schedule", "microbatches"} <= query.keys()
    return devices == count and has_microbatches and {"zero", "remat"} <= query.keys()


def find_answer(plan: StepPlan, query: Mapping[str, Any], log: Callable[[str], Any]) -> Answer:
    """Return the configuration that a query means: the best match of the search, or a new one.

    Args:
        plan: The plan, whose best it is compared with; without entries if nothing was searched.
        query: The result of `parse_query`.
        log: Called with progress messages.
    """
    limit = limit_of(plan.memory)
    build_check = BuildCheck(plan.scorer)
    if not plan.entries:
        return _build_answer(plan, query, build_check, limit)
    matches = sorted(
        _matching_candidates(plan, query),
        key=lambda s: (s.peak.total > limit, s.time.total, str(s.candidate)),
    )
    log(f"{len(matches):,} of those searched agree")
    refusal = ""
    for s in matches[:MAX_TRIED]:
        why = build_check.refusal(s.candidate)
        if why is None:
            return Answer(s, s.peak.total <= limit, "", len(matches), s.candidate)
        refusal = refusal or why
    if matches:
        return Answer(None, False, refusal, len(matches), matches[0].candidate)
    return _build_answer(plan, query, build_check, limit)


def _matching_candidates(plan: StepPlan, query: Mapping[str, Any]) -> Iterator[ScoredCandidate]:
    """Yield the matches; with more in host memory if the query says so, or if they do not fit."""
    scorer, limit = plan.scorer, limit_of(plan.memory)
    on_host = {name: value for name, value in query.items() if name in HOST_SETTINGS}
    others = {name: value for name, value in query.items() if name not in HOST_SETTINGS}
    for c in candidates(plan.config.batch, plan.count, model_facts(scorer), plan.machine):
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


def _build_answer(
    plan: StepPlan, query: Mapping[str, Any], build_check: BuildCheck, limit: float
) -> Answer:
    """Return the answer for what was not searched: built as far as it goes."""
    c = candidate_of(query, plan.config.batch, plan.count, plan.scorer.layers)
    if why := next(_indivisible_reasons(c, query, plan), None):
        return Answer(None, False, why, 0, c)
    try:
        if why := build_check.refusal(c):
            return Answer(None, False, why, 0, c)
        scored = plan.scorer.score(c)
    except ValueError as wrong:
        return Answer(None, False, str(wrong), 0, c)
    return Answer(scored, scored.peak.total <= limit, "", 0, c)


def candidate_of(query: Mapping[str, Any], batch_size: int, count: int, layers: int) -> Candidate:
    """Return a configuration of a query; what it leaves open gets a plain default."""
    axis_sizes = {axis: query.get(axis, 1) for axis in AXES}
    rest = count // math.prod(axis_sizes.values())
    fsdp = query.get("zero") == "fsdp" and "fsdp" not in query
    spare = [a for a in (("fsdp", "data") if fsdp else ("data", "fsdp")) if a not in query]
    if rest > 1 and spare:
        axis_sizes[spare[0]] = rest
    inside = any(axis_sizes[axis] > 1 for axis in ("fsdp", "expert", "context"))
    zero = query.get("zero", "fsdp" if inside else "ddp")
    options = {n: query[n] for n in (*NUMBERS, "remat", "offload", "reduction") if n in query}
    c = Candidate(
        tuple((axis, n) for axis, n in axis_sizes.items() if n > 1),
        zero,
        batch_size,
        query.get("sequence", False),
        query.get("schedule"),
        host="host_optimizer" if query.get("host_optimizer") else "",
        **options,
    )
    if c.axis_size("pipe") > 1 or c.schedule is not None:
        name = c.schedule or "1f1b"
        builder = SCHEDULES[name]
        chunks = builder.chunks if builder.fixed_chunks else c.chunks or 2
        many = c.microbatches or min(4 * c.axis_size("pipe"), max(batch_size // c.replicas, 1))
        return replace(c, schedule=name, chunks=chunks, microbatches=many)
    return c


def _indivisible_reasons(c: Candidate, query: Mapping[str, Any], plan: StepPlan) -> Iterator[str]:
    """Yield what does not divide, and what would."""
    if c.devices != plan.count:
        text = " ".join(f"{a}={n}" for a, n in c.axis_sizes)
        yield f"{text}: {c.devices} devices of {plan.count}. Leave an axis open, or --count it."
    if (query.get("schedule") or query.get("microbatches")) and c.axis_size("pipe") == 1:
        yield "schedule and microbatches are of a pipeline: say pipe=2 too, or accumulate=4."
    if c.axis_size("pipe") > 1 and c.accumulate > 1:
        yield (
            f"accumulate={c.accumulate} beside a pipeline, whose microbatches do the same: say "
            f"microbatches={c.accumulate * (c.microbatches or 1)}."
        )
    if c.schedule and (chunks := query.get("chunks")) and SCHEDULES[c.schedule].fixed_chunks:
        own = SCHEDULES[c.schedule].chunks
        if chunks != own:
            yield f"chunks={chunks}: schedule {c.schedule} always has {own}. Leave chunks out."
    yield from _batch_errors(c)


def _batch_errors(c: Candidate) -> Iterator[str]:
    over = " x ".join(
        f"{a}={c.axis_size(a)}" for a in ("data", "fsdp", "expert") if c.axis_size(a) > 1
    )
    if c.batch_size % c.replicas:
        low = c.batch_size // c.replicas * c.replicas
        would = f"{low} or {low + c.replicas}" if low else f"{c.replicas}"
        yield f"{c.batch_size} rows do not divide over {over}: --batch {would} would."
        return
    share = c.batch_size // c.replicas
    if share % c.num_microbatches:
        name = "microbatches" if c.microbatches else "accumulate"
        fit = [str(n) for n in range(1, share + 1) if share % n == 0]
        yield (
            f"{name}={c.num_microbatches}: a device has {share} rows ({c.batch_size} over "
            f"{over or 'one device'}), "
            f"which so many do not divide. These do: {', '.join(_few(fit))}."
        )
    elif share // c.num_microbatches % c.split_rows:
        yield (
            f"split_rows={c.split_rows}: a microbatch has {share // c.num_microbatches} rows of a "
            "device. "
            "Fewer microbatches have more."
        )


def _few(fit: Sequence[str]) -> Sequence[str]:
    return fit if len(fit) <= 10 else [*fit[:8], "…", fit[-1]]
