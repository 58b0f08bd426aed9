"""GPT-2 trained by hfjax and by torch in the same run: tokens a second, MFU, peak memory.

Each program is a process of its own (train_worker.py). The first of hfjax compiles beside torch;
when it is ready, the others compile, which find what was tuned for it. Then blocks of steps are
taken one program at a time, torch's between hfjax's; a program of hfjax is ended before the next
one begins, so that each has the whole device. Models of images (vision.py) are trained so too, a
few of them in one section: all compile, then each is measured. The MFU counts 6 (P - positions) +
12 layers embed length operations for a token (P parameters; attention in full, as nanoGPT and PaLM
count it; what is computed again not), over the data sheet's rate.
"""

import dataclasses
import json
import os
import selectors
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, ClassVar

from benchmarks.gpu_sections.rows import Reporter
from benchmarks.gpu_sections.train_worker import Asked

BLOCKS, BLOCK_S = 4, 0.8  # blocks of steps at each visit, seconds of a block
READY_S, STEPS_S = 150.0, 30.0  # the longest wait for a compiler, for a block
VISIT_S = 4.0  # that a visit takes: so much of the time is kept for each while compilers run
SHAPES = {"small": (12, 768), "medium": (24, 1024)}  # layers, embed
SAME = 0.01  # by how much first losses may differ, relative
TORCH = "torch.compile"
Programs = Mapping[str, Mapping[str, Any]]  # fields of the execution, by name
MAIN: Programs = {"hfjax": {}, TORCH: {}, "hfjax, all kernels": {"kernels": "pallas"}}
DOTS: Programs = {"hfjax, remat dots": {"remat": "dots"}}
ONE_KERNEL: Programs = {
    f"hfjax, {name}": {"kernels": {name: "pallas", "*": "xla"}}
    for name in ("flash_block", "cross_entropy")
}
VARIANTS: Programs = {
    "hfjax, layers in a loop": {"unroll": 1},
    "hfjax, float16": {"precision": "fp16"},
    "hfjax, XLA's attention": {"attention": "xla"},
    "hfjax, plain loss in parts": {"kernels": {"cross_entropy": "reference", "*": "xla"}},
}
# On one GPU nothing is gathered: `gathered` runs layers as if it were, by the policy of FSDP.
FORMS: Programs = {
    "hfjax": {},
    TORCH: {},
    "gathered, in no loop": {"gathered": True},
    "gathered, in a loop": {"gathered": True, "unroll": 1},
    "remat full, in no loop": {"remat": "full"},
    "remat full, in a loop": {"remat": "full", "unroll": 1},
    "remat dots, in no loop": {"remat": "dots"},
    "remat dots, in a loop": {"remat": "dots", "unroll": 1},
    f"{TORCH}, checkpointing": {"checkpoint": True},
}
OFFLOAD: Programs = {
    "offload 0": {},
    "offload 0.5": {"offload": 0.5},
    "offload 1": {"offload": 1.0},
    "remat full": {"remat": "full"},
}


@dataclass(frozen=True)
class Setting:
    """A model, its rows, and the programs that train it, by name with fields of the execution."""

    preset: str
    rows: int
    programs: Programs
    length: int = 1024
    dry: int = 1  # programs of a dry run
    rivals: ClassVar[Sequence[str]] = ("torch",)  # packages that a rival needs

    @property
    def name(self) -> str:
        """What the table calls it."""
        size = {"small": "124M"}.get(self.preset, self.preset)
        return f"GPT-2 {size}, {self.rows} x {self.length}"

    def asked(self, program: str, tiny: bool) -> Asked:
        """Return what a worker is asked for."""
        execution = dict(self.programs[program])
        if tiny and "kernels" in execution:
            execution["kernels"] = "reference"  # no kernel runs on a CPU
        attention = execution.pop("attention", "cudnn")
        which = "torch" if program.startswith(TORCH) else "hfjax"
        rows, length = (2, 32) if tiny else (self.rows, self.length)
        return Asked(which, self.preset, rows, length, execution, attention, tiny)

    def flops(self, parameters: int) -> float:
        """Return the operations of a step that count."""
        layers, embed = SHAPES[self.preset]
        per_token = 6 * (parameters - self.length * embed) + 12 * layers * embed * self.length
        return float(self.rows * self.length * per_token)

    def numbers(self, ms: float, asked: Asked, told: Mapping[str, Any]) -> dict[str, float]:
        """Return what a row has of a step that took so long, by what its worker told."""
        rate = 1e3 * asked.rows * asked.length / ms
        return {"tokens_s": rate, "flops": self.flops(told["parameters"])}


