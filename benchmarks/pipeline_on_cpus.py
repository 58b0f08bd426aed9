"""Processor time of pipelines on simulated CPU devices, against one device.

All take as many microbatches. Simulated devices share the cores, so what a pipeline takes beyond
one device is its overhead. Steps alternate; ratios are medians of rounds, so run it where nothing
else runs.

    python -m benchmarks.pipeline_on_cpus [1f1b zb ...] [--vocab 8192] [--rounds 12]
"""

import argparse
import statistics
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax

import hfjax
from benchmarks.against_plain_jax import FULL, Runner, in_turn, ratio
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss

STAGES, MICROBATCHES = 4, 8  # a microbatch is one sequence


def runner(config: GPTConfig, name: str | None) -> Runner:
    """Return the step of a schedule; without a name that of one device."""
    if name is None:
        mesh, strategy = hfjax.make_mesh(devices=jax.devices()[:1]), hfjax.DDP
        execution: dict[str, Any] = {"gradient_accumulation_steps": MICROBATCHES}
    else:
        mesh, strategy = hfjax.make_mesh(pipe=STAGES), hfjax.PIPE
        execution = {"schedule": hfjax.Schedule(name, MICROBATCHES)}
    model = lambda rngs: GPT(config, rngs=rngs)
    layout = hfjax.layout(model, optax.adamw(1e-3), mesh, strategy)
    step = hfjax.train_step(layout, next_token_loss, max_grad_norm=1.0, **execution)
    shape = MICROBATCHES, config.length + 1
    tokens = np.random.default_rng(0).integers(0, config.vocab, shape, np.int32)
    batch = hfjax.shard_batch(layout, {"tokens": tokens})

    def run(state, batch):
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    state = hfjax.init(layout, schedule=execution.get("schedule"))
    return Runner(name or "one device", run, state, batch).measure(lambda: step.lower(batch))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("schedules", nargs="*", default=["1f1b"])
    parser.add_argument("--vocab", type=int, default=FULL.vocab)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    config = replace(FULL, vocab=given.vocab)
    runners = [runner(config, name) for name in (None, *given.schedules)]
    seen, quiet = in_turn(runners, given.rounds)
    print(f"{len(quiet)} of {given.rounds} rounds were quiet.\n")
    print("| | processor s | of one device | wall time | temporary MiB of a device |")
    print("|---|---|---|---|---|")
    for i, each in enumerate(runners):
        processor = statistics.median(times[i].own for times in seen)
        ratios = (ratio(seen, lambda t: t.own, i, 0), ratio(seen, lambda t: t.wall, i, 0))
        cells = f"{processor:.2f}", *(f"{x:.2f}" for x in ratios), f"{each.temp_mib:.0f}"
        print(f"| {each.name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    main()
