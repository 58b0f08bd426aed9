"""The bubble, by the clock: hfjax's executor under every schedule, beside what the table predicts.

The layers do nothing but sleep: in the forward pass, in the backward pass of their input, in that
of their weights. Sleeping needs no core, so that fake devices really work side by side, and what
is timed is the order in which the executor lets tasks run. Writes results/bubble.md.

    python -m benchmarks.bubble [--quick] [--schedule NAME ...]
"""

import argparse
import os
import platform
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("PJRT_NPROC", "32")  # as many may sleep at once, however few the cores

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

import hfjax
from hfjax.models.parts import stacked
from hfjax.parallel.mesh import TENSOR_AXES
from hfjax.parallel.schedules.cost import cost, stash
from hfjax.parallel.schedules.named import SCHEDULES

RESULT = Path(__file__).parent / "results" / "bubble.md"
PASS = 0.060  # seconds that each pass of one chunk takes for one microbatch
CASES = ((4, 16), (8, 8), (8, 16))  # stages, microbatches
STEPS = 3
GOAL = 0.08  # how far a schedule may be from its table
WIDTH = 4


class Sleeper(nnx.Module):
    """A layer whose three passes take so many seconds each."""

    def __init__(self, seconds: float, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(jnp.eye(WIDTH))
        self.input, self.weight = sleeping(seconds, seconds), sleeping(0, seconds)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.input(x @ self.weight(self.kernel[...]))


def sleeping(forward: float, backward: float) -> Callable[[jax.Array], jax.Array]:
    """Return the identity, which takes time; in a pipeline, where its gradient is computed."""

    @jax.custom_vjp
    def identity(x):
        return sleep(x, forward)

    identity.defvjp(lambda x: (sleep(x, forward), None), lambda _, dx: (sleep(dx, backward),))
    return identity


def sleep(x: jax.Array, seconds: float) -> jax.Array:
    """Return x, after a while."""
    if not seconds:
        return x

    def wait(number):
        time.sleep(seconds)
        return np.zeros_like(number)

    def call(number):  # a callback wants all axes of the mesh manual
        return jax.pure_callback(wait, jax.ShapeDtypeStruct((), x.dtype), number)

    rest = set(TENSOR_AXES)
    call = jax.shard_map(call, in_specs=P(), out_specs=P(), axis_names=rest, check_vma=False)
    return x + call(x.reshape(-1)[0])


class Model(nnx.Module):
    """One sleeper for each chunk of each stage; the ends take no time."""

    def __init__(self, layers: int, seconds: float, *, rngs: nnx.Rngs):
        self.layers = stacked(layers, lambda rngs: Sleeper(seconds, rngs=rngs), rngs)

    def embed(self, batch: jax.Array) -> jax.Array:
        return batch

    def head(self, x: jax.Array) -> jax.Array:
        return x


class Timed(NamedTuple):
    """A schedule's step in units of one pass of one stage."""

    measured: float
    predicted: float


def timed(name: str, stages: int, microbatches: int) -> Timed:
    """Return what one step took and should have taken."""
    schedule = hfjax.Schedule(name, microbatches)
    table = schedule.table(stages)
    model = lambda rngs: Model(table.virtual, PASS, rngs=rngs)
    mesh = hfjax.make_mesh(devices=jax.devices()[:stages], pipe=stages)
    plan = hfjax.layout(model, optax.sgd(0.0), mesh, hfjax.PIPE)
    step = hfjax.train_step(plan, lambda y, batch: y.mean(), schedule=schedule)
    state, batch = hfjax.init(plan, schedule=schedule), np.ones((microbatches, WIDTH), np.float32)
    took = []
    for _ in range(1 + STEPS):  # the first one compiles
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))
        took.append(time.perf_counter() - start)
    unit = PASS * table.chunks
    return Timed(min(took[1:]) / unit, cost(table, forward=1, backward=2, weights=1))


COLUMNS = ("schedule", "predicted", "measured", "differs by", "bubble", "predicted", "stash")


def row(name: str, stages: int, microbatches: int) -> tuple[str, ...]:
    """Return the cells of one schedule."""
    took = timed(name, stages, microbatches)
    away = took.measured / took.predicted - 1
    idle = lambda units: f"{1 - 3 * microbatches / units:.1%}"
    kept = max(stash(hfjax.Schedule(name, microbatches).table(stages)))
    return (
        name,
        f"{took.predicted:.1f}",
        f"{took.measured:.1f}",
        f"{away:+.1%}" if abs(away) <= GOAL else f"**{away:+.1%}**",
        idle(took.measured),
        idle(took.predicted),
        f"{kept:g}",
    )


def table(names: list[str], stages: int, microbatches: int) -> str:
    """Return the table of one case, told line by line as it grows."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    print(f"S={stages} M={microbatches}", *lines, sep="\n", flush=True)
    for name in names:
        lines.append(f"| {' | '.join(row(name, stages, microbatches))} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


NOTES = f"""\
- A unit is the time of one forward pass of one stage for one microbatch: {PASS * 1e3:.0f} ms of
  sleep for each of its chunks. The input's half of a backward pass takes one unit, the weights'
  half another. The model is a layer for each chunk of each stage. The step is that of
  `hfjax.train_step`; the quickest of {STEPS}, since others use the cores as well.
- *Predicted* is `hfjax.parallel.schedules.cost.cost` (lockstep): a tick ends for all stages at
  once. *Bubble* is the share of the time in which a stage does nothing of use.
- *Stash* is the most microbatches that a stage keeps activations of, in whole stages; what W needs
  of B in a split table comes besides (`hfjax schedule` tells of how many).
- Bold: more than {GOAL:.0%} away from the table."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Time schedules, measured beside predicted.")
    parser.add_argument("--quick", action="store_true", help="the first case; writes no result")
    parser.add_argument("--schedule", nargs="+", help="only these; writes no result")
    given = parser.parse_args()
    trains = [n for n, builder in SCHEDULES.items() if builder(4, 8, builder.chunks).trains]
    page = [
        "# The bubble, by the clock\n",
        f"`python -m benchmarks.bubble`, {date.today()}, jax {jax.__version__}, Python "
        f"{platform.python_version()}, {os.cpu_count()} cores: fake CPU devices whose layers "
        "sleep.",
    ]
    for stages, microbatches in CASES[: 1 if given.quick else None]:
        page.append(f"\n## {stages} stages, {microbatches} microbatches\n")
        page.append(table(given.schedule or trains, stages, microbatches))
    if not (given.quick or given.schedule):
        RESULT.write_text("\n".join([*page, f"\n{NOTES}\n"]))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(stages for stages, _ in CASES))
    main()
