"""The planner's order beside the clock's, on this CPU: twenty configurations on eight fake devices.

Fake devices share the cores, so what is compared is work: predicted processor time, summed over the
devices (`hfjax/planner/measuring`), with the processor time that a step took, of all threads. The
twenty were chosen before anything was predicted, and ten more when the model of work was done.
Constants come from `calibrate` only, measured on one product, one copy, one transfer at a time; no
row of a table is in them.

    python -m benchmarks.planner_cpu --calibrate     # constants of this machine, half a minute
    python -m benchmarks.planner_cpu --measure       # thirty programs, 20 minutes
    python -m benchmarks.planner_cpu                 # predict and compare: results/planner_cpu.md

Each configuration is measured in a process of its own, which waits while another one runs a step:
so whatever else the machine does hits all of them alike.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("PJRT_NPROC", "32")  # as many devices may wait at once, however few the cores

import argparse
import datetime
import itertools
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np

import hfjax
from hfjax.machines.machine import Machine
from hfjax.planner.candidate import Candidate
from hfjax.planner.measuring.calibrate import calibrate
from hfjax.planner.measuring.work import StepWork, work
from hfjax.planner.programs.planned import Planned
from hfjax.planner.score import Scorer
from hfjax.run.config import Model, Train

RESULTS = Path(__file__).parent / "results" / "planner_cpu.json"
CONSTANTS = RESULTS.with_suffix(".toml")
APART, GOAL, REGRET = 0.15, 0.9, 0.1
SHOWN = ("flops_fp32", "start_up", "launch", "stream", "inside", "inside_start")
PARTS = tuple(field.name for field in fields(StepWork))
DEVICES, ROWS, VOCAB = 8, 16, 2048
# One shape for all: so a step takes one to five seconds of a processor.
SHAPE: dict[str, Any] = {"layers": 8, "embed": 256, "heads": 4, "length": 256}
MODELS = {
    "gpt": Model(preset="gpt-tiny", **SHAPE),
    "llama": Model(preset="llama-tiny", **SHAPE),
    "mixture": Model(preset="mixtral-tiny", **SHAPE),
}


def _as(zero: str, *, of: str = "", **sides: Any) -> Candidate:
    """Return a candidate; what names no axis says how it runs."""
    how = {name: sides.pop(name) for name in tuple(sides) if name in HOW}
    if of:
        chunks = how.pop("chunks", None)
        how |= {"schedule": of, "chunks": chunks}
    return Candidate(tuple(sides.items()), zero, ROWS, **how)


HOW = ("sequence", "chunks", "microbatches", "remat", "accumulate")
# Fixed on 2026-11-26, before any of them was predicted or measured.
CASES: dict[str, tuple[str, Candidate]] = {
    "ddp": ("gpt", _as("ddp", data=8)),
    "zero1": ("gpt", _as("zero1", data=8)),
    "zero2, accumulate 2": ("gpt", _as("zero2", data=8, accumulate=2)),
    "fsdp": ("gpt", _as("fsdp", fsdp=8)),
    "fsdp, full": ("gpt", _as("fsdp", fsdp=8, remat="full")),
    "hsdp, dots": ("gpt", _as("fsdp", data=2, fsdp=4, remat="dots")),
    "tensor 2": ("gpt", _as("ddp", data=4, tensor=2)),
    "tensor 4, sequence": ("gpt", _as("ddp", data=2, tensor=4, sequence=True)),
    "context 2": ("gpt", _as("fsdp", fsdp=4, context=2)),
    "1f1b": ("gpt", _as("ddp", of="1f1b", pipe=4, data=2, microbatches=8)),
    "gpipe": ("gpt", _as("ddp", of="gpipe", pipe=4, data=2, microbatches=4)),
    "interleaved": (
        "gpt",
        _as("ddp", of="interleaved", pipe=4, data=2, microbatches=8, chunks=2),
    ),
    "zb-h1": ("gpt", _as("zero1", of="zb-h1", pipe=4, data=2, microbatches=8)),
    "zb-v": ("gpt", _as("ddp", of="zb-v", pipe=4, data=2, microbatches=8)),
    "llama ddp, accumulate 2": ("llama", _as("ddp", data=8, accumulate=2)),
    "llama fsdp, dots": ("llama", _as("fsdp", fsdp=8, remat="dots")),
    "llama tensor 2, sequence": ("llama", _as("fsdp", fsdp=4, tensor=2, sequence=True)),
    "llama 1f1b, tensor 2": (
        "llama",
        _as("ddp", of="1f1b", pipe=4, tensor=2, microbatches=4),
    ),
    "mixture, expert 2": ("mixture", _as("fsdp", fsdp=4, expert=2)),
    "mixture ddp, full": ("mixture", _as("ddp", data=8, remat="full")),
}
# Fixed when the model of work was done, before any of them was predicted or measured.
LATER: dict[str, tuple[str, Candidate]] = {
    "fsdp, accumulate 2": ("gpt", _as("fsdp", fsdp=8, accumulate=2)),
    "hsdp": ("gpt", _as("fsdp", data=4, fsdp=2)),
    "zero1, full": ("gpt", _as("zero1", data=8, remat="full")),
    "tensor 4, dots": ("gpt", _as("zero1", data=2, tensor=4, remat="dots")),
    "zb, pipe 2": ("gpt", _as("ddp", of="zb", pipe=2, data=4, microbatches=4, chunks=1)),
    "1f1b, full": ("gpt", _as("ddp", of="1f1b", pipe=4, data=2, microbatches=8, remat="full")),
    "v": ("gpt", _as("ddp", of="v", pipe=4, data=2, microbatches=4)),
    "llama context 2": ("llama", _as("zero1", data=4, context=2)),
    "llama 1f1b": ("llama", _as("zero1", of="1f1b", pipe=2, data=4, microbatches=4)),
    "mixture, expert 4": ("mixture", _as("fsdp", fsdp=2, expert=4, remat="dots")),
}
ALL = CASES | LATER
GROUPS = {"Twenty configurations": CASES, "Ten that the model of work had not seen": LATER}


def settings(name: str) -> Train:
    """Return the settings of a case."""
    model, candidate = ALL[name]
    return candidate.settings(Train(model=MODELS[model], batch=ROWS))


# -- measuring ----------------------------------------------------------------------------------


def serve(name: str) -> None:
    """Run steps of a case, one for each line of the input; print the processor's seconds of it."""
    jax.config.update("jax_num_cpu_devices", DEVICES)
    parts = Planned(settings(name), jax.devices(), VOCAB)
    shape = parts.batch["tokens"]
    tokens = np.random.default_rng(0).integers(0, VOCAB, shape.shape, dtype=np.int32)
    batch = {"tokens": tokens}
    state = hfjax.init(parts.layout, 0, parts.schedule)
    step = parts.step
    for _ in range(2):  # the first compiles
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
    print("ready", flush=True)
    for _ in sys.stdin:
        began = processor()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        print(processor() - began, flush=True)


