"""A plan: every candidate scored, those that fit ranked, and why the others lose."""

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
from hfjax.analysis.targets import GPUS, can_compile_for_gpus, fraction_taken, target_devices
from hfjax.hardware.machine import MACHINES, Machine
from hfjax.parallel.mesh import AXES, EXPERTS
from hfjax.planner.candidate import Candidate
from hfjax.planner.corrections import corrected
from hfjax.planner.explain import reason_of
from hfjax.planner.memory_model import ArraysPlaced
from hfjax.planner.peak_memory import Peak
from hfjax.planner.programs.compile_candidates import Failed, compile_candidate
from hfjax.planner.programs.compile_step import Compiled
from hfjax.planner.score import Scored, Scorer
from hfjax.planner.search import ModelFacts, candidates, with_host
from hfjax.planner.step_time import StepTime
from hfjax.trainer.config import Train
from hfjax.utils.tables import aligned, human

KEEP = 20  # rows that are checked and kept
MARGIN = 0.05  # of the memory that stays free where a formula says that a step fits
OTHERS = 10  # of those that would be faster, if they fitted
MOST_DEVICES = 2**20
FAR = 2.0  # times the memory: what takes more is not among those that nearly fit


@dataclass(frozen=True)
class Compiling:
    """What of a plan is compiled.

    Attributes:
        best: How many of the best.
        limit: Seconds that one may take. None: 60, of a pipeline 240.
        cache: The folder in which results are kept. None: in the user's cache.
    """

    best: int = 4
    limit: float | None = None
    cache: Path | None = None


@dataclass(frozen=True)
class PlanRow:
    """A candidate of a plan.

    Attributes:
        candidate: How the step runs.
        time: Its seconds, part by part (`time.parts`, `time.total`).
        peak: Its bytes on a device, part by part (`peak.parts`, `peak.total`).
        fits: Whether the memory has room for it, with a margin.
        reason: For one that is not the first: the largest part by which it loses.
        tokens: Tokens a second of a device.
        mfu: Of the operations that the model needs, the part of the GPU's peak.
        compiled: What the compiled program tells, where there is one.
    """

    candidate: Candidate
    time: StepTime
    peak: Peak
    fits: bool
    reason: str
    tokens: float
    mfu: float
    compiled: Compiled | None = None


@dataclass(frozen=True)
class StepPlan:
    """What `make_plan` returns; it prints as a table.

    Attributes:
        rows: What fits, the fastest first.
        others: The best of those that do not fit, and why.
        machine: The constants that were used.
        memory: Bytes that a step may use of a device.
        count: How many devices.
        config: The settings of the run.
        searched: How many candidates were scored.
        refused: How many were not: something does not divide, or hfjax refuses them.
        seconds: How long it took.
        notes: What to bear in mind.
        scorer: What scored them, for further candidates of the same run.
    """

    rows: tuple[PlanRow, ...]
    others: tuple[PlanRow, ...]
    machine: Machine
    memory: int
    count: int
    config: Train
    searched: int
    refused: int
    seconds: float
    notes: tuple[str, ...]
    scorer: Scorer = field(repr=False, compare=False)

    def __str__(self) -> str:
        head = ("step", "tokens/s", "MFU", "peak", "how", "why not the first")
        cells = [
            (f"{r.time.total * 1e3:.1f} ms", f"{r.tokens:,.0f}", f"{r.mfu:.1%}",
             human(r.peak.total), str(r.candidate), r.reason)
            for r in (*self.rows, *self.others)
        ]  # fmt: skip
        title = f"{self.count} x {self.machine.name}, {self.config.batch} rows in a step"
        return "\n".join([title, *aligned([head, *cells], numbers=(0, 1, 2, 3))])

    @property
    def best(self) -> PlanRow:
        """The first of the rows."""
        return self.rows[0]

    def settings(self, row: PlanRow | None = None) -> Train:
        """Return the settings of `hfjax train` for a row; None: the best."""
        return (row or self.best).candidate.settings(self.config)


