"""Loops over layers, ahead of time: what a train step moves, gathers, keeps and hides by its form.

Compiles steps for 8 H200s (none is needed, only the CUDA wheels) with layers in a loop, in turns of
2 and 4, and in no loop, and reads the programs: `moved_bytes.py` and analysis/flights.py say what
counts. Writes one row for each to results/loops.md, next to the rows that are there.

    python -m benchmarks.loops                                   # the table
    python -m benchmarks.loops --only 124M:fsdp:none:1           # model:strategy:remat:unroll
    python -m benchmarks.loops --attention kept --only medium:fsdp:none:true

Attention in these programs is XLA's. `lean` saves its inputs, its output and one number for each
row of scores, as a GPU's does; `kept` leaves to XLA what it saves.
"""

import argparse
import math
import os
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the devices to compile for are not here

import jax
import jax.numpy as jnp
import optax
from jax import lax

import hfjax
from benchmarks.moved_bytes import Program, most
from benchmarks.overlap import cells
from benchmarks.result_rows import put
from hfjax.analysis.flights import flights
from hfjax.models.attention import dot_product
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.models.llama import Llama, LlamaConfig
from hfjax.parallel.compiler import PRESETS, compiler_options
from hfjax.parallel.placement import batch_devices
from hfjax.target import target_devices

RESULTS = Path(__file__).parent / "results" / "loops.md"
STRATEGIES: dict[str, tuple[hfjax.Strategy, dict[str, int]]] = {
    "ddp": (hfjax.DDP, {"data": 8}),
    "fsdp": (hfjax.FSDP, {"fsdp": 8}),
    "fsdp_tensor": (hfjax.FSDP | hfjax.TENSOR | hfjax.SEQUENCE, {"fsdp": 2, "tensor": 4}),
}
# model: (rows for each device, tokens in a row)
MODELS = {"124M": (8, 1024), "medium": (8, 1024), "8B": (1, 4096), "70B": (1, 4096)}
DEEP = ("8B-32", "8B-80")  # with so many layers
FORMS = ("1", "2", "4", "true")
COLUMNS = (
    *("jax", "model", "strategy", "remat", "attention", "layers", "preset"),
    *("moved", "bytes", "gathers", "whole", "temporaries", "exposed", "seconds"),
)


