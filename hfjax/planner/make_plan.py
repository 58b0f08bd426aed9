"""A plan: scores every candidate, ranks those that fit, and explains why the others lose."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from itertools import takewhile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

import hfjax
from hfjax.analysis.targets import GPUS, can_compile_for_gpus, memory_fraction, target_devices
from hfjax.hardware.machine import MACHINES, Machine
from hfjax.parallel.mesh import AXES, EXPERTS
from hfjax.planner.candidate import Candidate
from hfjax.planner.corrections import correct_score
from hfjax.planner.explain import reason_of
from hfjax.planner.memory_model import ArrayPlacements
from hfjax.planner.peak_memory import Peak
from hfjax.planner.programs.compile_candidates import CompileFailure, compile_candidate
from hfjax.planner.programs.compile_step import ProgramStats
from hfjax.planner.score import ScoredCandidate, Scorer
from hfjax.planner.search import ModelFacts, candidates, host_variants
from hfjax.planner.step_time import StepTime
from hfjax.trainer.config import TrainConfig
from hfjax.utils.tables import align, human

MAX_ENTRIES = 20  # entries that are checked and kept
MARGIN = 0.05  # fraction of memory that stays free when a formula says that a step fits
MAX_OTHERS = 10  # of those that would be faster if they fitted
MOST_DEVICES = 2**20
FAR_OVER_MEMORY = 2.0  # times the memory: what takes more does not nearly fit


@dataclass(frozen=True)
class CompileOptions:
    """What is compiled for a plan.

    Attributes:
        best: Number of the best candidates to compile.
        limit: Seconds for each compilation. None: 60, and 240 for a pipeline.
        cache: Folder in which results are kept. None: in the user's cache.
    """

    best: int = 4
    limit: float | None = None
    cache: Path | None = None


@dataclass(frozen=True)
class PlanEntry:
    """A candidate of a plan.

    Attributes:
        candidate: How the step runs.
        time: Its seconds by part (`time.parts`, `time.total`).
        peak: Its bytes on a device by part (`peak.parts`, `peak.total`).
        fits: Whether it fits in memory, with a margin.
        reason: Unless it is the best: the largest part by which it loses.
        tokens: Tokens per second per device.
        mfu: FLOP that the model needs, as a fraction of the GPU's peak.
        compiled: Statistics of the compiled program, where there is one.
    """

    candidate: Candidate
    time: StepTime
    peak: Peak
    fits: bool
    reason: str
    tokens: float
    mfu: float
    compiled: ProgramStats | None = None


@dataclass(frozen=True)
class StepPlan:
    """What `make_plan` returns; it prints as a table.

    Attributes:
        entries: What fits, the fastest first.
        others: The best of those that do not fit, and why.
        machine: The constants that were used.
        memory: Bytes of a device that a step may use.
        count: Number of devices.
        config: The settings of the run.
        searched: Number of candidates that were scored.
        refused: Number that were not: something does not divide, or hfjax refuses them.
        seconds: How long planning took.
        notes: Caveats.
        scorer: The scorer, for further candidates of the same run.
    """

    entries: tuple[PlanEntry, ...]
    others: tuple[PlanEntry, ...]
    machine: Machine
    memory: int
    count: int
    config: TrainConfig
    searched: int
    refused: int
    seconds: float
    notes: tuple[str, ...]
    scorer: Scorer = field(repr=False, compare=False)

    def __str__(self) -> str:
        head = ("step", "tokens/s", "MFU", "peak", "layout", "why not the first")
        cells = [
            (f"{r.time.total * 1e3:.1f} ms", f"{r.tokens:,.0f}", f"{r.mfu:.1%}",
             human(r.peak.total), str(r.candidate), r.reason)
            for r in (*self.entries, *self.others)
        ]  # fmt: skip
        batch_size = self.config.global_batch_size
        title = f"{self.count} x {self.machine.name}, {batch_size} examples in a step"
        return "\n".join([title, *align([head, *cells], numbers=(0, 1, 2, 3))])

    @property
    def best(self) -> PlanEntry:
        """The first entry."""
        return self.entries[0]

    def settings(self, entry: PlanEntry | None = None) -> TrainConfig:
        """Return the settings of `hfjax train` for an entry; None: the best."""
        return (entry or self.best).candidate.settings(self.config)


def make_plan(
    config: TrainConfig,
    *,
    gpu: str | Machine = "h200",
    count: int = 8,
    vocab: int | None = None,
    memory: int | None = None,
    compile: int | CompileOptions = 0,
    tell: Callable[[str], Any] = lambda message: None,
) -> StepPlan:
    """Return the best layouts of a run's step on `count` GPUs, by formula.

    Args:
        config: The settings of the run: model, precision, optimizer and `global_batch_size`, the
            examples of a step. Settings of the layout (mesh, zero, pipeline, remat …) are searched.
        gpu: GPU name (a100, h100, h200, b200), or a `Machine` of constants.
        count: Number of GPUs.
        vocab: Vocabulary size. None: that of the data.
        memory: Bytes of a device that a step may use. None: what JAX takes of it.
        compile: Number of the best to compile for the GPU and correct by their programs; or a
            `CompileOptions`, which says more.
        tell: Called with progress messages.

    Raises:
        ValueError: Nothing fits, or nothing divides: the message says what would.

    Example:
        >>> import hfjax
        >>> from hfjax.trainer.config import ModelConfig, TrainConfig
        >>> model = ModelConfig(preset="gpt-tiny")
        >>> config = TrainConfig(global_batch_size=16, precision="bf16", model=model)
        >>> plan = hfjax.make_plan(config, gpu="h200", count=2, vocab=256)
        >>> plan.best.fits, plan.best.candidate.devices
        (True, 2)
    """
    began = time.perf_counter()
    empty = empty_plan(config, gpu=gpu, count=count, vocab=vocab, memory=memory)
    config, scorer, machine, memory = empty.config, empty.scorer, empty.machine, empty.memory
    compiles = scorer.compile_for is not None
    tell("reading the model")
    facts = model_facts(scorer)
    build_check = BuildCheck(scorer)
    limit = limit_of(memory)
    pool = CandidatePool(scorer, limit)
    for candidate in candidates(config.global_batch_size, count, facts, machine):
        pool.add(candidate)
    if pool.smallest is None:
        raise ValueError(_indivisible_message(config, scorer, count))
    fitting = [s for s in pool.scored if s.peak.total <= limit]
    others = [s for s in pool.scored if s.peak.total > limit]
    if not fitting:
        raise ValueError(_too_large_message(pool, scorer, count, memory))
    tell(f"checking the best of {pool.searched}")
    scored, compile_notes = (
        list(build_check.first_runnable(rank_candidates(fitting, scorer), MAX_ENTRIES)),
        [],
    )
    if not scored:
        c, why = next(iter(build_check.reasons.items()))
        raise ValueError(f"none of the {len(fitting)} ways that fit can run; the first, {c}: {why}")
    options = compile if isinstance(compile, CompileOptions) else CompileOptions(compile)
    if options.best and compiles:
        scored, compile_notes = _compile_best(scored, options, scorer, count, memory, tell)
    if not fits_memory(best := scored[0], memory):
        raise ValueError(
            f"nothing fits: {len(scored)} ways were compiled that should by formula, and the first "
            f"({best.candidate}) takes {human(best.peak.total)} of {human(memory)}. Take more "
            "devices, fewer tokens in a step, or --device-memory a little lower, so that others "
            "are tried."
        )
    near = takewhile(lambda s: rank(s)[0] <= rank(best)[0], rank_candidates(others, scorer))
    faster = build_check.first_runnable(
        (s for s in near if s.time.total < best.time.total), MAX_OTHERS
    )
    rest = [s for s in scored if s is not best]
    entries = [plan_entry(s, best, empty) for s in (best, *rest, *faster)]
    return replace(
        empty,
        entries=tuple(r for r in entries if r.fits),
        others=tuple(r for r in entries if not r.fits),
        searched=pool.searched,
        refused=pool.refused + build_check.refused,
        seconds=time.perf_counter() - began,
        notes=(
            *_notes(scorer, facts),
            *_replication_notes(scorer, best.candidate, count),
            *compile_notes,
        ),
    )


def empty_plan(
    config: TrainConfig,
    *,
    gpu: str | Machine,
    count: int,
    vocab: int | None = None,
    memory: int | None = None,
) -> StepPlan:
    """Return a plan without entries that scores what it is asked; arguments as of `make_plan`."""
    machine = gpu if isinstance(gpu, Machine) else machine_by_name(gpu)
    compiles = machine.key in GPUS and can_compile_for_gpus()
    target = machine.key if compiles else None
    run = Scorer(config, vocab, machine, target).base_run
    config = replace(config, precision=run.precision_on(machine))
    scorer = Scorer(config, vocab, machine, target)
    if memory is None:
        memory = int(memory_share(machine) * machine.memory)
    return StepPlan((), (), machine, memory, count, config, 0, 0, 0.0, (), scorer)


def machine_by_name(gpu: str) -> Machine:
    """Return the constants of a GPU.

    Raises:
        ValueError: There is no file for it.
    """
    if gpu in MACHINES:
        return MACHINES[gpu]
    raise ValueError(
        f"gpu {gpu!r}: there are constants of {', '.join(MACHINES)}. For another one measure them "
        "on it (hfjax plan --calibrate here) and give the file: --gpu FILE.toml, or "
        'gpu=Machine.load("FILE.toml").'
    )


def memory_share(machine: Machine) -> float:
    """Return the fraction of a device's memory that JAX takes."""
    return 1.0 if machine.platform == "cpu" else memory_fraction()


