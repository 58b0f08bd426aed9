"""Idle slots of pipelines: what they cost where stages compute in them, and where they skip them.

The processor time of a step on four fake devices over that of the same model and microbatches on
one device; beside it torch's 1F1B in processes, if torch is installed. `--h200` compiles a GPT for
8 H200s, of which none is needed, and reads the program: memory, copies inside of branches, what is
sent and how much of it beside products. Each writes its part of results/idle_slots.md.

    python -m benchmarks.idle_slots [--h200] [--quick]
"""

import argparse
import itertools
import math
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("PJRT_NPROC", "64")  # as many devices may wait at once, however few the cores
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hfjax
from benchmarks.pipeline_h200 import copied_in_branches, sends_in_branches
from hfjax.analysis.flights import Flight, flights
from hfjax.models.attention import dot_product
from hfjax.models.gpt import GPT, GPTConfig
from hfjax.models.loss import next_token_loss
from hfjax.models.parts import stacked
from hfjax.target import can_compile_for_gpus, target_devices

RESULT = Path(__file__).parent / "results" / "idle_slots.md"
STAGES, MICROBATCHES, LAYERS, WIDTH, ROWS = 4, 8, 8, 512, 512
FREE = ("gpipe", "1f1b", "interleaved", "looped-bfs", "v", "zb", "v-zb")
OTHERS = ("1f1b-published", "zb-h1", "zb-v", "dualpipe-v")
ROUNDS = 4
GOAL = 1.12


class Layer(nnx.Module):
    """An MLP beside its input."""

    def __init__(self, *, rngs: nnx.Rngs):
        normal = lambda *shape: jax.random.normal(rngs.params(), shape) / shape[0] ** 0.5
        self.up, self.down = (
            nnx.Param(normal(WIDTH, 4 * WIDTH)),
            nnx.Param(normal(4 * WIDTH, WIDTH)),
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...]


class Model(nnx.Module):
    """Layers between nothing."""

    def __init__(self, rngs: nnx.Rngs):
        self.layers = stacked(LAYERS, lambda rngs: Layer(rngs=rngs), rngs)

    def embed(self, batch: jax.Array) -> jax.Array:
        return batch

    def head(self, x: jax.Array) -> jax.Array:
        return x


class Run(NamedTuple):
    """A step that can be run again, and what its program has."""

    again: Any  # () -> seconds of all processors
    temporaries: float  # MiB
    permutes: int
    compiled: float  # seconds


def prepared(schedule: hfjax.Schedule | None) -> Run:
    """Return the step of a schedule; None: of one device, which accumulates the microbatches."""
    sizes = {} if schedule is None else {"pipe": STAGES}
    mesh = hfjax.make_mesh(devices=jax.devices()[: STAGES if sizes else 1], **sizes)
    strategy = hfjax.DDP if schedule is None else hfjax.PIPE
    plan = hfjax.layout(Model, optax.sgd(1e-3), mesh, strategy)
    fields: dict[str, Any] = {"schedule": schedule} if schedule else {"accumulate": MICROBATCHES}
    step = hfjax.train_step(plan, lambda y, _: jnp.square(y).mean(), **fields)
    batch = np.random.default_rng(0).normal(size=(MICROBATCHES * ROWS, WIDTH)).astype(np.float32)
    lowered, start = step.lower(batch), time.perf_counter()
    program = lowered.compile()
    seconds, memory = time.perf_counter() - start, program.memory_analysis()
    assert memory is not None
    held = [hfjax.init(plan, 0, schedule)]

    def again() -> float:
        start = processor()
        held[0], metrics = step(held[0], batch)
        jax.block_until_ready((held[0], metrics))
        return processor() - start

    again()
    sent = hfjax.collectives(lowered).count("permute")
    return Run(again, memory.temp_size_in_bytes / 2**20, sent, seconds)