@jax.custom_vjp
def lean(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Return causal attention that saves its inputs, its output and a number for each row."""
    return _lean(query, key, value)[0]


def _scores(query, key):
    repeat = query.shape[2] // key.shape[2]
    key = jnp.repeat(key, repeat, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    scores = scores / math.sqrt(query.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.where(causal, scores, -1e30)


def _lean(query, key, value):
    scores = _scores(query, key)
    norm = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - norm[..., None]).astype(value.dtype)
    value = jnp.repeat(value, query.shape[2] // value.shape[2], axis=2)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value), norm


def _lean_forward(query, key, value):
    out, norm = _lean(query, key, value)
    return out, (query, key, value, out, norm)


def _lean_backward(saved, cotangent):
    # With a barrier, else XLA keeps the scores.
    (query, key, value, out, norm), cotangent = lax.optimization_barrier((saved, cotangent))
    repeat = query.shape[2] // key.shape[2]
    wide = lambda x: jnp.repeat(x, repeat, axis=2)
    narrow = lambda x: x.reshape(*x.shape[:2], -1, repeat, x.shape[-1]).sum(3)
    weights = jnp.exp(_scores(query, key) - norm[..., None])
    inner = jnp.einsum("bqhd,bkhd->bhqk", cotangent, wide(value)).astype(jnp.float32)
    row = jnp.einsum("bqhd,bqhd->bhq", cotangent, out).astype(jnp.float32)
    scores = weights * (inner - row[..., None]) / math.sqrt(query.shape[-1])
    scores = scores.astype(query.dtype)
    return (
        jnp.einsum("bhqk,bkhd->bqhd", scores, wide(key)),
        narrow(jnp.einsum("bhqk,bqhd->bkhd", scores, query)),
        narrow(jnp.einsum("bhqk,bqhd->bkhd", weights.astype(query.dtype), cotangent)),
    )


lean.defvjp(_lean_forward, _lean_backward)
ATTENTION = {
    "lean": lambda query, key, value, **_: lean(query, key, value),
    "kept": partial(dot_product, implementation="xla"),
}


def model(name: str, attention: str) -> Any:
    """Return a model's constructor: GPT-2 with all its layers, Llama with 8."""
    attend = ATTENTION[attention]
    width, _, layers = name.partition("-")
    if width in ("8B", "70B"):
        sizes = {"layers": int(layers or 8), "attention": attend}
        config = LlamaConfig.preset(f"llama3-{width.lower()}", **sizes)
        return lambda rngs: Llama(config, rngs=rngs)
    preset = {"124M": "small"}.get(name, name)
    config = GPTConfig.preset(preset, pad_vocab_to=128, attention=attend)
    return lambda rngs: GPT(config, rngs=rngs)


def compiled(
    name: str, strategy: str, remat: str, attention: str, unroll: str, preset: str
) -> tuple[jax.stages.Compiled, float]:
    """Return a step compiled for H200s, and how long that took."""
    table, sizes = STRATEGIES[strategy]
    mesh = hfjax.make_mesh(devices=target_devices("h200", math.prod(sizes.values())), **sizes)
    plan = hfjax.layout(model(name, attention), optax.adamw(1e-3), mesh, table)
    rows, length = MODELS[name.partition("-")[0]]
    batch = {"tokens": jax.ShapeDtypeStruct((rows * batch_devices(mesh), length + 1), jnp.int32)}
    step = hfjax.train_step(
        plan,
        next_token_loss,
        precision="bf16",
        clip=1.0,
        remat=remat,
        unroll=True if unroll == "true" else int(unroll),
        compiler_options=compiler_options(PRESETS[preset], "gpu"),
    )
    start = time.process_time()
    program = step.lower(batch).compile()
    return program, time.process_time() - start


def measure(
    name: str, strategy: str, remat: str, attention: str, unroll: str, preset: str
) -> tuple[str, ...]:
    """Return the cells of one row."""
    program, seconds = compiled(name, strategy, remat, attention, unroll, preset)
    read, memory = Program(program), program.memory_analysis()
    assert memory is not None  # XLA's GPU compiler always tells
    for line in most(read.moved):
        print("   ", line)
    return (
        *(jax.__version__, name, strategy, remat, attention, _form(unroll), preset),
        f"{read.moved.moved / 1e9:.1f} GB",
        f"{read.moved.total / 1e9:.0f} GB",
        str(read.whole.gathers),
        f"{read.whole.bytes / 2**20:.0f} MiB",
        f"{memory.temp_size_in_bytes / 2**20:.0f} MiB",
        cells(flights(program))[2].replace(" of ", " / "),
        f"{seconds:.0f} s",
    )


def _form(unroll: str) -> str:
    return {"1": "in a loop", "true": "in turn, no loop"}.get(unroll, f"{unroll} in a turn")


# -- results ------------------------------------------------------------------------------


def table() -> Iterator[tuple[str, str, str, str, str, str]]:
    """Yield model, strategy, remat, attention, form and preset of each row."""
    for name in MODELS:
        for strategy in STRATEGIES:
            for remat in ("none", "full", "dots"):
                if remat == "none" and strategy == "ddp":
                    continue  # it runs in no loop
                if remat != "none" and strategy == "fsdp_tensor":
                    continue
                forms = FORMS if (name, strategy) == ("medium", "fsdp") else ("1", "true")
                for unroll in forms:
                    yield name, strategy, remat, "lean", unroll, best(strategy, unroll)
    for unroll in FORMS:
        yield "medium", "fsdp", "none", "kept", unroll, best("fsdp", unroll)
    for name in DEEP:
        for unroll in ("1", "true"):
            yield name, "fsdp", "none", "lean", unroll, best("fsdp", unroll)


def best(strategy: str, unroll: str) -> str:
    """Return the preset that hides most."""
    return {"ddp": "default", "fsdp": "overlap_two"}.get(
        strategy, "overlap_two" if unroll == "true" else "overlap"
    )


HEAD = """# Loops over layers, ahead of time

`python -m benchmarks.loops` (last rows: {date}). Train steps compiled for 8 H200s; nothing ran.
bfloat16, AdamW, clipped. 124M and medium are GPT-2 with all their layers, 8 rows of 1,024 tokens a
device or tensor group; 8B and 70B are 8 layers of Llama 3's widths (8B-32: 32), a row of 4,096.
ddp is data=8, fsdp is fsdp=8, fsdp_tensor is FSDP|TENSOR|SEQUENCE on fsdp=2 x tensor=4.

- **moved**: bytes read and written by what only moves (slices, updates of slices, copies,
  transposes); **bytes**: by all instructions.
- **gathers** of parameters of at least 1 MiB in one call; **whole**: what of them is there at once.
- **exposed**: seconds of transfers that no matmul covers, by the model of overlap.md.
- **seconds**: processor time of lowering and compiling.
- *lean* attention saves inputs, output and a number for each row; *kept*: what XLA likes to.
"""


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="*", metavar="MODEL:STRATEGY:REMAT:UNROLL")
    parser.add_argument("--attention", choices=ATTENTION, default="lean")
    parser.add_argument("--preset", choices=PRESETS)
    given = parser.parse_args()
    wanted = list(table())
    if given.only:
        split = (text.split(":") for text in given.only)
        wanted = [(n, s, r, given.attention, u, best(s, u)) for n, s, r, u in split]
    for name, strategy, remat, attention, unroll, preset in wanted:
        found = measure(name, strategy, remat, attention, unroll, given.preset or preset)
        print(" | ".join(found), flush=True)
        put(RESULTS, HEAD, COLUMNS, found, key=7)


if __name__ == "__main__":
    main()
