"""Tensor overlap, ahead of time: are two half-batches per layer worth their smaller products?

Under TENSOR|SEQUENCE the gathers and scatters of a layer stand between matmuls that need them, so
no option of XLA hides them. If each layer runs on two halves of a device's rows, the collectives of
one half can run beside matmuls of the other; but halved products fill a GPU worse. This compiles
GPT-2 medium, and layers as wide as those of Llama 2 7B and Llama 3 70B, for 8 H200s (none is
needed, only the CUDA wheels), whole and in halves, and writes what both cost by a stated model to
results/tensor_overlap.md, next to the rows that are there.

    python -m benchmarks.tensor_overlap                       # every model
    python -m benchmarks.tensor_overlap --model llama2-7b/2   # one of them

The model: a step takes its exposed transfers (hfjax/analysis/flights.py says what counts) and then
all of its products, one after another (hfjax/analysis/product_time.py says what each takes), with
tiles of 128 x 256, one on each of 132 SMs, at 500 TFLOP/s when all are busy, and 4.8 TB/s of
memory.

Halves also add two gradients of each kernel: three passes of bfloat16 through memory. Norms,
softmax, copies and the optimizer are left out: the same elements pass through them, whole or
halved. Products are read from the compiled program, so what XLA has split by itself (gradients of
GPT-2's kernels) is a batch of parts, whose partial sums are written and the model reads no more.
`MACHINES` varies what is uncertain.
"""

import argparse
import datetime
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the devices to compile for are not here

import jax
import jax.numpy as jnp
import optax

import hfjax
from hfjax.analysis.flights import flights, products
from hfjax.analysis.product_time import ProductModel, seconds
from hfjax.machines.machine import H200
from hfjax.models.attention import dot_product
from hfjax.models.gpt import GPT, GPTConfig
from hfjax.models.llama import Llama, LlamaConfig
from hfjax.models.loss import next_token_loss
from hfjax.parallel.compiler import PRESETS
from hfjax.parallel.placement import batch_devices
from hfjax.target import can_compile_for_gpus, target_devices

BASE = ProductModel.scheduled(H200)
MODEL = "the model"
MACHINES: Mapping[str, ProductModel] = {
    MODEL: BASE,
    "start-up 0": replace(BASE, start_up=0.0),
    "start-up 6 us": replace(BASE, start_up=6e-6),
    "400 TFLOP/s": replace(BASE, flops=400e12),
    "600 TFLOP/s": replace(BASE, flops=600e12),
    "tiles 128 x 128": replace(BASE, tile=(128, 128)),
    "parts of waves": replace(BASE, whole_waves=False),
    "beside transfers 15 % slower": replace(BASE, beside=0.15),
}


# -- models -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model, where it lies and what it is given."""

    create: Callable
    config: Any
    mesh: Mapping[str, int]
    rows: int  # of a tensor group
    length: int
    layers: tuple[int, ...]  # of one program; of two, whose difference is that of their layers

    @property
    def kernel_bytes(self) -> float:
        """The bytes of one layer's kernels on one device, in bfloat16."""
        return sum(2 * a * b for a, b in self.config.linear_maps.values()) / self.mesh["tensor"]


attention = partial(dot_product, implementation="xla")  # cuDNN's needs cuDNN to compile
_llama = lambda name, rows: Model(
    Llama, LlamaConfig.preset(name, attention=attention), {"tensor": 8}, rows, 4096, (6, 2)
)
_MEDIUM = GPTConfig.preset("medium", pad_vocab_to=128, attention=attention)
MODELS: Mapping[str, Model] = {
    "gpt2-medium/8": Model(GPT, _MEDIUM, {"data": 2, "tensor": 4}, 8, 1024, (24,)),
    "llama2-7b/2": _llama("llama2-7b", 2),
    "llama3-70b/2": _llama("llama3-70b", 2),
}
RINGS = {"all_gather_matmul": "reference", "matmul_reduce_scatter": "reference", "*": "xla"}
HALVES, TWO = "halves", {"split_rows": 2}
# setting -> (compiler options, other fields of Execution); those called halves run on halves
SETTINGS: Mapping[str, tuple[Mapping[str, Any], dict[str, Any]]] = {
    **{name: (PRESETS[name], {}) for name in ("default", "overlap", "overlap_two")},
    "rings": ({}, {"kernels": RINGS}),
    "halves, merged": ({}, TWO),
    "halves": (PRESETS["split_rows"], TWO),
    "halves, overlap_two": (PRESETS["split_rows"] | PRESETS["overlap_two"], TWO),
}


