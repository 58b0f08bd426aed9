"""--why: the one configuration that some words mean, scored though it is not among the first."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hfjax.parallel.mesh import AXES
from hfjax.parallel.offload.activations import Offload
from hfjax.parallel.remat import Remat
from hfjax.parallel.schedules.named import SCHEDULES
from hfjax.planner.candidate import Candidate
from hfjax.planner.make_plan import BuildCheck, StepPlan, facts_of, limit_of
from hfjax.planner.score import Scored
from hfjax.planner.search import ZEROS, candidates, with_host
from hfjax.utils.keywords import nearest_of

NUMBERS = ("accumulate", "microbatches", "chunks", "split_rows")
OF_WORDS = {  # setting -> what it may be
    "zero": ZEROS,
    "schedule": tuple(SCHEDULES),
    "reduction": ("flat", "hierarchical"),
    "remat": None,  # Remat and Offload know
    "offload": None,
}
FLAGS = ("sequence", "host_optimizer")
OF_HOST = ("offload", "host_optimizer")
KNOWN = (*AXES, *NUMBERS, *OF_WORDS, *FLAGS)
TRIED = 12  # agreeing candidates of which hfjax is asked whether it runs them


@dataclass(frozen=True)
class Answer:
    """What --why found.

    Attributes:
        scored: The configuration with its seconds and bytes; None: it does not run.
        fits: Whether the memory has room for it.
        refusal: Why it does not run, in hfjax's own words.
        agreeing: How many of those that were searched agree with the words; 0: none.
        asked: The configuration of the words, as far as it can be said.
    """

    scored: Scored | None
    fits: bool
    refusal: str = ""
    agreeing: int = 0
    asked: Candidate | None = None


def words_of(text: str, count: int) -> dict[str, Any]:
    """Return what the words of --why say.

    >>> words_of("pipe=8 zero=fsdp sequence", 64)
    {'pipe': 8, 'zero': 'fsdp', 'sequence': True}

    Raises:
        ValueError: A word is no axis or setting, or sides do not divide the devices.
    """
    found: dict[str, Any] = {}
    for word in text.replace(",", " ").split():
        name, equals, value = word.removeprefix("--").partition("=")
        name = name.removeprefix("mesh.").replace("-", "_")
        if name not in KNOWN:
            raise ValueError(
                f"--why {word}: no axis or setting {name!r}.{nearest_of(name, KNOWN)} Axes: "
                f"{', '.join(AXES)}. Settings: {', '.join(KNOWN[len(AXES) :])}. For instance "
                '--why "pipe=8 tensor=8 remat=full".'
            )
        if name in found:
            raise ValueError(f"--why {word}: {name} is there twice. Say it once.")
        found[name] = _value(word, name, value if equals else None)
    if not found:
        raise ValueError('--why: it is empty. Say what is meant: --why "pipe=8 tensor=8".')
    _check_sides({a: n for a, n in found.items() if a in AXES}, count)
    return found


def _value(word: str, name: str, value: str | None) -> Any:
    if name in FLAGS:
        known = {None: True, "yes": True, "true": True, "no": False, "false": False}
        if value in known:
            return known[value]
        raise ValueError(f"--why {word}: {name}, or {name}=no, is expected.")
    if name in AXES or name in NUMBERS:
        if value is not None and value.isdecimal() and int(value) > 0:
            return int(value)
        raise ValueError(f"--why {word}: {name}=NUMBER is expected, from 1 on.")
    allowed = OF_WORDS[name]
    if not value or (allowed is not None and value not in allowed):
        raise ValueError(f"--why {word}: {name}= one of {', '.join(allowed or ('none', 'full'))}.")
    if name == "remat":
        Remat.of(value)
    if name == "offload":
        if value == "none":
            return None
        Offload.of(value)
    return value


def _check_sides(sides: Mapping[str, int], count: int) -> None:
    product = math.prod(sides.values())
    if count % product == 0:
        return
    said = " ".join(f"{a}={n}" for a, n in sides.items())
    would = []
    for axis, size in sides.items():
        others = product // size
        fit = [n for n in range(1, count + 1) if count % (others * n) == 0]
        if fit:
            near = min(fit, key=lambda n: (abs(n - size), n))
            would.append(f"{axis}={near}")
    todo = f"{' or '.join(would)} would do, or " if would else ""
    raise ValueError(
        f"--why {said}: {product} devices, which do not divide --count {count}. {todo}--count "
        f"{product}."
    )


def agrees(c: Candidate, words: Mapping[str, Any]) -> bool:
    """Return whether a candidate is one that the words mean."""
    return all(_of(c, name) == value for name, value in words.items())


def _of(c: Candidate, name: str) -> Any:
    if name in AXES:
        return c.side(name)
    if name == "host_optimizer":
        return c.host == name
    return getattr(c, name)


def says_all(words: Mapping[str, Any], count: int) -> bool:
    """Return whether words leave nothing to search: all sides, and how the rows run.

    >>> says_all(words_of("fsdp=8 zero=fsdp remat=none accumulate=1", 8), 8)
    True
    >>> says_all(words_of("fsdp=8 zero=fsdp", 8), 8)
    False
    """
    sides = math.prod(n for name, n in words.items() if name in AXES)
    rows = "accumulate" in words or {"schedule", "microbatches"} <= words.keys()
    return sides == count and rows and {"zero", "remat"} <= words.keys()


def answer(plan: StepPlan, words: Mapping[str, Any], tell: Callable[[str], Any]) -> Answer:
    """Return the configuration that the words mean: the best of those searched, or a new one.

    Args:
        plan: The plan, whose first it is set beside; one of no rows, if nothing was searched.
        words: What `words_of` returns.
        tell: Called with words on what goes on.
    """
    limit = limit_of(plan.memory)
    checked = BuildCheck(plan.scorer)
    if not plan.rows:
        return _built(plan, words, checked, limit)
    found = sorted(
        _agreeing(plan, words), key=lambda s: (s.peak.total > limit, s.time.total, str(s.candidate))
    )
    tell(f"{len(found):,} of those searched agree")
    refusal = ""
    for s in found[:TRIED]:
        why = checked.refuses(s.candidate)
        if why is None:
            return Answer(s, s.peak.total <= limit, "", len(found), s.candidate)
        refusal = refusal or why
    if found:
        return Answer(None, False, refusal, len(found), found[0].candidate)
    return _built(plan, words, checked, limit)


def _agreeing(plan: StepPlan, words: Mapping[str, Any]) -> Iterator[Scored]:
    """Yield what agrees; with more on the host where the words say so, or where it does not fit."""
    scorer, limit = plan.scorer, limit_of(plan.memory)
    on_host = {name: value for name, value in words.items() if name in OF_HOST}
    others = {name: value for name, value in words.items() if name not in OF_HOST}
    for c in candidates(plan.config.batch, plan.count, facts_of(scorer), plan.machine):
        if not agrees(c, others):
            continue
        try:
            plain = scorer.score(c)
        except ValueError:
            continue
        if agrees(c, on_host):
            yield plain
        if on_host or plain.peak.total > limit:
            yield from (
                scorer.score(other)
                for other in with_host(c, scorer.layers)
                if agrees(other, on_host)
            )


def _built(plan: StepPlan, words: Mapping[str, Any], checked: BuildCheck, limit: float) -> Answer:
    """Return the answer for what was not searched: built as far as it goes."""
    c = candidate_of(words, plan.config.batch, plan.count, plan.scorer.layers)
    if why := next(_does_not_divide(c, words, plan), None):
        return Answer(None, False, why, 0, c)
    try:
        if why := checked.refuses(c):
            return Answer(None, False, why, 0, c)
        scored = plan.scorer.score(c)
    except ValueError as wrong:
        return Answer(None, False, str(wrong), 0, c)
    return Answer(scored, scored.peak.total <= limit, "", 0, c)


def candidate_of(words: Mapping[str, Any], rows: int, count: int, layers: int) -> Candidate:
    """Return a configuration of these words; what they leave open is plain."""
    sides = {axis: words.get(axis, 1) for axis in AXES}
    rest = count // math.prod(sides.values())
    fsdp = words.get("zero") == "fsdp" and "fsdp" not in words
    spare = [a for a in (("fsdp", "data") if fsdp else ("data", "fsdp")) if a not in words]
    if rest > 1 and spare:
        sides[spare[0]] = rest
    inside = any(sides[axis] > 1 for axis in ("fsdp", "expert", "context"))
    zero = words.get("zero", "fsdp" if inside else "ddp")
    taken = {n: words[n] for n in (*NUMBERS, "remat", "offload", "reduction") if n in words}
    c = Candidate(
        tuple((axis, n) for axis, n in sides.items() if n > 1),
        zero,
        rows,
        words.get("sequence", False),
        words.get("schedule"),
        host="host_optimizer" if words.get("host_optimizer") else "",
        **taken,
    )
    if c.side("pipe") > 1 or c.schedule is not None:
        name = c.schedule or "1f1b"
        builder = SCHEDULES[name]
        chunks = builder.chunks if builder.fixed else c.chunks or 2
        many = c.microbatches or min(4 * c.side("pipe"), max(rows // c.replicas, 1))
        return replace(c, schedule=name, chunks=chunks, microbatches=many)
    return c


def _does_not_divide(c: Candidate, words: Mapping[str, Any], plan: StepPlan) -> Iterator[str]:
    """Yield what does not divide, and what does."""
    if c.devices != plan.count:
        said = " ".join(f"{a}={n}" for a, n in c.sides)
        yield f"{said}: {c.devices} devices of {plan.count}. Leave an axis open, or --count it."
    if (words.get("schedule") or words.get("microbatches")) and c.side("pipe") == 1:
        yield "schedule and microbatches are of a pipeline: say pipe=2 too, or accumulate=4."
    if c.side("pipe") > 1 and c.accumulate > 1:
        yield (
            f"accumulate={c.accumulate} beside a pipeline, whose microbatches do the same: say "
            f"microbatches={c.accumulate * (c.microbatches or 1)}."
        )
    if c.schedule and (chunks := words.get("chunks")) and SCHEDULES[c.schedule].fixed:
        own = SCHEDULES[c.schedule].chunks
        if chunks != own:
            yield f"chunks={chunks}: schedule {c.schedule} always has {own}. Leave chunks out."
    yield from _rows(c)


def _rows(c: Candidate) -> Iterator[str]:
    over = " x ".join(f"{a}={c.side(a)}" for a in ("data", "fsdp", "expert") if c.side(a) > 1)
    if c.rows % c.replicas:
        low = c.rows // c.replicas * c.replicas
        would = f"{low} or {low + c.replicas}" if low else f"{c.replicas}"
        yield f"{c.rows} rows do not divide over {over}: --batch {would} would."
        return
    share = c.rows // c.replicas
    if share % c.pieces:
        name = "microbatches" if c.microbatches else "accumulate"
        fit = [str(n) for n in range(1, share + 1) if share % n == 0]
        yield (
            f"{name}={c.pieces}: a device has {share} rows ({c.rows} over {over or 'one device'}), "
            f"which so many do not divide. These do: {', '.join(_few(fit))}."
        )
    elif share // c.pieces % c.split_rows:
        yield (
            f"split_rows={c.split_rows}: a microbatch has {share // c.pieces} rows of a device. "
            "Fewer microbatches have more."
        )


def _few(fit: Sequence[str]) -> Sequence[str]:
    return fit if len(fit) <= 10 else [*fit[:8], "…", fit[-1]]
