"""Losses of muon and of AdamW: a byte GPT on the standard library's source, three rates of each.

Every run has the same parameters at the start, the same batches in the same order and the same
shape of the schedule; the loss is that of fixed held-out batches. Writes results/muon.md.

    python -m benchmarks.muon --steps 1000 --embed 64 --layers 2
"""

import argparse
import json
import platform
import textwrap
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import jax
import optax

import hfjax
from hfjax.data import Loader, standard_library
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss

RESULT = Path(__file__).parent / "results" / "muon.md"
BATCH, VALID_BATCHES = 16, 8
ADAM_RATE = 3e-3  # of AdamW beside muon
POINTS = (0.02, 0.05, *(i / 10 for i in range(1, 11)))  # fractions of a run


def muon(schedule: Callable) -> optax.GradientTransformation:
    """Return muon whose AdamW has a rate of its own, by the same shape of the schedule."""
    return hfjax.optimizers.muon(schedule, adam_learning_rate=_scaled(schedule), weight_decay=0.1)


def adamw(schedule: Callable) -> optax.GradientTransformation:
    """Return AdamW for all parameters."""
    return optax.adamw(schedule, b2=0.95, weight_decay=0.1)


def _scaled(schedule: Callable) -> Callable:
    return lambda count: schedule(count) * (ADAM_RATE / schedule.peak)  # type: ignore[attr-defined]


OPTIMIZERS: dict[str, tuple[Callable, tuple[float, ...]]] = {
    "muon": (muon, (0.01, 0.02, 0.04)),
    "AdamW": (adamw, (3e-3, 1e-2, 3e-2)),
}


def make_schedule(peak: float, steps: int) -> Callable:
    """Return the learning rates of a run."""
    rates = hfjax.lr_schedule(peak, warmup_steps=steps // 10, steps=steps)
    schedule = lambda count: rates(count)
    schedule.peak = peak  # type: ignore[attr-defined]
    return schedule


def run(args: argparse.Namespace, optimizer: Any) -> tuple[dict[int, float], float]:
    """Return the held-out loss by step, and the seconds of a step."""
    config = GPTConfig(
        vocab=256, length=args.length, layers=args.layers, heads=args.heads, embed=args.embed
    )
    model = lambda rngs: GPT(config, rngs=rngs)
    mesh = hfjax.make_mesh(devices=jax.devices()[:1])
    layout = hfjax.layout(model, optimizer, mesh, hfjax.DDP)
    step = hfjax.train_step(layout, next_token_loss)
    evaluate: Any = hfjax.eval_step(layout, next_token_loss)
    library = standard_library()
    train = Loader(library / "train", BATCH, args.length, threads=0, prefetch=0)
    held_out = Loader(library / "valid", BATCH, args.length, threads=0, prefetch=0)
    batches = [next(held_out) for _ in range(VALID_BATCHES)]
    points = {max(1, round(fraction * args.steps)) for fraction in POINTS}
    state, losses, begin = hfjax.init(layout), dict[int, float](), 0.0
    for number in range(1, args.steps + 1):
        state, _ = step(state, next(train))
        if number == 1:  # it has compiled
            begin = time.perf_counter()
        if number in points:
            found = [float(evaluate(state, batch)["loss"]) for batch in batches]
            losses[number] = sum(found) / len(found)
    return losses, (time.perf_counter() - begin) / max(args.steps - 1, 1)


def main() -> None:
    """Train, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    sizes = {"steps": 1000, "layers": 2, "heads": 4, "embed": 64, "length": 64}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    found = {}
    for name, (make, peaks) in OPTIMIZERS.items():
        for peak in peaks:
            losses, seconds = run(args, make(make_schedule(peak, args.steps)))
            found[name, peak] = losses
            print(json.dumps([name, peak, losses, round(seconds, 4)]), flush=True)
    args.out.write_text(report(args, found))


def report(args: argparse.Namespace, found: dict[tuple[str, float], dict[int, float]]) -> str:
    """Return the page."""
    flags = " ".join(
        f"--{name} {getattr(args, name)}"
        for name in ("steps", "layers", "heads", "embed", "length")
    )
    points = list(next(iter(found.values())))
    last = lambda key: found[key][points[-1]]
    best = {name: min((key for key in found if key[0] == name), key=last) for name in OPTIMIZERS}
    run_text = (
        f"`python -m benchmarks.muon {flags}`, {date.today()}, jax {jax.__version__}, "
        f"{platform.system()}, one CPU device."
    )
    text = (
        f"A byte GPT ({args.layers} layers, {args.embed} wide, {args.length} tokens a row, "
        f"{BATCH} rows a step) on the source of Python's standard library: the loss (nats a byte) "
        f"of {VALID_BATCHES} held-out batches, by the number of steps. All runs have the same "
        "start, batches and shape of the schedule (a tenth of warm-up, then a cosine to a tenth), "
        f"and a weight decay of 0.1. AdamW beside muon has the rate {ADAM_RATE:g}, AdamW alone "
        "b2=0.95. Bold: the best rate of each."
    )
    lines = [
        "# Muon and AdamW",
        "",
        *textwrap.wrap(run_text, 100),
        "",
        *textwrap.wrap(text, 100),
        "",
        f"| optimizer | rate | {' | '.join(map(str, points))} |",
        "|" + "---|" * (len(points) + 2),
    ]

    for (name, peak), losses in found.items():
        cells = [name, f"{peak:g}", *(f"{losses[point]:.3f}" for point in points)]
        mark = "**" if best[name] == (name, peak) else ""
        lines.append("| " + " | ".join(f"{mark}{cell}{mark}" for cell in cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