def compiled(model: Model, setting: str, layers: int) -> jax.stages.Compiled:
    """Return the train step of a model with so many layers, compiled for 8 H200s."""
    options, execution = SETTINGS[setting]
    config = replace(model.config, layers=layers)
    create = lambda rngs: model.create(config, rngs=rngs)
    mesh = hfjax.make_mesh(devices=target_devices("h200", 8), **model.mesh)
    plan = hfjax.layout(create, optax.adamw(1e-4), mesh, hfjax.TENSOR | hfjax.SEQUENCE)
    execution = {"precision": "bf16", "clip": 1.0, "compiler_options": options, **execution}
    rows = model.rows * batch_devices(mesh)
    batch = {"tokens": jax.ShapeDtypeStruct((rows, model.length + 1), jnp.int32)}
    return hfjax.train_step(plan, next_token_loss, **execution).lower(batch).compile()


# -- what they cost -----------------------------------------------------------------------

Costs = dict[str, float]


def costs(program: jax.stages.Compiled, sums: float) -> Costs:
    """Return bytes and modelled seconds of a step; `sums`: seconds that adding gradients takes."""
    memory = program.memory_analysis()
    assert memory is not None  # XLA's GPU compiler always tells
    found = flights(program)
    made = products(program.as_text() or "")
    result: Costs = {"bytes": sum(f.total for f in found), "hidden": sum(f.hidden for f in found)}
    result["seconds"] = sum(f.seconds * f.count for f in found)
    result["temporaries"] = memory.temp_size_in_bytes
    for name, machine in MACHINES.items():
        judged = replace(H200, scheduled_flops=machine.flops)
        exposed = sum(f.exposed for f in flights(program, judged))
        result[f"{name}: exposed"] = exposed
        busy = sums + sum(seconds(p, machine) * p.count for p in made)
        result[f"{name}: products"] = busy + machine.beside * (result["seconds"] - exposed)
    return result


def measure(model: Model, setting: str) -> Costs:
    """Return the costs of a step, or of one layer, the difference of two steps."""
    sums = 3 * model.kernel_bytes / BASE.memory if setting.startswith(HALVES) else 0.0
    whole, *less = (costs(compiled(model, setting, n), n * sums) for n in model.layers)
    if not less:
        return whole
    more = model.layers[0] - model.layers[1]
    return {name: (whole[name] - less[0][name]) / more for name in whole}


def together(cost: Costs, machine: str) -> float:
    """Return the seconds of exposed transfers and products."""
    return cost[f"{machine}: exposed"] + cost[f"{machine}: products"]


def gains(measured: Mapping[str, Costs]) -> tuple[str, ...]:
    """Return for each machine how much less the best of the halves takes than the best whole."""
    halved = [cost for name, cost in measured.items() if name.startswith(HALVES)]
    whole = [cost for name, cost in measured.items() if not name.startswith(HALVES)]
    best = lambda several, machine: min(together(cost, machine) for cost in several)
    return tuple(f"{1 - best(halved, m) / best(whole, m):+.1%}" for m in MACHINES)


def cells(cost: Costs) -> tuple[str, ...]:
    """Return what the first table shows of a step or a layer."""
    show = lambda value: f"{value * 1e3:.2f} ms"
    exposed, busy = (cost[f"{MODEL}: {part}"] for part in ("exposed", "products"))
    return (
        f"{cost['hidden'] / cost['bytes']:.0%}",
        f"{show(exposed)[:-3]} of {show(cost['seconds'])}",
        show(busy),
        show(exposed + busy),
        f"{cost['temporaries'] / 2**20:.0f} MiB",
    )