def processor() -> float:
    """Return the seconds that all cores have worked for this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(names: Iterable[str], rounds: int) -> Iterable[Sequence[str]]:
    """Yield the rows of the table: each schedule beside one device, in turns."""
    yield "schedule", "branches", "processor time", "temporaries", "permutes", "compile"
    one = prepared(None)
    for name in names:
        wanted = (False, "auto") if name in FREE else ("auto",)
        runs = {w: prepared(hfjax.Schedule(name, MICROBATCHES, branches=w)) for w in wanted}
        took: dict[Any, list[float]] = {w: [] for w in (*wanted, None)}
        for _ in range(rounds):
            for which, run in (*runs.items(), (None, one)):
                took[which].append(run.again())
        for which, run in runs.items():
            ratio = min(took[which]) / min(took[None])
            told = f"{ratio:.2f}" if which is False or ratio <= GOAL else f"**{ratio:.2f}**"
            size = f"{run.temporaries:.1f} MiB"
            said = "on" if which else "off"
            yield name, said, told, size, f"{run.permutes}", f"{run.compiled:.1f} s"
    if find_spec("torch"):
        yield "torch 1F1B, 4 processes", "", f"{torch_ratio():.2f}", "", "", ""


def torch_ratio() -> float:
    """Return the processor time of torch's 1F1B over that of the same model in one process."""
    seconds = []
    for count in (STAGES, 1):
        command = [sys.executable, "-m", "benchmarks.torch_1f1b", str(count)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        seconds.append(float(done.stdout.split()[-1]))
    return seconds[0] / seconds[1]


# -- compiled for H200s -----------------------------------------------------------------------

PIPE, FSDP = hfjax.PIPE, hfjax.PIPE | hfjax.FSDP
MESHES = {"pipe=4 data=2": PIPE, "pipe=4 fsdp=2": FSDP}
COMPILED = [
    *itertools.product(("pipe=4 data=2", "pipe=4 fsdp=2"), ("1f1b",), (False, "auto")),
    *itertools.product(("pipe=4 data=2",), ("1f1b-published", "zb-h1", "zb-v"), ("auto",)),
]


def compiled() -> Iterable[Sequence[str]]:
    """Yield the rows of the table: what XLA makes of a step for 8 H200s."""
    yield (
        *("jax", "mesh", "schedule", "branches", "temporaries", "copied in branches"),
        *("sends", "asynchronous", "hidden", "gathers", "hidden", "sends in branches", "compile"),
    )
    for mesh, name, branches in COMPILED:
        start = time.perf_counter()
        program = lowered_for_h200s(mesh, name, branches).compile()
        seconds, memory = time.perf_counter() - start, program.memory_analysis()
        assert memory is not None
        text, found = program.as_text() or "", list(flights(program))
        sends, gathers = ([f for f in found if f.kind == k] for k in ("permute", "all-gather"))
        yield (
            *(jax.__version__, mesh, name, "on" if branches else "off"),
            f"{memory.temp_size_in_bytes / 2**20:.0f} MiB",
            copied(text),
            *shares(sends),
            *shares(gathers)[::2],
            str(sends_in_branches(text)),
            f"{seconds:.0f} s",
        )


def copied(text: str) -> str:
    """Return what is copied in branches, once for each time that it stands in the program."""
    found = copied_in_branches(text).items()
    width = {"bf16": 2, "f16": 2, "pred": 1}

    def size(array: str) -> int:
        dtype, dims = array[:-1].split("[")
        return width.get(dtype, 4) * math.prod(map(int, filter(None, dims.split(","))))

    return f"{sum(size(array) * count for array, count in found) / 2**20:.0f} MiB"


def shares(found: Sequence[Flight]) -> tuple[str, str, str]:
    """Return how often something is sent, how much of it asynchronously, and beside products."""
    if not found:
        return "none", "", ""
    total = sum(f.total for f in found)
    return (
        f"{sum(f.count for f in found)} x",
        f"{sum(f.total for f in found if not f.synchronous) / total:.0%}",
        f"{sum(f.hidden for f in found) / total:.0%}",
    )


def lowered_for_h200s(mesh: str, name: str, branches: bool | str) -> jax.stages.Lowered:
    """Return the step of GPT-2 medium with 16 layers, microbatches of 4 x 1024 tokens a device."""
    attention = partial(dot_product, implementation="xla")  # cuDNN's needs cuDNN to compile
    config = GPTConfig.preset("medium", pad_vocab_to=128, attention=attention, layers=16)
    sizes = {axis: int(size) for axis, size in re.findall(r"(\w+)=(\d+)", mesh)}
    grid = hfjax.make_mesh(devices=target_devices("h200", 8), **sizes)
    model = lambda rngs: GPT(config, rngs=rngs)
    plan = hfjax.layout(model, optax.adamw(1e-4), grid, MESHES[mesh])
    schedule = hfjax.Schedule(name, 16, branches=branches)
    fields: dict[str, Any] = {"precision": "bf16", "remat": "dots", "clip": 1.0}
    step = hfjax.train_step(plan, next_token_loss, schedule=schedule, **fields)
    return step.lower({"tokens": jax.ShapeDtypeStruct((16 * 4 * 2, 1025), jnp.int32)})


# -- results ------------------------------------------------------------------------------------


def table(rows: Iterable[Sequence[str]]) -> str:
    """Return a table in markdown, told line by line as it grows."""
    lines: list[str] = []
    for row in rows:
        lines.append(f"| {' | '.join(row)} |")
        lines += ["|---" * len(row) + "|"] if len(lines) == 1 else []
        print(lines[-1], flush=True)
    return "\n".join(lines)


def write(part: str, text: str) -> None:
    """Put a part into the results, in place of what it was."""
    old = RESULT.read_text() if RESULT.exists() else "# Idle slots of pipelines\n"
    head, *parts = re.split(r"(?m)^(?=## )", old)
    kept = {p.split("\n")[0]: p for p in parts} | {f"## {part}": f"## {part}\n\n{text}\n\n"}
    RESULT.write_text(
        (head.rstrip() + "\n\n" + "".join(kept[k] for k in sorted(kept))).rstrip() + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What idle slots of pipelines cost.")
    parser.add_argument("--h200", action="store_true", help="compile for H200s instead of running")
    parser.add_argument("--quick", action="store_true", help="two schedules; writes no result")
    given = parser.parse_args()
    if given.h200 and not can_compile_for_gpus():
        print("skipped: compiling for H200s needs the CUDA wheels (hfjax.target says which).")
        return
    if given.h200:
        write(f"Compiled for 8 H200s, jax {jax.__version__}", f"{H200}\n\n{table(compiled())}")
        return
    names = ("1f1b", "v") if given.quick else (*FREE, *OTHERS)
    rows = table(measured(names, 2 if given.quick else ROUNDS))
    if not given.quick:
        write("By the clock of the processor", f"{head()}\n\n{rows}\n\n{NOTES}")


H200 = f"""\
`python -m benchmarks.idle_slots --h200`, {date.today()}; nothing ran. GPT-2 medium with 16 layers,
16 microbatches of 4 x 1024 tokens on a device, bfloat16, remat dots, clipped. *Copied in branches*:
bytes of `copy` instructions inside of conditionals, each loop's counted once; what is left under
1f1b are gradients of embedding and head, which were copied without branches too."""


def head() -> str:
    return (
        f"`python -m benchmarks.idle_slots`, {date.today()}, jax {jax.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores. {STAGES}\n"
        f"stages on as many fake CPU devices, {MICROBATCHES} microbatches of {ROWS} rows,\n"
        f"{LAYERS} layers of width {WIDTH}, float32, SGD."
    )


NOTES = f"""\
- *Processor time*: user and system time of a step over that of the same model and microbatches on
  one device (`accumulate={MICROBATCHES}`), the least of {ROUNDS} in turns, since others use
  the cores too. Bold: above {GOAL}.
- *off*: every stage computes in every slot that its tick has. The tables of the last rows always
  branch.
- Schedules that need branches wrote to rings within them before: on a CPU that is cheaper (with 256
  rows 1f1b-published 0.92, zb-h1 1.02, zb-v 1.05, dualpipe-v 0.99; in this form 1.14, 1.20, 1.25,
  1.29): what a layer keeps is now copied into its ring, and idle slots write back what is there.
  For H200s it was dearer: XLA copied the rings in each branch, 1f1b-published took 4,156 MiB of
  temporaries, not 2,982, and half of what it sent was not asynchronous.
- torch: `torch.distributed.pipelining.Schedule1F1B` over gloo, one thread a process, the sum of all
  processes' times over that of the same layers and microbatches in one process."""


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", STAGES)
    main()
