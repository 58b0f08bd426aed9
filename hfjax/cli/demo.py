"""Train one small GPT on 8 simulated CPU devices under every strategy; compare with one device."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import hfjax
from hfjax.data import Loader, standard_library
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.parallel.mesh import describe_mesh
from hfjax.utils.tables import human

CONFIG = GPTConfig.tiny()
BATCH_SIZE, STEPS = 16, 10
WIDTH = 122  # width that the table needs
PIPED = {"gradient_accumulation_steps": 1, "schedule": hfjax.Schedule("1f1b", microbatches=4)}
TWICE = {
    "gradient_accumulation_steps": 1,
    "schedule": hfjax.Schedule("interleaved", microbatches=4, chunks=2),
}
CASES: dict[str, tuple] = {
    "one device": (hfjax.DDP, {"data": 1}),
    "DDP": (hfjax.DDP, {"data": 8}),
    "ZERO1": (hfjax.ZERO1, {"data": 8}),
    "ZERO2": (hfjax.ZERO2, {"data": 8}),
    "FSDP": (hfjax.FSDP, {"fsdp": 8}),
    "HSDP": (hfjax.HSDP, {"data": 2, "fsdp": 4}),
    "TENSOR+SEQUENCE": (hfjax.TENSOR | hfjax.SEQUENCE, {"data": 2, "tensor": 4}),
    "FSDP+TENSOR": (hfjax.FSDP | hfjax.TENSOR, {"data": 2, "fsdp": 2, "tensor": 2}),
    "PIPE, 1F1B": (hfjax.PIPE, {"pipe": 4, "data": 2}, PIPED),
    "PIPE+ZERO1+TENSOR": (
        hfjax.PIPE | hfjax.ZERO1 | hfjax.TENSOR,
        {"pipe": 2, "data": 2, "tensor": 2},
        TWICE,
    ),
}


class Entry(NamedTuple):
    """An entry of the table, for one strategy."""

    mesh: str
    loss: float
    memory: dict[str, int]
    collectives: hfjax.Collectives
    seconds: float


def train(case: tuple, text: Path, tick: Any) -> Entry:
    """Return the results of training under a strategy."""
    strategy, sizes, *own = case
    fields = {"gradient_accumulation_steps": 2, "max_grad_norm": 1.0} | (own[0] if own else {})
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    layout = hfjax.layout(lambda rngs: GPT(CONFIG, rngs=rngs), optax.adamw(1e-3), mesh, strategy)
    step = hfjax.train_step(layout, next_token_loss, **fields)
    data = Loader(text, BATCH_SIZE, CONFIG.length)
    compiled = step.lower(data.at(0)).compile()
    state = hfjax.init(layout, schedule=fields.get("schedule"))
    metrics, started = {}, time.perf_counter()
    for _ in range(STEPS):
        state, metrics = step(state, next(data))
        tick()
    step.check(state)
    seconds = (time.perf_counter() - started) / STEPS
    collectives = hfjax.collectives(compiled)
    return Entry(
        describe_mesh(mesh), float(metrics["loss"]), layout.bytes_per_device(), collectives, seconds
    )


def command(argv: Sequence[str]) -> int:
    """Run `hfjax demo` with these arguments; return the exit status."""
    argparse.ArgumentParser("hfjax demo", description=__doc__).parse_args(argv)
    return main()


def main() -> int:
    """Train under every strategy, print one table; return 1 if a loss differs."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    console, text, entries = Console(), standard_library() / "train", {}
    console.width = max(console.width, WIDTH)
    console.print(
        f"A GPT of {CONFIG.layers} layers reads Python's library, byte by byte: {STEPS} steps of "
        f"{BATCH_SIZE} examples in 2 to 4 microbatches on 8 fake CPU devices."
    )
    with Progress(console=console) as progress:
        task = progress.add_task("", total=STEPS * len(CASES))
        for name, case in CASES.items():
            progress.update(task, description=f"{name:<17}")
            entries[name] = train(case, text, lambda: progress.advance(task))
    console.print(table(entries))
    reference_loss = entries["one device"].loss
    difference = max(abs(entry.loss - reference_loss) for entry in entries.values())
    verdict = "equal to one device" if difference < 1e-4 else "NOT equal to one device"
    console.print(f"losses after {STEPS} steps: {verdict} (greatest difference {difference:.1e})")
    return 0 if difference < 1e-4 else 1


def table(entries: dict[str, Entry]) -> Table:
    """Return the table of strategies: loss, bytes per device, bytes sent in a step."""
    grid = Table(
        caption="per device; calls and moved: the collectives of a step, counted in its program",
        box=box.SIMPLE,
    )
    heads = ("strategy", "mesh", "loss", "parameters", "gradients", "optimizer_state", "calls")
    for head in (*heads, "moved"):
        grid.add_column(
            head, justify="left" if head in ("strategy", "mesh") else "right", no_wrap=True
        )
    for name, entry in entries.items():
        memory = [human(size) for size in entry.memory.values()]
        moved = (str(entry.collectives.count()), human(entry.collectives.moved))
        grid.add_row(name, entry.mesh, f"{entry.loss:.5f}", *memory, *moved)
    return grid
