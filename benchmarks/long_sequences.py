"""Rows that several devices share: memory, overlap and processor time; writes a table of each.

    python -m benchmarks.long_sequences memory     # compiled for 8 and 64 H200s, which are not here
    python -m benchmarks.long_sequences overlap    # compiled for 8: what runs beside each hop
    python -m benchmarks.long_sequences speed      # 8 fake CPU devices against DDP, same tokens

Tables go to benchmarks/results/long_sequences_*.md. Compiling needs `make wheels`.
"""

import re
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import hfjax  # noqa: E402
from hfjax.analysis.flights import flights  # noqa: E402
from hfjax.base.tables import human  # noqa: E402
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss  # noqa: E402
from hfjax.models.llama import Llama, LlamaConfig  # noqa: E402

RESULTS = Path(__file__).parent / "results"
FLASH = {"flash_block": "pallas", "*": "reference"}


def write(
    name: str,
    title: str,
    head: tuple[str, ...],
    lines: Iterator[tuple],
    benchmark: str = "long_sequences",
) -> None:
    """Write a table, line by line, and show it."""
    file = RESULTS / f"{benchmark}_{name}.md"
    command = f"`python -m benchmarks.{benchmark} {name}`, jax {jax.__version__}"
    rows = [" | ".join(head), " | ".join("---" for _ in head)]
    text = f"# {title}\n\n{command}.\n"
    for line in lines:
        rows.append(" | ".join(map(str, line)))
        print(rows[-1], flush=True)
        file.write_text(text + "".join(f"\n| {row} |" for row in rows) + "\n", encoding="utf-8")


def compiled(devices: int, length: int, layers: int = 32, **execution: Any) -> Any:
    """Return Llama-8B's step on one row, compiled for H200s."""
    config = LlamaConfig.preset("llama3-8b", length=length, layers=layers)
    mesh = hfjax.make_mesh(devices=hfjax.target_devices("h200", devices), context=devices)
    init = lambda rngs: Llama(config, rngs=rngs)
    layout = hfjax.layout(init, optax.adamw(1e-4), mesh, hfjax.FSDP | hfjax.CONTEXT)
    how = {"precision": "bf16", "remat": "full", **execution}
    step = hfjax.train_step(layout, next_token_loss, **how)
    return step.lower({"tokens": jax.ShapeDtypeStruct((1, length + 1), "int32")}).compile()


ARRAY = re.compile(r"= (?P<dtype>[a-z]+(?P<bits>\d+))\[(?P<shape>[\d,]+)\]\S* (?!parameter)")


def largest(program: Any) -> tuple[int, str]:
    """Return the bytes and the shape of the largest array that a program makes."""
    found = (
        (int(np.prod([int(n) for n in m["shape"].split(",")])) * int(m["bits"]) // 8, m)
        for m in ARRAY.finditer(program.as_text())
    )
    size, match = max(found, key=lambda x: x[0])
    return size, f"{match['dtype']}[{match['shape']}]"


def memory() -> Iterator[tuple]:
    """Yield what Llama-8B takes on each device, one row of so many tokens."""
    for devices, length in ((8, 131072), (16, 262144), (64, 1048576)):
        program = compiled(devices, length, context="ring", kernels="reference")
        needs, (size, shape) = program.memory_analysis(), largest(program)
        state, temporary = needs.argument_size_in_bytes, needs.temp_size_in_bytes
        told = (human(state), human(temporary), human(state + temporary))
        yield devices, f"{length:,}", *told, f"{human(size)} {shape}"


def overlap() -> Iterator[tuple]:
    """Yield what runs beside each collective of 4 layers, 8,192 tokens a device."""
    for form, kernels in (("ring", "reference"), ("ring", FLASH), ("allgather", FLASH)):
        program = compiled(8, 65536, layers=4, context=form, kernels=kernels)
        for f in flights(program):
            if f.bytes > 2**20:
                beside = "nothing" if f.flops == 0 else f"{f.flops / 1e9:,.0f} GFLOP"
                name = kernels if isinstance(kernels, str) else "pallas"
                yield form, name, f.kind, human(f.bytes), f.count, beside, f"{f.covered:.0%}"


def speed() -> Iterator[tuple]:
    """Yield the processor time of a step with rows on 8 devices, over that of DDP."""
    for tokens in (64, 128, 256):
        length, batch = 8 * tokens, {}
        config = GPTConfig.tiny(vocab=256, length=length, layers=4, embed=256, heads=8)
        batch["tokens"] = np.random.default_rng(0).integers(0, 256, (8, length + 1), np.int32)
        run = partial(_stepper, config, batch)
        steps = {
            "DDP": run(hfjax.DDP, {"data": 8}),
            "ring": run(hfjax.DDP | hfjax.CONTEXT, {"context": 8}, context="ring"),
            "ulysses": run(hfjax.DDP | hfjax.CONTEXT, {"context": 8}, context="ulysses"),
        }
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(12):
            for name, step in steps.items():
                begin = time.process_time()
                step()
                times[name].append(time.process_time() - begin)
        median = {name: statistics.median(times[name][2:]) for name in times}
        ratio = lambda name, of=median: f"{of[name] / of['DDP']:.2f}"
        yield tokens, f"{median['DDP']:.2f} s", ratio("ring"), ratio("ulysses")


def _stepper(config: Any, batch: Any, strategy: Any, sizes: Any, **execution: Any) -> Any:
    layout = hfjax.layout(
        lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-3), hfjax.make_mesh(**sizes), strategy
    )
    step, held = hfjax.train_step(layout, next_token_loss, **execution), [hfjax.init(layout)]
    placed = hfjax.shard_batch(layout, batch)

    def run() -> None:
        held[0], metrics = step(held[0], placed)
        jax.block_until_ready((held[0], metrics))

    return run


TABLES = {
    "memory": (
        "One row, Llama-8B in bfloat16, AdamW in float32, all recomputed: bytes per H200",
        ("devices", "tokens", "state", "temporary", "both", "largest temporary"),
        memory,
    ),
    "overlap": (
        "What runs beside each collective: Llama-8B's widths, 4 layers, 8,192 tokens on each of 8",
        ("form", "blocks", "kind", "bytes", "times", "products beside it", "covered"),
        overlap,
    ),
    "speed": (
        "Processor time of a step with rows on 8 fake CPU devices over that of DDP, same tokens",
        ("tokens a device and row", "DDP", "ring / DDP", "Ulysses / DDP"),
        speed,
    ),
}


if __name__ == "__main__":
    for name in sys.argv[1:] or TABLES:
        title, head, lines = TABLES[name]
        write(name, title, head, lines())