def processor() -> float:
    """Return the seconds that all cores have worked for this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(names: list[str], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of steps, by case: one step of each in turns."""
    command = [sys.executable, "-m", "benchmarks.planner_cpu", "--serve"]
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    running: dict[str, subprocess.Popen] = {}
    took: dict[str, list[float]] = {name: [] for name in names}
    try:
        for name in names:  # one compiles at a time
            running[name] = subprocess.Popen([*command, name], **pipe)
            assert _line(running[name]) == "ready"
            print(f"{name}: ready", flush=True)
        for number in range(rounds):
            for name in names if number % 2 else reversed(names):
                process = running[name]
                assert process.stdin is not None
                print(file=process.stdin, flush=True)
                took[name].append(float(_line(process)))
            print(f"round {number + 1} of {rounds}", flush=True)
    finally:
        for process in running.values():
            process.kill()
    return took


def _line(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"a process ended: {process.args}")
    return line.strip()


# -- comparing ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class CpuRow:
    """A case: predicted and measured seconds of the processor."""

    name: str
    work: StepWork
    seconds: float

    @property
    def model(self) -> str:
        """Of which model."""
        return ALL[self.name][0]

    @property
    def ratio(self) -> float:
        """Predicted over measured."""
        return self.work.total / self.seconds


def rows(machine: Machine, took: dict[str, list[float]]) -> list[CpuRow]:
    """Return the cases that were measured, the least predicted first."""
    scorers = {
        name: Scorer(Train(model=model, batch=ROWS), VOCAB, machine, None)
        for name, model in MODELS.items()
    }
    found = [
        CpuRow(name, work(scorers[ALL[name][0]], ALL[name][1]), statistics.median(seconds))
        for name, seconds in took.items()
    ]
    return sorted(found, key=lambda row: row.work.total)


@dataclass(frozen=True)
class Agreement:
    """Of pairs whose measured times differ by more than `APART`, how many are in order."""

    right: int
    pairs: int
    wrong: tuple[tuple[str, str], ...]

    @property
    def share(self) -> float:
        """The part that is in order."""
        return self.right / max(self.pairs, 1)


def agreement(found: list[CpuRow], alike: bool) -> Agreement:
    """Return how well the order agrees; `alike`: of pairs of one model only."""
    pairs, wrong = 0, []
    for a, b in itertools.combinations(found, 2):
        if alike and a.model != b.model:
            continue
        if max(a.seconds, b.seconds) <= (1 + APART) * min(a.seconds, b.seconds):
            continue
        pairs += 1
        if (a.work.total < b.work.total) != (a.seconds < b.seconds):
            wrong.append((a.name, b.name))
    return Agreement(pairs - len(wrong), pairs, tuple(wrong))


def regret(found: list[CpuRow]) -> float:
    """Return by how much the first of a plan costs more than the best; `found` is in order."""
    return found[0].seconds / min(row.seconds for row in found) - 1