def make_plan(
    config: Train,
    *,
    gpu: str | Machine = "h200",
    count: int = 8,
    vocab: int | None = None,
    memory: int | None = None,
    compile: int | Compiling = 0,
    tell: Callable[[str], Any] = lambda words: None,
) -> StepPlan:
    """Return how a run's step is best laid out on so many GPUs, by formula.

    Args:
        config: The settings of the run: its model, precision, optimizer and `batch`, the rows of a
            step. What says how it is laid out (strategy, mesh, schedule, remat …) is searched.
        gpu: Which one (a100, h100, h200, b200), or a `Machine` of constants.
        count: How many.
        vocab: Tokens in the vocabulary. None: those of the data.
        memory: Bytes that a step may use of a device. None: what JAX takes of it.
        compile: How many of the best are compiled for the GPU, and corrected by their programs; or
            a `Compiling`, which says more.
        tell: Called with words on what goes on.

    Raises:
        ValueError: Nothing fits, or nothing divides: the message says what would.

    Example:
        >>> import hfjax
        >>> from hfjax.trainer.config import Model, Train
        >>> config = Train(batch=16, precision="bf16", model=Model(preset="gpt-tiny"))
        >>> plan = hfjax.make_plan(config, gpu="h200", count=2, vocab=256)
        >>> plan.best.fits, plan.best.candidate.devices
        (True, 2)
    """
    began = time.perf_counter()
    empty = unsearched(config, gpu=gpu, count=count, vocab=vocab, memory=memory)
    scorer, machine, memory = empty.scorer, empty.machine, empty.memory
    compiles = scorer.compile_for is not None
    tell("reading the model")
    facts = facts_of(scorer)
    checked = BuildCheck(scorer)
    roomy = limit_of(memory)
    sifted = Sifted(scorer, roomy)
    for candidate in candidates(config.batch, count, facts, machine):
        sifted.add(candidate)
    if sifted.least is None:
        raise ValueError(_nothing_divides(config, scorer, count))
    fitting = [s for s in sifted.scored if s.peak.total <= roomy]
    others = [s for s in sifted.scored if s.peak.total > roomy]
    if not fitting:
        raise ValueError(_too_large(sifted, scorer, count, memory))
    tell(f"checking the best of {sifted.searched}")
    rows, dropped = list(checked.first(ranked(fitting, scorer), KEEP)), []
    if not rows:
        c, why = next(iter(checked.why.items()))
        raise ValueError(f"none of the {len(fitting)} ways that fit can run; the first, {c}: {why}")
    compiling = compile if isinstance(compile, Compiling) else Compiling(compile)
    if compiling.best and compiles:
        rows, dropped = _compiled(rows, compiling, scorer, count, memory, tell)
    if not _fits(best := rows[0], memory):
        raise ValueError(
            f"nothing fits: {len(rows)} ways were compiled that should by formula, and the first "
            f"({best.candidate}) takes {human(best.peak.total)} of {human(memory)}. Take more "
            "devices, fewer tokens in a step, or --device-memory a little lower, so that others "
            "are tried."
        )
    near = takewhile(lambda s: _rank(s)[0] <= _rank(best)[0], ranked(others, scorer))
    faster = checked.first((s for s in near if s.time.total < best.time.total), OTHERS)
    beside = [s for s in rows if s is not best]
    made = [row_of(s, best, empty) for s in (best, *beside, *faster)]
    return replace(
        empty,
        rows=tuple(r for r in made if r.fits),
        others=tuple(r for r in made if not r.fits),
        searched=sifted.searched,
        refused=sifted.refused + checked.refused,
        seconds=time.perf_counter() - began,
        notes=(*_notes(scorer, facts), *_whole(scorer, best.candidate, count), *dropped),
    )


def unsearched(
    config: Train,
    *,
    gpu: str | Machine,
    count: int,
    vocab: int | None = None,
    memory: int | None = None,
) -> StepPlan:
    """Return a plan of no rows, which scores whatever is asked; arguments as of `make_plan`."""
    machine = gpu if isinstance(gpu, Machine) else machine_named(gpu)
    compiles = machine.key in GPUS and can_compile_for_gpus()
    scorer = Scorer(config, vocab, machine, machine.key if compiles else None)
    if memory is None:
        memory = int(part_of_memory(machine) * machine.memory)
    return StepPlan((), (), machine, memory, count, config, 0, 0, 0.0, (), scorer)


def machine_named(gpu: str) -> Machine:
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


def part_of_memory(machine: Machine) -> float:
    """Return which part of a device's memory JAX takes."""
    return 1.0 if machine.platform == "cpu" else fraction_taken()


def facts_of(scorer: Scorer) -> ModelFacts:
    """Return what a search asks of the model of a run."""
    layout, calls = scorer.one.layout, scorer.calls
    counts = [a.shape[a.axes.index(EXPERTS)] for a in layout.arrays.values() if EXPERTS in a.axes]
    experts = math.gcd(*counts) if calls.mixtures else 0
    model = layout.blueprint.abstract("train")
    refuses = {*getattr(type(model), "refuses", {}), *(() if calls.attentions else ("context",))}
    of_tokens = scorer.one.task.unit == "tokens"
    return ModelFacts(
        layers=scorer.layers if layout.blueprint.three_parts else 0,
        length=scorer.length,
        experts=experts,
        refuses=frozenset(refuses),
        row_maps=of_tokens and not experts and bool(scorer.profile("none").linear_maps),
        in_parts=layout.blueprint.three_parts,
    )


