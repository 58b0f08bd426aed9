"""Pipelines, ahead of time: what XLA makes of them for 8 H200s, none of which is needed.

Compiles the real train step of GPT-2 medium and of a 7-billion Llama on pipe=8 and on pipe=4 x
tensor=2, and counts memory per device and what the stages send each other. Writes one row for each
to results/pipeline_h200.md, next to the rows that are there.

    python -m benchmarks.pipeline_h200 [--model NAME] [--mesh NAME] [--schedule NAME]
        [--preset NAME]
"""

import argparse
import datetime
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the devices to compile for are not here

import jax
import jax.numpy as jnp
import optax

import hfjax
from hfjax.analysis import hlo
from hfjax.analysis.flights import Flight, flights
from hfjax.models.attention import dot_product
from hfjax.models.gpt import GPT, GPTConfig
from hfjax.models.llama import Llama, LlamaConfig
from hfjax.models.loss import next_token_loss
from hfjax.target import GPUS, can_compile_for_gpus, target_devices

attention = partial(dot_product, implementation="xla")  # cuDNN's needs cuDNN to compile


@dataclass(frozen=True)
class Trained:
    """A model, and how it is trained here."""

    init: Any
    rows: int  # of a microbatch
    length: int
    microbatches: int
    chunks: int  # on each stage, where a schedule takes any number
    remat: str


GPT2 = GPTConfig.preset("medium", pad_vocab_to=128, attention=attention)
LLAMA = LlamaConfig.preset("llama2-7b", attention=attention)
MODELS: Mapping[str, Trained] = {
    "gpt2-medium": Trained(lambda rngs: GPT(GPT2, rngs=rngs), 8, 1024, 32, 3, "dots"),
    "llama2-7b": Trained(lambda rngs: Llama(LLAMA, rngs=rngs), 1, 4096, 32, 2, "full"),
}
MESHES: Mapping[str, tuple[hfjax.Strategy, dict[str, int]]] = {
    "pipe=8": (hfjax.PIPE, {"pipe": 8}),
    "pipe=4 tensor=2": (
        hfjax.PIPE | hfjax.TENSOR | hfjax.SEQUENCE,
        {"pipe": 4, "tensor": 2},
    ),
}
SCHEDULES = ("1f1b", "interleaved", "zb")
CHOSEN = ("default", "overlap_two")  # presets of parallel/compiler.py
ALL = {"model": MODELS, "mesh": MESHES, "schedule": SCHEDULES, "preset": CHOSEN}
RESULTS = Path(__file__).parent / "results" / "pipeline_h200.md"
COLUMNS = (
    "jax",
    "model",
    "mesh",
    "schedule",
    "preset",
    "state",
    "temporaries",
    "peak",
    "sends",
    "asynchronous",
    "hidden",
    "covered",
    "others in loops",
    "sends in branches",
    "compile",
)
KEYS = 5  # columns that name a row
NOTES = "## Notes"


def lowered(model: str, mesh: str, schedule: str, preset: str) -> jax.stages.Lowered:
    """Return the train step for 8 H200s."""
    trained, (strategy, sizes) = MODELS[model], MESHES[mesh]
    grid = hfjax.make_mesh(devices=target_devices("h200", 8), **sizes)
    plan = hfjax.layout(trained.init, optax.adamw(1e-4), grid, strategy)
    chunks = trained.chunks if schedule == "interleaved" else None
    step = hfjax.train_step(
        plan,
        next_token_loss,
        schedule=hfjax.Schedule(schedule, trained.microbatches, chunks),
        precision="bf16",
        remat=trained.remat,
        clip=1.0,
        compiler_options=preset,
    )
    rows = trained.rows * trained.microbatches
    return step.lower({"tokens": jax.ShapeDtypeStruct((rows, trained.length + 1), jnp.int32)})


def measure(*names: str) -> tuple[str, ...]:
    """Return the cells of one row: of a model, a mesh, a schedule and a preset."""
    start = time.perf_counter()
    program = lowered(*names).compile()
    seconds = time.perf_counter() - start
    memory = program.memory_analysis()
    assert memory is not None  # XLA's GPU compiler always tells
    text = program.as_text() or ""
    fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
    peak = memory.argument_size_in_bytes + memory.temp_size_in_bytes + fresh
    sends = [f for f in flights(program) if f.kind == "permute"]
    return (
        *(jax.__version__, *names),
        *map(gib, (memory.argument_size_in_bytes, memory.temp_size_in_bytes, peak)),
        *sent(sends),
        others(program),
        str(sends_in_branches(text)),
        f"{seconds:.0f} s",
    )


def gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def sent(sends: list[Flight]) -> tuple[str, ...]:
    """Return what a device sends over pipe, how much of it asynchronously and beside matmuls."""
    if not sends:
        return ("none", "", "", "")
    total, seconds = sum(f.total for f in sends), sum(f.seconds * f.count for f in sends)
    return (
        f"{sum(f.count for f in sends)} x, {gib(total)}, {' '.join(sorted(axes_of(sends)))}",
        f"{sum(f.total for f in sends if not f.synchronous) / total:.0%}",
        f"{sum(f.hidden for f in sends) / total:.0%}",
        f"{1 - sum(f.exposed for f in sends) / seconds:.0%}",
    )