def page(groups: dict[str, list[CpuRow]], machine: Machine, measured: dict[str, Any]) -> str:
    """Return the page of results."""
    assert machine.processor is not None
    assert machine.calibrated is not None
    constants = {n: getattr(machine, n) for n in SHOWN}
    constants |= {n: getattr(machine.processor, n) for n in machine.processor.sources}
    steps = len(next(iter(measured["took"].values())))
    lines = [
        "# The planner's order on a CPU",
        "",
        f"`python -m benchmarks.planner_cpu`, {datetime.date.today()}; measured",
        f"{measured['date']}, constants of {machine.calibrated.date}, jax {measured['jax']}, "
        f"{os.cpu_count()} cores,",
        f"{DEVICES} fake devices. Seconds of the processor, of all threads: predicted by formula",
        f"(`work`), measured as the median of {steps} steps in turns. {ROWS} rows of",
        f"{SHAPE['length']} tokens, {SHAPE['layers']} layers of {SHAPE['embed']}, float32, AdamW, "
        "clipped.",
    ]
    for title, found in groups.items():
        lines += ["", f"## {title}", "", *_table(found), "", *_order(found)]
    lines += ["", "## Constants", "", "| constant | value |", "|---|---|"]
    lines += [f"| {name} | {value:.3g} |" for name, value in constants.items()]
    return "\n".join(lines) + "\n\n" + NOTES


def _table(found: list[CpuRow]) -> Iterator[str]:
    yield "| model | configuration | predicted | measured | ratio | " + " | ".join(PARTS) + " |"
    yield "|---" * (5 + len(PARTS)) + "|"
    for row in found:
        parts = (f"{row.work.parts[part]:.2f}" for part in PARTS)
        cells = (f"{row.work.total:.2f}", f"{row.seconds:.2f}", f"{row.ratio:.2f}", *parts)
        yield f"| {row.model} | {row.name} | {' | '.join(cells)} |"


def _order(found: list[CpuRow]) -> Iterator[str]:
    for words, alike in (("pairs", False), ("pairs of one model", True)):
        told = agreement(found, alike)
        law = "holds" if told.share >= GOAL else "does not hold"
        yield f"- Of {told.pairs} {words} whose measured times differ by more than {APART:.0%},"
        yield f"  {told.right} ({told.share:.1%}) are in order: the law of {GOAL:.0%} {law}."
        for one, other in told.wrong if alike else ():
            yield f"  - Not in order: {one}; {other}."
    for name in MODELS:
        of = [row for row in found if row.model == name]
        if len(of) > 1:
            more = regret(of)
            law = "holds" if more <= REGRET else "does not hold"
            yield f"- {name}: the first of the plan, {of[0].name}, costs {more:.1%} more than the"
            yield f"  best: the law of {REGRET:.0%} {law}."


NOTES = """\
## Notes

- No constant comes from a row of this table: `hfjax plan --calibrate here` measures products,
  copies, new memory, turned factors and collectives, each by itself, on all devices at once.
- The twenty were measured before anything was predicted. What the formulas count, and which
  constants and sizes are measured for them, was found while comparing with these twenty; the ten
  were predicted once, with nothing changed afterwards.
- Others used the cores too (load 5 to 18 on two cores): steps of a case differ by 10 to 20 %.
- *fresh* is what the system takes to clear pages that a step touches for the first time: XLA gets
  and returns its temporaries in every step. It is why recomputing is cheaper here than keeping.
- *Missed*: what pipelines of many small ticks take beside their tasks (conditionals, copies of what
  passes through them), so 1f1b, gpipe and interleaved are predicted too low; about 0.15 s of the
  system for switching between threads, alike for all; recomputing, predicted 5 to 10 % too dear,
  since what was just computed is in the cache.
"""


def main() -> None:
    """Calibrate, measure, or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--serve", choices=list(ALL), help=argparse.SUPPRESS)
    parser.add_argument("--calibrate", action="store_true")
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve)
        return
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    jax.config.update("jax_num_cpu_devices", DEVICES)
    if given.calibrate:
        calibrate(CONSTANTS, print)
        return
    if given.measure:
        today = datetime.date.today().isoformat()
        took = {}
        for cases in GROUPS.values():  # each by itself: twenty processes take 15 GB
            took |= measure(list(cases), given.rounds)
        known = {"jax": jax.__version__, "date": today, "took": took}
    machine = Machine.load(CONSTANTS)
    machine.check_calibrated_for(jax.devices()[0].device_kind, jax.__version__)
    took = known["took"]
    groups = {
        title: rows(machine, {name: took[name] for name in cases if name in took})
        for title, cases in GROUPS.items()
    }
    groups = {title: found for title, found in groups.items() if found}
    text = page(groups, machine, known)
    print(text)
    RESULTS.with_suffix(".md").write_text(text, encoding="utf-8")
    every = [row for found in groups.values() for row in found]
    told = {
        "predicted": {row.name: dict(row.work.parts) for row in every},
        "agreement": {title: agreement(found, True).share for title, found in groups.items()},
    }
    known = {name: known[name] for name in ("jax", "date", "took")}
    RESULTS.write_text(json.dumps(known | told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
