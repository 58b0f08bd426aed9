"""Overlap, ahead of time: how much of what a train step sends runs under its matmuls.

Compiles GPT-2 medium's real step for 8 H200s, or two nodes of them (none is needed, only the CUDA
wheels), under each strategy, reads the schedule (hfjax/analysis/flights.py says what counts), and
writes one row for each strategy and setting to results/overlap.md, next to the rows that are there.

    python -m benchmarks.overlap                           # every strategy and preset
    python -m benchmarks.overlap --config fsdp             # one strategy
    python -m benchmarks.overlap --preset overlap          # one preset of parallel/compiler.py
    python -m benchmarks.overlap --all                     # every setting that was tried
"""

import argparse
import datetime
import math
import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the devices to compile for are not here

import jax
import jax.numpy as jnp
import optax

import hfjax
from hfjax.analysis.flights import Flight, flights
from hfjax.machines.machine import H200
from hfjax.models.attention import dot_product
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.parallel.compiler import PRESETS, compiler_options
from hfjax.parallel.placement import batch_devices
from hfjax.target import can_compile_for_gpus, target_devices

NODE, INSIDE, BETWEEN, FLOPS = H200.per_node, H200.inside, H200.between, H200.scheduled_flops

STRATEGIES: Mapping[str, tuple[hfjax.Strategy, dict[str, int]]] = {
    "ddp": (hfjax.DDP, {"data": 8}),
    "fsdp": (hfjax.FSDP, {"fsdp": 8}),
    "tensor": (hfjax.TENSOR | hfjax.SEQUENCE, {"data": 2, "tensor": 4}),
    "fsdp_tensor": (hfjax.FSDP | hfjax.TENSOR | hfjax.SEQUENCE, {"fsdp": 2, "tensor": 4}),
    "hsdp": (hfjax.HSDP, {"data": 2, "fsdp": NODE}),
    "fsdp_two_nodes": (hfjax.FSDP, {"fsdp": 2 * NODE}),
}
ROWS, LENGTH = 8, 1024  # rows on each group of devices that shares them, tokens in a row
OVERLAP = PRESETS["overlap"]
XLA = "xla_gpu_"
APART = {
    XLA + "all_gather_combine_threshold_bytes": 0,
    XLA + "reduce_scatter_combine_threshold_bytes": 0,
    XLA + "all_reduce_combine_threshold_bytes": 0,
}
DOUBLE = {XLA + "enable_while_loop_double_buffering": True}
UNROLLED = {XLA + "enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_FULL_UNROLL"}
WINDOWED = {
    XLA + "threshold_for_windowed_einsum_mib": 0,
    XLA + "multi_streamed_windowed_einsum": True,
}
RINGS = {  # products whose transfers run under products (docs/kernels.md)
    "all_gather_matmul": "reference",
    "matmul_reduce_scatter": "reference",
    "*": "xla",
}
IN_PARTS = {"cross_entropy": "reference", "*": "xla"}  # the loss, without its logits
# setting -> (compiler options, other fields of Execution)
TRIED: Mapping[str, tuple[Mapping[str, Any], dict[str, Any]]] = {
    "scheduler on": ({XLA + "enable_latency_hiding_scheduler": True}, {}),
    "double buffering": (DOUBLE, {}),
    "loops unrolled by XLA": (UNROLLED, {}),
    "windowed einsum": (WINDOWED, {}),
    "overlap, double buffering": ({**OVERLAP, **DOUBLE}, {}),
    "overlap, nothing combined": ({**OVERLAP, **APART}, {}),
    "overlap, unroll=2": (OVERLAP, {"unroll": 2}),
    "overlap, remat=dots": (OVERLAP, {"remat": "dots"}),
    "remat=full": ({}, {"remat": "full"}),
    "overlap, remat=full": (OVERLAP, {"remat": "full"}),
    "rings": ({}, {"kernels": RINGS}),
    "overlap, rings": (OVERLAP, {"kernels": RINGS}),
    "loss in parts": ({}, {"kernels": IN_PARTS}),
    "overlap_two, remat=full": (PRESETS["overlap_two"], {"remat": "full"}),
}
RESULTS = Path(__file__).parent / "results" / "overlap.md"
COLUMNS = ("jax", "strategy", "setting", "hidden", "covered", "exposed", "temporaries", "by kind")
NOTES = "## Notes"


def compiled(strategy: str, options: Mapping[str, Any], **execution: Any) -> jax.stages.Compiled:
    """Return the train step of GPT-2 medium, compiled for as many H200s as the mesh has."""
    table, sizes = STRATEGIES[strategy]
    devices = target_devices("h200", math.prod(sizes.values()))
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    attention = partial(dot_product, implementation="xla")  # cuDNN's needs cuDNN to compile
    config = GPTConfig.preset("medium", pad_vocab_to=128, attention=attention)
    plan = hfjax.layout(lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), mesh, table)
    options = compiler_options(options, "gpu")
    execution = {"precision": "bf16", "clip": 1.0, "compiler_options": options, **execution}
    rows = ROWS * batch_devices(mesh)
    batch = {"tokens": jax.ShapeDtypeStruct((rows, LENGTH + 1), jnp.int32)}
    return hfjax.train_step(plan, next_token_loss, **execution).lower(batch).compile()