@dataclass(frozen=True)
class Sized:
    """A candidate with its bytes, and the least that its step can take."""

    candidate: Candidate
    placing: ArraysPlaced
    peak: Peak
    least: float


def ranked(sized: Sequence[Sized], scorer: Scorer) -> Iterator[Scored]:
    """Yield candidates as `_rank` orders them.

    What one sends is asked only when nothing that is known to be shorter is left: of a hundred
    thousand candidates that is a small part.
    """
    found: dict[int, Scored] = {}
    heap = [(round(s.least, 7), -1.0, 0, n) for n, s in enumerate(sized)]
    heapify(heap)
    while heap:
        n = heappop(heap)[-1]
        if n in found:
            yield found.pop(n)
            continue
        s = sized[n]
        found[n] = Scored(s.candidate, scorer.time(s.candidate, s.placing), s.peak)
        heappush(heap, (*_rank(found[n]), n))


class Sifted:
    """Scores candidates as they come; leaves out those of which another one tells enough.

    That is to compute again what fits as it is, and rows at once of which fewer took far too much.
    """

    def __init__(self, scorer: Scorer, limit: float) -> None:
        self.scorer, self.limit = scorer, limit
        self.scored: list[Sized] = []
        self.searched = self.refused = 0
        self.least: tuple[float, ArraysPlaced, Candidate] | None = None  # of the fewest bytes
        self._wrong: set[Any] = set()  # layouts in which something does not divide
        self._beyond: dict[Any, float] = {}  # how a step runs -> rows at once that take far more
        self._roomy: Candidate | None = None  # the last that fits with all kept

    def add(self, c: Candidate) -> None:
        """Score a candidate, and with more on the host if it does not fit."""
        layout = c.mesh, c.names, c.schedule, c.chunks
        if layout in self._wrong:
            self.refused += 1
            return
        plain, how = replace(c, remat="none", split_rows=1), (*layout, c.remat, c.split_rows)
        if c.remat != "none" and plain == self._roomy:
            return
        if c.rows_at_once >= self._beyond.get(how, math.inf):
            return
        try:
            fits = self._score(c)
        except ValueError:
            self._wrong.add(layout)
            self.refused += 1
            return
        if fits is None:
            self._beyond[how] = c.rows_at_once
        if not fits:
            for other in with_host(c, self.scorer.layers):
                self._score(other)
        elif c == plain and c.schedule is None and self._keeps_all(c):
            self._roomy = c

    def _note(self, size: float, placing: ArraysPlaced, c: Candidate) -> None:
        if self.least is None or size < self.least[0]:
            self.least = size, placing, c

    def _keeps_all(self, c: Candidate) -> bool:
        return self.scorer.how(c, self.scorer.placing(c)) == "unrolled"

    def _score(self, c: Candidate) -> bool | None:
        """Return whether a candidate fits; None: by far not."""
        placing = self.scorer.placing(c)
        if placing.state > self.limit:
            self._note(placing.state + placing.gradients, placing, c)
            return False
        self.searched += 1
        peak = self.scorer.peak(c, placing)
        self._note(peak.total, placing, c)
        if peak.total > FAR * self.limit and self.scored:
            return None
        self.scored.append(Sized(c, placing, peak, self.scorer.least_time(c, placing)))
        return peak.total <= self.limit


