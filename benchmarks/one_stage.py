"""What the pipeline's executor costs: one stage on one device beside plain accumulation.

The same GPT, microbatches and device; once through hfjax's pipeline (pipe=1, schedule 1f1b), once
through its plain step with accumulate=M. Single steps in turn, the ratio is the median over pairs
(against_plain_jax.py). Writes results/one_stage.md.

    python -m benchmarks.one_stage [--quick] [--rounds N]
"""

import argparse
import os
import platform
import re
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import hfjax
from benchmarks.against_plain_jax import (
    DECAY,
    FULL,
    RATE,
    SMALL,
    Runner,
    check_same,
    in_turn,
    milliseconds,
    ratio,
)
from hfjax.analysis import hlo
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss

RESULT = Path(__file__).parent / "results" / "one_stage.md"
MICROBATCHES, ROWS = 4, 4  # rows of a microbatch
REMATS = ("none", "dots", "full")
GOAL = 1.05
PROGRAMS: Mapping[str, dict[str, Any]] = {
    "accumulate": {"accumulate": MICROBATCHES},
    "one stage": {"schedule": hfjax.Schedule("1f1b", MICROBATCHES)},
}


def runner(config: GPTConfig, name: str, remat: str) -> tuple[Runner, tuple[float, ...]]:
    """Return one of the two programs, and what was counted in it."""
    model, optimizer = lambda rngs: GPT(config, rngs=rngs), optax.adamw(RATE, weight_decay=DECAY)
    plan = hfjax.layout(model, optimizer, hfjax.make_mesh(devices=jax.devices()[:1]), hfjax.PIPE)
    step = hfjax.train_step(plan, next_token_loss, clip=1.0, remat=remat, **PROGRAMS[name])
    draw = np.random.default_rng(0)
    shape = MICROBATCHES * ROWS, config.length + 1
    batch = hfjax.shard_batch(plan, {"tokens": draw.integers(0, config.vocab, shape, np.int32)})

    def run(state, batch):
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    lowered = step.lower(batch)
    made = Runner(name, run, hfjax.init(plan), batch).measure(lambda: lowered)
    return made, counted(lowered.compile())


def counted(program: jax.stages.Compiled) -> tuple[float, float, float]:
    """Return GFLOP, GB accessed and MB copied."""
    cost: dict[str, float] = program.cost_analysis() or {}
    return cost.get("flops", 0) / 1e9, cost.get("bytes accessed", 0) / 1e9, copied(program) / 1e6


def copied(program: jax.stages.Compiled) -> int:
    """Return the bytes of all copies in a program."""
    found = re.findall(r"= (\w+\[[\d,]*\])\S* copy\(", program.as_text() or "")
    return sum(hlo.Transfer("", (), *hlo._array(array)).bytes for array in found)


COLUMNS = (
    "remat",
    "accumulate ms",
    "one stage ms",
    "ratio",
    "CPU time",
    "GFLOP",
    "GB accessed",
    "MB copied",
    "temporary MiB",
    "losses differ",
    "quiet",
)


def row(config: GPTConfig, remat: str, rounds: int) -> tuple[str, ...]:
    """Return the cells of one kind of remat; of a pair, that of accumulation comes first."""
    made = [runner(config, name, remat) for name in PROGRAMS]
    runners = [runner for runner, _ in made]
    seen, quiet = in_turn(runners, rounds)
    used = quiet or seen
    numbers = zip(*(counts for _, counts in made), strict=True)
    return (
        remat,
        *(f"{milliseconds(used, i):.0f}" for i in range(2)),
        f"**{ratio(used, lambda t: t.wall, 1, 0):.3f}**",
        f"{ratio(seen, lambda t: t.own, 1, 0):.3f}",
        *(" / ".join(f"{n:.2f}" for n in pair) for pair in numbers),
        " / ".join(f"{r.temp_mib:.0f}" for r in runners),
        f"{check_same(runners):.0e}",
        f"{len(quiet)}/{rounds}",
    )


NOTES = f"""\
- Ratios are medians over pairs of steps taken in turn; "quiet" counts the pairs during which no
  other process used the cores, and the times are theirs (all pairs, if none was quiet); "CPU time"
  is the ratio of processor seconds over all pairs. Below 3 % is noise. The goal is {GOAL}.
- GFLOP and GB accessed are the compiler's counts, MB copied those of `copy` instructions: what lies
  in a loop is counted once. Both programs have the same loops, over microbatches and, with remat,
  over layers; accumulation has a loop of its own over layers for the forward and the backward
  pass, as the pipeline has."""


def main() -> None:
    parser = argparse.ArgumentParser(description="One stage of a pipeline beside accumulation.")
    parser.add_argument("--quick", action="store_true", help="a small model; writes no result")
    parser.add_argument("--rounds", type=int, default=10, help="pairs of steps")
    given = parser.parse_args()
    config = SMALL if given.quick else FULL
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    print(*lines, sep="\n", flush=True)
    for remat in REMATS:
        lines.append(f"| {' | '.join(row(config, remat, given.rounds))} |")
        print(lines[-1], flush=True)
    head = (
        f"`python -m benchmarks.one_stage`, {date.today()}, jax {jax.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores, one CPU device. GPT-2 of "
        f"{config.layers} layers, embed {config.embed}, vocab {config.vocab}; {MICROBATCHES} "
        f"microbatches of {ROWS} rows of {config.length} tokens, float32, AdamW, clipped."
    )
    if not given.quick:
        page = ["# One stage of a pipeline beside plain accumulation", head, *lines]
        RESULT.write_text("\n\n".join([*page[:2], "\n".join(lines), NOTES]) + "\n")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