def axes_of(found: Iterable[Flight]) -> set[str]:
    return {"+".join(f.axes) for f in found}


def others(program: jax.stages.Compiled) -> str:
    """Return the collectives inside loops that are no sends, by kind and axis."""
    groups: dict[str, int] = {}
    for row in hfjax.collectives(program).rows:
        if "loop" in row.where and row.kind != "permute":
            name = f"{row.kind} {'+'.join(row.axes)}"
            groups[name] = groups.get(name, 0) + row.count
    return ", ".join(f"{name} {count} x" for name, count in groups.items()) or "none"


def sends_in_branches(text: str) -> int:
    """Return how many permutes lie in any branch of a conditional: stages would wait for ever."""
    permutes = ("collective-permute", "collective-permute-start")
    return sum(hlo._parse(line).opcode in permutes for line in in_branches(text))


def copied_in_branches(text: str) -> dict[str, int]:
    """Return how many copies lie in branches of conditionals, by what is copied: "bf16[4,8]"."""
    lines = [line for line in in_branches(text) if hlo._parse(line).opcode.startswith("copy")]
    return Counter("{}[{}]".format(*hlo._ARRAY.findall(line)[0]) for line in lines)


def in_branches(text: str) -> list[str]:
    """Return the instructions in all branches of conditionals, and in what these call."""
    computations, _ = hlo._computations(text)
    lines = {name: [r for r in held.values() if "(" in r] for name, held in computations.items()}
    ops = {name: list(map(hlo._parse, held)) for name, held in lines.items()}
    keys = (*hlo._CALLS, *hlo._BRANCHES, "body", "condition")

    def reached(name: str) -> set[str]:
        return {name}.union(*(reached(called) for op in ops[name] for called in op.calls(keys)))

    conditionals = (op for held in ops.values() for op in held if op.opcode == "conditional")
    branches = {b for op in conditionals for b in op.calls(hlo._BRANCHES)}
    return [line for name in set().union(*map(reached, branches)) for line in lines[name]]


# -- results ------------------------------------------------------------------------------


def write(rows: Iterable[tuple[str, ...]]) -> None:
    """Put these rows into the results, in place of those with the same names."""
    old = RESULTS.read_text() if RESULTS.exists() else NOTES
    kept = (tuple(re.split(r" \| ", line[2:-2])) for line in old.splitlines() if "| " in line)
    table = {row[:KEYS]: row for row in kept if row[0] not in (COLUMNS[0], "---")}
    table |= {row[:KEYS]: row for row in rows}
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(table[key] for key in sorted(table))]
    text = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    RESULTS.write_text(f"{heading()}\n\n{text}\n\n{old[old.index(NOTES) :].rstrip()}\n")


def heading() -> str:
    """Return what stands above the table."""
    shapes = "; ".join(
        f"{name}: microbatches of {t.rows} x {t.length} tokens, M={t.microbatches}, remat {t.remat}"
        for name, t in MODELS.items()
    )
    return f"""# Pipelines for 8 H200s, ahead of time

`python -m benchmarks.pipeline_h200`, {datetime.date.today()}. The train step compiled for 8 H200s;
nothing ran. Computed in bfloat16, parameters and AdamW's moments in float32, attention by XLA.
{shapes}. pipe=8 is PIPE, pipe=4 tensor=2 is PIPE|TENSOR|SEQUENCE; interleaved has
{MODELS["gpt2-medium"].chunks} chunks of GPT-2 on each stage and {MODELS["llama2-7b"].chunks} of
Llama, the others one.

- **state**: parameters, moments and batch of one device; **temporaries**: what the step needs
  besides; **peak**: both, with results that take no argument's place. An H200 has
  {gib(GPUS["h200"].memory)}.
- **sends**: collective-permutes of one step and device, and their bytes. **asynchronous**: the
  share of the bytes with a start and a done. **hidden**, **covered**: as in overlap.md, the share
  with matmuls between start and done, and the share of the modelled time that those last.
- **others in loops**: collectives other than sends in the loop over ticks.
- **sends in branches**: collective-permutes inside a conditional. Must be 0."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Pipelined train steps, compiled for 8 H200s.")
    for name, choices in ALL.items():
        parser.add_argument(f"--{name}", choices=[*choices], help="default: all")
    given = vars(parser.parse_args())
    if not can_compile_for_gpus():
        print("skipped: compiling for H200s needs the CUDA wheels (hfjax.target says which).")
        return
    chosen = ([given[name]] if given[name] else choices for name, choices in ALL.items())
    for names in itertools.product(*chosen):
        row = measure(*names)
        print("  ".join(row), flush=True)
        write([row])


if __name__ == "__main__":
    main()