def model_facts(scorer: Scorer) -> ModelFacts:
    """Return what a search needs to know of a run's model."""
    layout, calls = scorer.base_run.layout, scorer.calls
    counts = [a.shape[a.axes.index(EXPERTS)] for a in layout.arrays.values() if EXPERTS in a.axes]
    experts = math.gcd(*counts) if calls.mixtures else 0
    model = layout.template.abstract("train")
    refuses = {*getattr(type(model), "refuses", {}), *(() if calls.attentions else ("context",))}
    is_text = scorer.base_run.task.unit == "tokens"
    return ModelFacts(
        layers=scorer.layers if layout.template.is_layer_stack else 0,
        length=scorer.length,
        experts=experts,
        refused_axes=frozenset(refuses),
        supports_grid=is_text and not experts and bool(scorer.profile("none").linear_maps),
        has_layer_stack=layout.template.is_layer_stack,
    )


@dataclass(frozen=True)
class SizedCandidate:
    """A candidate with its bytes, and a lower bound of its step time."""

    candidate: Candidate
    placements: ArrayPlacements
    peak: Peak
    min_seconds: float


def rank_candidates(
    sized_candidates: Sequence[SizedCandidate], scorer: Scorer
) -> Iterator[ScoredCandidate]:
    """Yield candidates as `rank` orders them.

    The collectives of a candidate are computed only when no candidate that is known to be faster is
    left: a small part of a hundred thousand candidates.
    """
    scored: dict[int, ScoredCandidate] = {}
    heap = [(round(s.min_seconds, 7), -1.0, 0, n) for n, s in enumerate(sized_candidates)]
    heapify(heap)
    while heap:
        n = heappop(heap)[-1]
        if n in scored:
            yield scored.pop(n)
            continue
        s = sized_candidates[n]
        scored[n] = ScoredCandidate(s.candidate, scorer.time(s.candidate, s.placements), s.peak)
        heappush(heap, (*rank(scored[n]), n))