def measure(strategy: str, setting: str) -> tuple[str, ...]:
    """Return the cells of one row; a setting that this jax refuses says so."""
    options, execution = settings()[setting]
    name = (jax.__version__, strategy, setting)
    try:
        program = compiled(strategy, options, **execution)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return (*name, "failed", "", "", "", str(error).split("\n")[0][:80])
    memory = program.memory_analysis()
    assert memory is not None  # XLA's GPU compiler always tells
    found = flights(program)
    return (*name, *cells(found), f"{memory.temp_size_in_bytes / 2**20:.0f} MiB", by_kind(found))


def settings() -> dict[str, tuple[Mapping[str, Any], dict[str, Any]]]:
    """Return {setting: (compiler options, fields of Execution)}, the presets first."""
    return {name: (options, {}) for name, options in PRESETS.items()} | dict(TRIED)


def cells(found: list[Flight]) -> tuple[str, str, str]:
    """Return hidden and covered shares, and the exposed part of the modelled transfer time."""
    total = sum(f.total for f in found)
    seconds = sum(f.seconds * f.count for f in found)
    exposed = sum(f.exposed for f in found)
    return (
        f"{sum(f.hidden for f in found) / total:.1%}",
        f"{1 - exposed / seconds:.1%}",
        f"{exposed * 1e3:.2f} of {seconds * 1e3:.2f} ms",
    )


def by_kind(found: list[Flight]) -> str:
    """Return bytes and hidden share for each kind and axis, most bytes first; none below 1 MiB."""
    groups: dict[str, list[int]] = {}
    for f in found:
        sums = groups.setdefault(f"{f.kind} {'+'.join(f.axes)}", [0, 0])
        sums[:] = sums[0] + f.total, sums[1] + f.hidden
    ordered = sorted(groups.items(), key=lambda item: -item[1][0])
    show = lambda name, total, hidden: f"{name} {total / 2**20:.0f} MiB {hidden / total:.0%}"
    return ", ".join(show(name, *sums) for name, sums in ordered if sums[0] >= 2**20)


# -- results ------------------------------------------------------------------------------


def write(rows: Iterable[tuple[str, ...]]) -> None:
    """Put these rows into the results, in place of those of the same jax, strategy and setting."""
    old, notes = _sections()
    kept = (tuple(re.split(r" \| ", line[2:-2])) for line in old.splitlines() if "| " in line)
    table = {row[:3]: row for row in kept if row[0] not in (COLUMNS[0], "---")}
    table |= {row[:3]: row for row in rows}
    order = {name: i for i, name in enumerate(settings())}
    strategies = list(STRATEGIES)
    key = lambda r: (strategies.index(r[1]), r[0], order.get(r[2], len(order)))
    lines = [COLUMNS, ("---",) * len(COLUMNS), *sorted(table.values(), key=key)]
    text = "\n".join(f"| {' | '.join(row)} |" for row in lines)
    RESULTS.write_text(f"{heading()}\n\n{text}\n\n{notes.rstrip()}\n")


def _sections() -> tuple[str, str]:
    """Return what stands in the results before the notes, and the notes."""
    old = RESULTS.read_text() if RESULTS.exists() else NOTES
    return old[: old.index(NOTES)], old[old.index(NOTES) :]


def heading() -> str:
    """Return what stands above the table."""
    return f"""# Overlap, ahead of time

`python -m benchmarks.overlap --all` (last rows: {datetime.date.today()}). GPT-2 medium compiled
for H200s; nothing ran. {ROWS} rows of {LENGTH} tokens a device or tensor group, bfloat16,
attention by XLA.
ddp is data=8, fsdp is fsdp=8, tensor is TENSOR|SEQUENCE on data=2 x tensor=4, fsdp_tensor is
FSDP|TENSOR|SEQUENCE on fsdp=2 x tensor=4, all on one node of {NODE}; hsdp is HSDP on data=2 x
fsdp={NODE}, fsdp_two_nodes is fsdp={2 * NODE}: two nodes. `default` is what XLA does unasked.

- **hidden**: share of collective bytes with at least 1 GFLOP of matmuls between start and done.
- **covered**: share of their modelled transfer time for which those matmuls last; **exposed**: the
  rest of it, per step. {FLOPS / 1e12:.0f} TFLOP/s; a device sends {INSIDE / 1e9:.0f} GB/s (NVLink),
  {BETWEEN / 1e9:.0f} GB/s where the groups of a collective cross nodes (InfiniBand); one transfer
  at a time. A model, not a clock.
- **temporaries**: `memory_analysis().temp_size_in_bytes` of one device."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Share of collective bytes under a matmul.")
    parser.add_argument(
        "--preset", choices=[*settings()], help="default: those of parallel/compiler.py"
    )
    parser.add_argument("--config", choices=[*STRATEGIES], help="default: every strategy")
    parser.add_argument("--all", action="store_true", help="every setting")
    given = parser.parse_args()
    if not can_compile_for_gpus():
        print("skipped: compiling for H200s needs the CUDA wheels (hfjax.target says which).")
        return
    chosen = [given.preset] if given.preset else [*(settings() if given.all else PRESETS)]
    for strategy in [given.config] if given.config else STRATEGIES:
        for setting in chosen:
            row = measure(strategy, setting)
            print("  ".join(row), flush=True)
            write([row])


if __name__ == "__main__":
    main()
