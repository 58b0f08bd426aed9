"""What a step needs beside its state where parameters are whole and moments are not.

Compiles GPT-2 medium's step for 8 H200s (none is needed, only the CUDA wheels), and the same step
up to its gradients: what it needs more is what the update takes, and the gather of new parameters.
One row of 1024 tokens on a device and remat="full", so that activations do not cover it. Writes
results/zero_memory.md.

    python -m benchmarks.zero_memory [--config ZERO2]
"""

import argparse
import math
import os
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the devices to compile for are not here

import jax
import jax.numpy as jnp
import optax

import hfjax
from benchmarks.result_rows import put
from hfjax.base.paths import flatten
from hfjax.models.attention import dot_product
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.target import can_compile_for_gpus, target_devices

CONFIGS = {"ZERO1": hfjax.ZERO1, "ZERO2": hfjax.ZERO2}
RESULTS = Path(__file__).parent / "results" / "zero_memory.md"
COLUMNS = ("jax", "strategy", "until gradients", "step", "more", "largest parameter", "gathered")
HEAD = """# New parameters of ZERO1 and ZERO2, gathered

`python -m benchmarks.zero_memory` (last rows: {date}). GPT-2 medium on data=8, compiled for 8
H200s; nothing ran. One row of 1024 tokens a device, bfloat16, AdamW in float32, remat="full".

- **until gradients**: temporaries of the program that returns the summed gradients, and they;
  **step**: temporaries of the whole step; **more**: the difference.
- **largest parameter**: the stack of one kernel of all layers, which is one array of the state.
- **gathered**: all-gathers of a step, and their bytes.
"""


def measure(name: str) -> tuple[str, ...]:
    """Return the cells of one row."""
    mesh = hfjax.make_mesh(devices=target_devices("h200", 8), data=8)
    attention = partial(dot_product, implementation="xla")  # cuDNN's needs cuDNN to compile
    config = GPTConfig.preset("medium", pad_vocab_to=128, attention=attention)
    init = lambda rngs: GPT(config, rngs=rngs)
    layout = hfjax.layout(init, optax.adamw(1e-3), mesh, CONFIGS[name])
    step = hfjax.train_step(layout, next_token_loss, precision="bf16", remat="full", clip=1.0)
    batch = {"tokens": jax.ShapeDtypeStruct((8, 1025), jnp.int32)}
    whole = step.lower(batch).compile()

    def gradients(state: Any, batch: Any) -> Any:
        return step.plane.gradients(flatten(state.params), {}, batch, state.step)[0]

    alone = jax.jit(gradients).lower(layout.abstract_state(), batch).compile().memory_analysis()
    memory = whole.memory_analysis()
    assert alone is not None
    assert memory is not None
    until = alone.temp_size_in_bytes + alone.output_size_in_bytes
    largest = max(math.prod(p.shape) * p.dtype.itemsize for p in layout.placed.values())
    sent = [row for row in hfjax.collectives(whole) if row.kind == "all-gather"]
    sizes = until, memory.temp_size_in_bytes, memory.temp_size_in_bytes - until, largest
    count, size = sum(row.count for row in sent), sum(row.count * row.bytes for row in sent)
    return (jax.__version__, name, *map(mib, sizes), f"{count} x, {mib(size)}")


def mib(size: int) -> str:
    return f"{size / 2**20:.0f} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description="Memory of ZERO1 and ZERO2, ahead of time.")
    parser.add_argument("--config", choices=[*CONFIGS], help="default: both")
    given = parser.parse_args()
    if not can_compile_for_gpus():
        print("skipped: compiling for H200s needs the CUDA wheels (hfjax.target says which).")
        return
    for name in [given.config] if given.config else CONFIGS:
        row = measure(name)
        print("  ".join(row), flush=True)
        put(RESULTS, HEAD, COLUMNS, row)


if __name__ == "__main__":
    main()