class CandidatePool:
    """Scores candidates as they come; skips those that another one makes pointless.

    Skipped are remat of a candidate that fits without it, and microbatches no smaller than one that
    took far too much memory.
    """

    def __init__(self, scorer: Scorer, limit: float) -> None:
        self.scorer, self.limit = scorer, limit
        self.scored: list[SizedCandidate] = []
        self.searched = self.refused = 0
        self.smallest: tuple[float, ArrayPlacements, Candidate] | None = None  # fewest bytes
        self._indivisible: set[Any] = set()  # layouts in which something does not divide
        self._oversized: dict[Any, float] = {}  # how a step runs -> microbatch size far too large
        self._last_fitting: Candidate | None = None  # the last that fits and keeps all residuals

    def add(self, c: Candidate) -> None:
        """Score a candidate, and variants with more in host memory if it does not fit."""
        layout = c.mesh, c.strategy_names, c.schedule, c.chunks
        if layout in self._indivisible:
            self.refused += 1
            return
        plain, run_key = (
            replace(c, remat="none", tensor_overlap_chunks=1),
            (*layout, c.remat, c.tensor_overlap_chunks),
        )
        if c.remat != "none" and plain == self._last_fitting:
            return
        if c.microbatch_size >= self._oversized.get(run_key, math.inf):
            return
        try:
            fits = self._score(c)
        except ValueError:
            self._indivisible.add(layout)
            self.refused += 1
            return
        if fits is None:
            self._oversized[run_key] = c.microbatch_size
        if not fits:
            for other in host_variants(c, self.scorer.layers):
                self._score(other)
        elif c == plain and c.schedule is None and self._keeps_all(c):
            self._last_fitting = c

    def _record_smallest(self, size: float, placements: ArrayPlacements, c: Candidate) -> None:
        if self.smallest is None or size < self.smallest[0]:
            self.smallest = size, placements, c

    def _keeps_all(self, c: Candidate) -> bool:
        return self.scorer.layer_mode(c, self.scorer.placements(c)) == "unrolled"

    def _score(self, c: Candidate) -> bool | None:
        """Return whether a candidate fits; None: far from it."""
        placements = self.scorer.placements(c)
        if placements.state > self.limit:
            self._record_smallest(placements.state + placements.gradients, placements, c)
            return False
        self.searched += 1
        peak = self.scorer.peak(c, placements)
        self._record_smallest(peak.total, placements, c)
        if peak.total > FAR_OVER_MEMORY * self.limit and self.scored:
            return None
        self.scored.append(SizedCandidate(c, placements, peak, self.scorer.min_time(c, placements)))
        return peak.total <= self.limit


