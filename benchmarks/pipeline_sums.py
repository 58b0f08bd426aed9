"""Ahead of time: which sums of gradients a pipeline beside data runs beside its matmuls.

Compiles GPT-2 medium on pipe=4, data=2 for 8 H200s (none is needed, only the CUDA wheels), reads
the schedule (hfjax/analysis/flights.py says what counts) and writes a row for each pipeline to
results/pipeline_sums.md.

    python -m benchmarks.pipeline_sums [--schedule NAME]
"""

import argparse
import os
from functools import partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the devices to compile for are not here

import jax
import jax.numpy as jnp
import optax

import hfjax
from benchmarks.result_rows import put
from hfjax.analysis.flights import Flight, flights
from hfjax.models.attention import dot_product
from hfjax.models.gpt import GPT, GPTConfig
from hfjax.models.loss import next_token_loss
from hfjax.target import can_compile_for_gpus, target_devices

SCHEDULES = {"gpipe": None, "1f1b": None, "interleaved": 3, "zb": None}  # and their chunks
MICROBATCHES, ROWS, LENGTH = 8, 8, 1024  # rows of a microbatch on a device
RESULTS = Path(__file__).parent / "results" / "pipeline_sums.md"
COLUMNS = ("jax", "schedule", "sums of layers", "hidden", "sums of the ends", "hidden", "both")
COLUMNS = (*COLUMNS, "exposed", "temporaries")
HEAD = """# Sums of gradients of pipelines beside data, ahead of time

`python -m benchmarks.pipeline_sums` (last rows: {date}). GPT-2 medium on pipe=4 data=2, compiled
for 8 H200s; nothing ran. 8 microbatches of 8 rows of 1024 tokens a device, bfloat16, gradients in
float32, remat="dots", attention by XLA; interleaved has 3 chunks on a stage.

- **sums of layers**: all-reduces over data, of a stage's layers; **sums of the ends**: over pipe
  and data, of embedding and head, which are tied here. **hidden**: the share of their bytes with at
  least 1 GFLOP of matmuls between start and done; **both**: of all sums.
- **exposed**: modelled time of transfers that no matmul covers, of their whole time (overlap.md).
"""


def measure(name: str) -> tuple[str, ...]:
    """Return the cells of one row."""
    mesh = hfjax.make_mesh(devices=target_devices("h200", 8), pipe=4, data=2)
    attention = partial(dot_product, implementation="xla")  # cuDNN's needs cuDNN to compile
    config = GPTConfig.preset("medium", pad_vocab_to=128, attention=attention)
    init = lambda rngs: GPT(config, rngs=rngs)
    layout = hfjax.layout(init, optax.adamw(1e-3), mesh, hfjax.PIPE)
    schedule = hfjax.Schedule(name, MICROBATCHES, SCHEDULES[name])
    options = {"precision": "bf16", "remat": "dots", "clip": 1.0}
    step = hfjax.train_step(layout, next_token_loss, schedule=schedule, **options)
    shape = 2 * MICROBATCHES * ROWS, LENGTH + 1
    program = step.lower({"tokens": jax.ShapeDtypeStruct(shape, jnp.int32)}).compile()
    memory = program.memory_analysis()
    assert memory is not None
    sums = [f for f in flights(program) if f.kind == "all-reduce"]
    layers = [f for f in sums if f.axes == ("data",)]
    ends = [f for f in sums if f.axes == ("pipe", "data")]
    cells = *sizes(layers), *sizes(ends), sizes(sums)[1]
    exposed, seconds = sum(f.exposed for f in sums) * 1e3, sum(f.seconds for f in sums) * 1e3
    temporaries = f"{memory.temp_size_in_bytes / 2**20:.0f} MiB"
    return (jax.__version__, name, *cells, f"{exposed:.2f} of {seconds:.2f} ms", temporaries)


def sizes(found: list[Flight]) -> tuple[str, str]:
    """Return the bytes of these transfers, and how much of them is hidden."""
    total = sum(f.total for f in found)
    return f"{total / 2**20:.0f} MiB", f"{sum(f.hidden for f in found) / total:.0%}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Sums of gradients beside matmuls, in pipelines.")
    parser.add_argument("--schedule", choices=[*SCHEDULES], help="default: all")
    given = parser.parse_args()
    if not can_compile_for_gpus():
        print("skipped: compiling for H200s needs the CUDA wheels (hfjax.target says which).")
        return
    for name in [given.schedule] if given.schedule else SCHEDULES:
        row = measure(name)
        print("  ".join(row), flush=True)
        put(RESULTS, HEAD, COLUMNS, row)


if __name__ == "__main__":
    main()