SETTINGS = {
    "small 16": Setting("small", 16, MAIN, dry=2),
    "medium 16": Setting("medium", 16, MAIN),
    "small 32": Setting("small", 32, {**MAIN, **DOTS}),
    "medium 32": Setting("medium", 32, {**MAIN, **DOTS}),
    "offload": Setting("medium", 4, OFFLOAD, length=4096, dry=2),
    "forms": Setting("small", 32, FORMS),
    "variants": Setting("small", 32, {"hfjax again": {}, **ONE_KERNEL, **VARIANTS}),
}


@dataclass(eq=False)
class Worker:
    """A training program that runs beside this process."""

    name: str
    asked: Asked
    failure: str | None = None
    told: dict[str, Any] = field(default_factory=dict)
    ms: list[float] = field(default_factory=list)
    peak: int | None = None
    process: Any = None  # subprocess.Popen

    @property
    def of_torch(self) -> bool:
        """Whether it is a rival."""
        return self.asked.program == "torch"

    def start(self, tuned: str) -> None:
        """Start it; it goes on to compile. `tuned` is a folder of what XLA found out by trying."""
        words = json.dumps(dataclasses.asdict(self.asked))
        command = [sys.executable, "-u", "-m", "benchmarks.gpu_sections.train_worker", words]
        pipe = subprocess.PIPE
        settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "JAX_COMPILATION_CACHE_DIR": tuned}
        settings["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "1"
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=os.environ | settings)
        self.chooser = selectors.DefaultSelector()
        self.chooser.register(self.process.stdout, selectors.EVENT_READ)

    def answer(self, seconds: float) -> dict[str, Any] | None:
        """Return what it says next; if it says nothing in time, or fails, it is ended."""
        if not self.chooser.select(max(seconds, 0.1)):
            return self.fail(f"no answer in {seconds:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            return self.fail(f"ended with {self.process.wait()}")
        said = json.loads(line)
        return self.fail(said["failure"]) if "failure" in said else said

    def hear(self, seconds: float) -> None:
        """Wait until it is ready, and keep what it says then."""
        self.told |= self.answer(seconds) or {}

    def steps(self, count: int, seconds: float) -> float | None:
        """Take steps; return the milliseconds of one."""
        if self.failure:
            return None
        self._tell(f"steps {count}")
        said = self.answer(seconds)
        if said is None:
            return None
        self.peak = said["peak"]
        self.told["losses"] = said["losses"]
        return said["ms"]

    def _tell(self, line: str) -> None:
        try:
            self.process.stdin.write(f"{line}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            self.fail("ended on its own")

    def fail(self, why: str) -> None:
        """Note why it failed, and end it."""
        self.failure = self.failure or why
        self.end()

    def end(self) -> None:
        """End it, and wait until its memory is free."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def section(which: str) -> Callable[[Reporter], None]:
    """Return the section that trains one setting."""
    return lambda reporter: run(reporter, SETTINGS[which])


def run(reporter: Reporter, *settings: Setting) -> None:
    """Train with every program of each setting and print their rows."""
    groups = [_workers(reporter, setting) for setting in settings]
    try:
        _compile(reporter, groups)
        for setting, group in zip(settings, groups, strict=True):
            for worker in _visited(reporter, group):
                worker.end()
                reporter.row(**row_of(setting, worker))
    finally:
        for worker in (worker for group in groups for worker in group):
            worker.end()


def _workers(reporter: Reporter, setting: Setting) -> list[Worker]:
    """Return the programs that can run here; those that cannot are rows that say so."""
    can = able(setting)
    for name in setting.programs.keys() - set(can):
        reporter.row(kernel=setting.name, case=name, status="not there")
    names = can[: setting.dry if reporter.smoke else None]
    return [Worker(name, setting.asked(name, reporter.smoke)) for name in names]


def able(setting: Setting) -> list[str]:
    """Return the programs that can run here: torch may not be there, nor a field."""
    from hfjax.parallel.execution import Execution

    known = {f.name for f in dataclasses.fields(Execution)} | {"attention", "gathered"}
    torch = all(find_spec(name) is not None for name in setting.rivals)
    can = lambda name, given: torch if name.startswith(TORCH) else given.keys() <= known
    return [name for name, given in setting.programs.items() if can(name, given)]


def _compile(reporter: Reporter, groups: Sequence[Sequence[Worker]]) -> None:
    """Start all; of each group the first of hfjax and torch at once, others when that is ready."""
    with tempfile.TemporaryDirectory() as alone:
        tuned = os.environ.get("BENCHMARK_TUNED", alone)
        firsts = [next(w for w in group if not w.of_torch) for group in groups]
        workers = [worker for group in groups for worker in group]
        early = [w for w in workers if w in firsts or w.of_torch]
        for worker in early:
            worker.start(tuned)
        for first, group in zip(firsts, groups, strict=True):
            first.hear(_patience(reporter, groups))
            for worker in (w for w in group if w not in early):
                worker.start(tuned)
        for worker in (w for w in workers if w not in firsts):
            worker.hear(_patience(reporter, groups))


def _patience(reporter: Reporter, groups: Sequence[Sequence[Worker]]) -> float:
    """Return how long to wait for a compiler, so that what is ready can still be measured."""
    visits = 0
    for group in groups:
        rivals = sum(w.of_torch for w in group)
        ours = len(group) - rivals
        visits += ours * (1 + rivals) + rivals
    return min(READY_S, reporter.left - VISIT_S * visits)


def _visited(reporter: Reporter, workers: Sequence[Worker]) -> Iterator[Worker]:
    """Yield programs of hfjax when they are measured, torch between them; torch at last."""
    torch = [w for w in workers if w.of_torch]
    for worker in (w for w in workers if not w.of_torch):
        for beside in torch:
            _visit(reporter, beside)
        _visit(reporter, worker)
        yield worker
    for beside in torch:
        _visit(reporter, beside)
        yield beside


def _visit(reporter: Reporter, worker: Worker) -> None:
    """Take blocks of steps; the first tells how many a block has."""
    ms = worker.steps(2, min(STEPS_S, reporter.left))
    for _ in range(1 if reporter.smoke else BLOCKS):
        if ms is not None:
            count = 1 if reporter.smoke else max(2, round(1e3 * BLOCK_S / ms))
            ms = worker.steps(count, min(STEPS_S, reporter.left))
            worker.ms += [] if ms is None else [ms]


def row_of(setting: Setting, worker: Worker) -> dict[str, Any]:
    """Return the row of a program; a program that failed says why."""
    row: dict[str, Any] = {"kernel": setting.name, "case": worker.name}
    if not worker.ms:
        return row | {"status": f"failed: {worker.failure or 'no time left'}"}
    ms, asked = statistics.median(worker.ms), worker.asked
    row |= {"status": "ok", "ms": ms, "blocks_ms": worker.ms, "memory": worker.peak}
    return row | setting.numbers(ms, asked, worker.told) | worker.told


def agree(rows: Iterable[Mapping[str, Any]]) -> str | None:
    """Return what is wrong with the first losses of programs that train one model; None: nothing.

    >>> agree([{"case": "a", "losses": [2.0]}, {"case": "b", "losses": [2.1]}])
    'b: first losses [2.1], a has [2.0]'
    """
    first, *others = [row for row in rows if row.get("losses")] or [{}]
    for row in others:
        pairs = zip(row["losses"], first["losses"], strict=False)
        if any(abs(x - y) > SAME * abs(y) for x, y in pairs):
            had = f"{first['case']} has {first['losses']}"
            return f"{row['case']}: first losses {row['losses']}, {had}"
    return None