class BuildCheck:
    """Builds the layouts and steps of candidates, to leave out what hfjax refuses.

    One device stands for all of a mesh: nothing is compiled, and any number of devices is quick.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.scorer, self.refused = scorer, 0
        self.reasons: dict[Candidate, str] = {}

    def first_runnable(
        self, scored: Iterable[ScoredCandidate], limit: int
    ) -> list[ScoredCandidate]:
        """Return the first of these that hfjax can run."""
        runnable: list[ScoredCandidate] = []
        seen_ranks: set[Any] = set()  # the same step under other names
        for s in scored:
            if len(runnable) == limit:
                break
            if rank(s)[:2] in seen_ranks:
                continue
            why = self.refusal(s.candidate)
            if why is None:
                runnable.append(s)
                seen_ranks.add(rank(s)[:2])
            else:
                self.reasons[s.candidate] = why
                self.refused += 1
        return runnable

    def refusal(self, c: Candidate) -> str | None:
        """Return why hfjax refuses a candidate, None if it does not."""
        one = self.scorer.base_run
        try:
            mesh = self._mesh(c)
            layout = hfjax.layout(one.model.init, one.layout.optimizer, mesh, c.strategy)
            execution = {**one.execution, **c.execution}
            hfjax.train_step(layout, one.model.loss, **execution)
        except ValueError as error:
            return str(error)
        return None

    def _mesh(self, c: Candidate) -> Mesh:
        grid = np.full(tuple(c.mesh.values()), self._device)
        return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))

    @cached_property
    def _device(self) -> Any:
        gpu = self.scorer.compile_for
        return jax.devices()[0] if gpu is None else target_devices(gpu, 1)[0]


def limit_of(memory: int) -> float:
    """Return the bytes up to which a formula says that a step fits."""
    return (1 - MARGIN) * memory


def _compile_best(
    scored: Sequence[ScoredCandidate],
    options: CompileOptions,
    scorer: Scorer,
    count: int,
    memory: int,
    log: Callable[[str], Any],
) -> tuple[list[ScoredCandidate], list[str]]:
    """Return all candidates in their new order, the first ones corrected; and notes."""
    max_compiled = options.best
    scored, notes, tried = list(scored), [], set()
    limits: Any = {"limit": options.limit, "cache": options.cache}
    while True:
        scored.sort(key=lambda s: (not fits_memory(s, memory), rank(s)))
        index = next((n for n, s in enumerate(scored) if s.candidate not in tried), None)
        if index is None or len(tried) >= (max_compiled if index else 2 * max_compiled):
            break  # the first one is compiled, or twice as many were
        s = scored[index]
        tried.add(s.candidate)
        name, settings = str(s.candidate), s.candidate.settings(scorer.config)
        log(f"compiling {name}")
        program = compile_candidate(settings, scorer.machine.key, count, scorer.vocab, **limits)
        if isinstance(program, CompileFailure):
            notes.append(f"not compiled, so by formula only: {name}: {program.why}")
        else:
            scored[index] = correct_score(s, program, scorer.machine)
    scored.sort(key=lambda s: (not fits_memory(s, memory), rank(s)))
    if scored[0].compiled is None:
        notes.append("the first is by formula only: those that were compiled are slower")
    return scored, notes


def fits_memory(s: ScoredCandidate, memory: int) -> bool:
    """Return whether a candidate fits in memory; one scored by formula needs a margin."""
    return s.peak.total <= (memory if s.compiled else limit_of(memory))


def rank(s: ScoredCandidate) -> tuple[float, float, int]:
    """Return a sort key: the shortest step first, then the fewest bytes."""
    return round(s.time.total, 7), round(s.peak.total), len(s.candidate.axis_sizes)


def plan_entry(s: ScoredCandidate, best: ScoredCandidate, plan: StepPlan) -> PlanEntry:
    """Return a candidate as an entry of a plan, of which `best` is the first."""
    scorer, fits = plan.scorer, fits_memory(s, plan.memory)
    tokens = s.candidate.batch_size * scorer.length / s.candidate.devices / s.time.total
    mfu = tokens * scorer.flops / scorer.machine.peak
    reason = "" if s is best else reason_of(s, best, fits, scorer.machine)
    return PlanEntry(s.candidate, s.time, s.peak, fits, reason, tokens, mfu, s.compiled)


def _indivisible_message(config: TrainConfig, scorer: Scorer, count: int) -> str:
    task, low = scorer.base_run.task, max(config.global_batch_size // count * count, count)
    describe = lambda batch_size: (
        f" ({batch_size * task.units_per_example:,} {task.unit})"
        if task.units_per_example > 1
        else ""
    )
    sizes = ", ".join(f"{batch_size}{describe(batch_size)}" for batch_size in (low, low + count))
    return (
        f"{config.global_batch_size} {task.describe_example()} on {count} devices: no mesh "
        f"divides them. These divide: {sizes}."
    )


def _too_large_message(pool: CandidatePool, scorer: Scorer, count: int, memory: int) -> str:
    assert pool.smallest is not None
    need, placements, c = pool.smallest
    split = (placements.state + placements.gradients) * count  # more devices hold smaller shards
    num_devices, room = count, limit_of(memory)
    while num_devices < MOST_DEVICES and split / num_devices + max(need - split / count, 0) > room:
        num_devices *= 2
    more = (
        f"About {num_devices} devices would do"
        if num_devices < MOST_DEVICES
        else "More devices do not help"
    )
    return (
        f"nothing fits: the smallest of all ways on {count} x {scorer.machine.name} takes "
        f"{human(need)} of a device ({c}). A step may use {human(memory)}, {MARGIN:.0%} of it "
        f"free: {human(need - room)} too much. {more}; or fewer "
        "tokens in a step, a shorter --model.seq-len, a smaller model, or more of the memory "
        "(--device-memory)."
    )


def _replication_notes(scorer: Scorer, best: Candidate, count: int) -> Iterator[str]:
    """Yield which arrays the best candidate, or FSDP over all devices, would replicate."""
    fsdp_only = Candidate((("fsdp", count),) if count > 1 else (), "fsdp", count)
    for prefix, c in (("the first: ", best), ("", fsdp_only)):
        if note := scorer.placements(c).replication_note:
            yield prefix + note
            return


def _notes(scorer: Scorer, facts: ModelFacts) -> tuple[str, ...]:
    notes = []
    if scorer.machine.platform == "cpu":
        notes.append("seconds of the processor, as if each device had a core of its own")
    elif scorer.compile_for is None:
        notes.append("by formulas only: nothing here compiles for this GPU")
    if not facts.has_layer_stack:
        notes.append(
            "the model is not in three parts (embed, layers, head): no pipeline, whole gathers, "
            "nothing computed again (docs/any_model.md)"
        )
    elif not facts.layers:
        notes.append("layers are a list of unlike ones: planned without a pipeline")
    if scorer.length > 1 and not scorer.calls.attentions:
        notes.append(
            "the model asks for no attention through its kernels (docs/long_sequences.md): meshes "
            "with context are not searched"
        )
    if scorer.config.kernels not in ("auto", "xla"):
        notes.append(f"--kernels {scorer.config.kernels}: the formulas are those of --kernels auto")
    if not math.isclose(scorer.machine.reserve, 0):
        notes.append(
            f"not counted: {human(scorer.machine.reserve)} of a GPU for its context, communication "
            "and libraries"
        )
    return tuple(notes)
