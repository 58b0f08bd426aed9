"""Memory of a pipeline: temporary bytes per device of the compiled gradients, and compile time.

The same layers under hfjax's schedules and as GPipe by autodiff of a scan (gpipe_autodiff.py), on
4 fake CPU devices. Nothing runs; writes results/pipeline_memory.md.

    python -m benchmarks.pipeline_memory
"""

import argparse
import platform
import time
from collections.abc import Iterable, Sequence
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import hfjax
from benchmarks import gpipe_autodiff
from benchmarks.gpipe_autodiff import Shape
from hfjax.models.layers import stack_layers
from hfjax.utils.paths import flatten

RESULT = Path(__file__).parent / "results" / "pipeline_memory.md"
SHAPE, STAGES, MICROBATCHES = Shape(), 4, 16
REMATS = ("none", "dots", "full")
CONTROL = "GPipe by autodiff of a scan"
# name of a schedule -> MiB of the prototype, for each kind of remat, that hfjax must not exceed
GOALS = {
    "gpipe": (405, 113, 36),
    "1f1b": (169, 50, 22),
    "interleaved": (129, 42, 20),
    "v": (99, 36, 21),
}
SCHEDULES = (*GOALS, "1f1b-published", "zb", "v-zb")
GROWING = (8, 16, 32, 64)  # microbatches


class Block(nnx.Module):
    """One layer: the control's own function on this module's parameters."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        normal = lambda s: jax.random.normal(rngs.params(), s) / np.sqrt(s[0])
        for name, value in shape.layer(normal, jnp.ones, jnp.zeros).items():
            setattr(self, name, nnx.Param(value))
        self.heads = shape.heads

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        held = {name: p[...] for name, p in vars(self).items() if isinstance(p, nnx.Param)}
        return gpipe_autodiff.block(self.heads, held, x_BSD)


class Model(nnx.Module):
    """The control's model in three parts."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        normal = lambda s: jax.random.normal(rngs.params(), s)
        ends = shape.ends(normal)
        self.tokens, self.unembed = nnx.Param(ends["tokens"]), nnx.Param(ends["unembed"])
        self.layers = stack_layers(shape.layers, lambda rngs: Block(shape, rngs=rngs), rngs)

    def embed(self, batch: dict[str, jax.Array]) -> jax.Array:
        return gpipe_autodiff.embed({"tokens": self.tokens[...]}, batch["tokens"])

    def head(self, x_BSD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x_BSD, self.unembed[...]


def loss(outputs: tuple[jax.Array, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    x_BSD, unembed = outputs
    return gpipe_autodiff.loss({"unembed": unembed}, x_BSD, batch["labels"])


class Measured(NamedTuple):
    """One compiled program."""

    mib: float  # temporary, of one device
    seconds: float  # to compile


def measured(program: jax.stages.Lowered) -> Measured:
    start = time.perf_counter()
    memory = program.compile().memory_analysis()
    assert memory is not None
    return Measured(memory.temp_size_in_bytes / 2**20, time.perf_counter() - start)


@lru_cache(maxsize=None, typed=True)  # 1 is not True here
def control(remat: str, microbatches: int = MICROBATCHES) -> Measured:
    return measured(gpipe_autodiff.lowered(SHAPE, STAGES, microbatches, remat))


@lru_cache(maxsize=None, typed=True)  # 1 is not True here
def ours(name: str, remat: str, unroll: int | bool, microbatches: int = MICROBATCHES) -> Measured:
    """Return hfjax's gradients, in the program that its step takes them from."""
    model, mesh = lambda rngs: Model(SHAPE, rngs=rngs), hfjax.make_mesh(pipe=STAGES)
    plan = hfjax.layout(model, optax.sgd(1e-3), mesh, hfjax.PIPE)
    schedule = hfjax.Schedule(name, microbatches)
    step = hfjax.train_step(plan, loss, schedule=schedule, remat=remat, unroll=unroll)
    state = step.layout.abstract_state()
    tokens = jax.ShapeDtypeStruct((microbatches * SHAPE.rows, SHAPE.length), jnp.int32)
    given = flatten(state.params), flatten(state.variables)
    batch = {"tokens": tokens, "labels": tokens}
    return measured(jax.jit(step.engine.gradients).lower(*given, batch, state.step))


# -- results ------------------------------------------------------------------------------


def remats() -> Iterable[Sequence[Any]]:
    """Yield the rows of the first table."""
    show = lambda runs: " / ".join(f"{run.mib:.0f}" for run in runs)
    yield "schedule", "layers in a loop", "layers unrolled", "prototype"
    yield CONTROL, show(map(control, REMATS)), "", ""
    for name in SCHEDULES:
        goal = " / ".join(map(str, GOALS[name])) if name in GOALS else ""
        goal += " (by autodiff)" * (name == "gpipe")
        runs = [show(ours(name, remat, unroll) for remat in REMATS) for unroll in (1, True)]
        yield name, *runs, goal


def growing() -> Iterable[Sequence[Any]]:
    """Yield the rows of the second table."""
    yield "schedule", *(f"M={count}" for count in GROWING)
    show = lambda run: f"{run.mib:.1f} MiB, {run.seconds:.1f} s"
    yield CONTROL, *(show(control("dots", count)) for count in GROWING)
    for name in SCHEDULES:
        yield name, *(show(ours(name, "dots", 1, count)) for count in GROWING)


def table(rows: Iterable[Sequence[Any]]) -> str:
    """Return a table in markdown, told line by line as it grows."""
    lines: list[str] = []
    for row in rows:
        lines.append(f"| {' | '.join(map(str, row))} |")
        lines += ["|---" * len(row) + "|"] if len(lines) == 1 else []
        print(lines[-1], flush=True)
    return "\n".join(lines)


NOTES = f"""\
- The numbers are the compiler's count of temporary bytes on one device, for the program that
  returns loss and gradients ({STAGES} fake CPU devices; `memory_analysis`). Parameters, gradients
  and batch are not in it; a whole step holds the gradients besides.
- *Layers in a loop* is `unroll=1`, what happens unasked on a GPU, and with remat on a CPU; *layers
  unrolled* is `unroll=True`, what a CPU does unasked without remat: where a stage has several
  layers of a chunk it holds one copy more of its parameters and of its gradients (they are stacked
  outside, apart inside).
- *Prototype* is what was reached before this code was written: the goal.
- zb keeps longer what W needs, and what crosses from B to W; with remat full that is more than
  what is saved by it.
- Seconds are of one run on cores shared with others: they tell that compiling does not take
  longer for more microbatches, no more."""


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0]).parse_args()
    shape = f"{SHAPE.layers} layers, embed {SHAPE.embed}, {SHAPE.heads} heads, {STAGES} stages"
    page = [
        "# Memory of a pipeline\n",
        f"`python -m benchmarks.pipeline_memory`, {date.today()}, jax {jax.__version__}, Python "
        f"{platform.python_version()}. {shape}; microbatches of {SHAPE.rows} rows x "
        f"{SHAPE.length} tokens, float32.\n",
        f"MiB with {MICROBATCHES} microbatches, remat {' / '.join(REMATS)}:\n",
        table(remats()),
        "\nAs microbatches are added, remat dots, layers in a loop; seconds to compile:\n",
        table(growing()),
        f"\n{NOTES}\n",
    ]
    RESULT.write_text("\n".join(page))


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    main()