# -- results ------------------------------------------------------------------------------

RESULTS = Path(__file__).parent / "results" / "tensor_overlap.md"
NOTES = "## Notes"
COSTS = ("jax", "model", "setting", "hidden", "exposed", "products", "together", "temporaries")
GAINS = ("jax", "model", *MACHINES)


def write(name: str, measured: Mapping[str, Costs]) -> None:
    """Put one model's rows into the results, in place of those of the same jax."""
    old = RESULTS.read_text() if RESULTS.exists() else NOTES
    key = (jax.__version__, name)
    lines = (tuple(re.split(r" \| ", line[2:-2])) for line in old[: old.index(NOTES)].splitlines())
    kept = [row for row in lines if len(row) > 2 and row[1] in MODELS and row[:2] != key]
    kept += [(*key, setting, *cells(cost)) for setting, cost in measured.items()]
    kept += [(*key, *gains(measured))]
    order = [*MODELS]
    kept.sort(key=lambda row: (order.index(row[1]), row[0]))
    in_costs, in_gains = ([r for r in kept if (r[2] in SETTINGS) == is_cost] for is_cost in (1, 0))
    text = f"{heading()}\n\n{_table(COSTS, in_costs)}\n\n{GAIN}\n\n{_table(GAINS, in_gains)}\n\n"
    RESULTS.write_text(text + old[old.index(NOTES) :].rstrip() + "\n")


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [columns, ("---",) * len(columns), *rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines)


GAIN = """## How much less the best of the halves takes than the best whole setting

Of `together`; below 0 halves take longer. Each column changes one number of the model."""


def heading() -> str:
    """Return what stands above the first table."""
    flops, memory, sms = BASE.flops, BASE.memory, BASE.sms
    return f"""# Tensor overlap, ahead of time

`python -m benchmarks.tensor_overlap` (last rows: {datetime.date.today()}). Compiled for 8 H200s;
nothing ran. TENSOR|SEQUENCE, bfloat16, no remat, attention by XLA. A model's name ends with the
rows of a tensor group. gpt2-medium: a whole step, rows of 1024 tokens, data=2 x tensor=4. The
Llamas: one layer, forward and backward, rows of 4096 tokens, tensor=8; a quarter of the difference
of steps with 6 and 2 layers.

- `default`, `overlap`, `overlap_two`: presets; `rings`: collective matmuls (docs/kernels.md).
- `halves`: each layer runs on two halves of the rows; XLA merges no products, combines no
  collectives and has one of them under way at a time. `halves, overlap_two`: two, and that preset;
  `halves, merged`: XLA's defaults.
- **hidden**: share of collective bytes with at least 1 GFLOP of matmuls between start and done.
- **exposed**: what of the transfers' modelled time no matmul covers (results/overlap.md).
- **products**: all matmuls, one after another: {BASE.start_up * 1e6:.0f} us each, then whole
  waves of tiles of 128 x 256 over {sms} SMs at {flops / 1e12:.0f} TFLOP/s, with the best split of
  the inner dimension, never faster than memory ({memory / 1e12} TB/s). Of halves also the sum of
  each kernel's two gradients. The benchmark's docstring has the rest.
- **together**: exposed and products. A model, not a clock; all other work is left out.
- **temporaries**: `memory_analysis().temp_size_in_bytes` of one device."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether halves of a batch are worth it.")
    parser.add_argument("--model", choices=[*MODELS], help="default: every one")
    given = parser.parse_args()
    if not can_compile_for_gpus():
        print("skipped: compiling for H200s needs the CUDA wheels (hfjax.target says which).")
        return
    for name in [given.model] if given.model else MODELS:
        measured = {}
        for setting in SETTINGS:
            measured[setting] = measure(MODELS[name], setting)
            print("  ".join([name, setting, *cells(measured[setting])]), flush=True)
        write(name, measured)
        print("  ".join([name, *gains(measured)]), flush=True)


if __name__ == "__main__":
    main()