class BuildCheck:
    """Builds the layouts and steps of candidates, to leave out what hfjax refuses.

    One device stands for all of a mesh: nothing is compiled, and however many there are is quick.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.scorer, self.refused = scorer, 0
        self.why: dict[Candidate, str] = {}

    def first(self, scored: Iterable[Scored], most: int) -> list[Scored]:
        """Return the first of these that hfjax runs."""
        found: list[Scored] = []
        same: set[Any] = set()  # the same step by other names
        for s in scored:
            if len(found) == most:
                break
            if _rank(s)[:2] in same:
                continue
            why = self.refuses(s.candidate)
            if why is None:
                found.append(s)
                same.add(_rank(s)[:2])
            else:
                self.why[s.candidate] = why
                self.refused += 1
        return found

    def refuses(self, c: Candidate) -> str | None:
        """Return why hfjax refuses a candidate, None if it does not."""
        one = self.scorer.one
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


def _compiled(
    rows: Sequence[Scored],
    compiling: Compiling,
    scorer: Scorer,
    count: int,
    memory: int,
    tell: Callable[[str], Any],
) -> tuple[list[Scored], list[str]]:
    """Return the rows, the first of them corrected and in their new order; what was dropped."""
    most = compiling.best
    rows, dropped, tried = list(rows), [], set()
    limits: Any = {"limit": compiling.limit, "cache": compiling.cache}
    while True:
        rows.sort(key=lambda s: (not _fits(s, memory), _rank(s)))
        place = next((n for n, s in enumerate(rows) if s.candidate not in tried), None)
        if place is None or len(tried) >= (most if place else 2 * most):
            break  # the first is one that was compiled, or twice as many were
        s = rows[place]
        tried.add(s.candidate)
        name, settings = str(s.candidate), s.candidate.settings(scorer.config)
        tell(f"compiling {name}")
        told = compile_candidate(settings, scorer.machine.key, count, scorer.vocab, **limits)
        if isinstance(told, Failed):
            dropped.append(f"not compiled, so by formula only: {name}: {told.why}")
        else:
            rows[place] = corrected(s, told, scorer.machine)
    rows.sort(key=lambda s: (not _fits(s, memory), _rank(s)))
    if rows[0].compiled is None:
        dropped.append("the first is by formula only: those that were compiled are slower")
    return rows, dropped


def _fits(s: Scored, memory: int) -> bool:
    """Return whether memory has room for a candidate; of a formula with a margin."""
    return s.peak.total <= (memory if s.compiled else limit_of(memory))


def _rank(s: Scored) -> tuple[float, float, int]:
    """Return what comes first: the shortest step, of equals the one with the fewest bytes."""
    return round(s.time.total, 7), round(s.peak.total), len(s.candidate.sides)


def row_of(s: Scored, best: Scored, plan: StepPlan) -> PlanRow:
    """Return a candidate as a row of a plan, of which `best` is the first."""
    scorer, fits = plan.scorer, _fits(s, plan.memory)
    tokens = s.candidate.rows * scorer.length / s.candidate.devices / s.time.total
    mfu = tokens * scorer.flops / scorer.machine.peak
    reason = "" if s is best else reason_of(s, best, fits, scorer.machine)
    return PlanRow(s.candidate, s.time, s.peak, fits, reason, tokens, mfu, s.compiled)


def _nothing_divides(config: Train, scorer: Scorer, count: int) -> str:
    task, low = scorer.one.task, max(config.batch // count * count, count)
    of = lambda rows: f" ({rows * task.each:,} {task.unit})" if task.each > 1 else ""
    these = ", ".join(f"{rows}{of(rows)}" for rows in (low, low + count))
    return (
        f"{config.batch} {task.rows()} on {count} devices: no mesh divides them. These divide: "
        f"{these}."
    )


def _too_large(sifted: Sifted, scorer: Scorer, count: int, memory: int) -> str:
    assert sifted.least is not None
    need, placing, c = sifted.least
    split = (placing.state + placing.gradients) * count  # more devices hold less of it each
    would, room = count, limit_of(memory)
    while would < MOST_DEVICES and split / would + max(need - split / count, 0) > room:
        would *= 2
    more = f"About {would} devices would do" if would < MOST_DEVICES else "More devices do not help"
    return (
        f"nothing fits: the smallest of all ways on {count} x {scorer.machine.name} takes "
        f"{human(need)} of a device ({c}). A step may use {human(memory)}, {MARGIN:.0%} of it "
        f"free: {human(need - room)} too much. {more}; or fewer "
        "tokens in a step, a shorter --model.length, a smaller model, or more of the memory "
        "(--device-memory)."
    )


def _whole(scorer: Scorer, best: Candidate, count: int) -> Iterator[str]:
    """Yield which arrays the best stores whole, or FSDP over all devices would."""
    over_all = Candidate((("fsdp", count),) if count > 1 else (), "fsdp", count)
    for words, c in (("the first: ", best), ("", over_all)):
        if whole := scorer.placing(c).left_whole:
            yield words + whole
            return


def _notes(scorer: Scorer, facts: ModelFacts) -> tuple[str, ...]:
    found = []
    if scorer.machine.platform == "cpu":
        found.append("seconds of the processor, as if each device had a core of its own")
    elif scorer.compile_for is None:
        found.append("by formulas only: nothing here compiles for this GPU")
    if not facts.in_parts:
        found.append(
            "the model is not in three parts (embed, layers, head): no pipeline, whole gathers, "
            "nothing computed again (docs/any_model.md)"
        )
    elif not facts.layers:
        found.append("layers are a list of unlike ones: planned without a pipeline")
    if scorer.length > 1 and not scorer.calls.attentions:
        found.append(
            "the model asks for no attention through its kernels (docs/long_sequences.md): meshes "
            "with context are not searched"
        )
    if scorer.config.kernels not in ("auto", "xla"):
        found.append(f"--kernels {scorer.config.kernels}: the formulas are those of --kernels auto")
    if not math.isclose(scorer.machine.reserve, 0):
        found.append(
            f"not counted: {human(scorer.machine.reserve)} of a GPU for its context, communication "
            "and libraries"
        )
    return tuple(found)
