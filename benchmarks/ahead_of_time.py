"""Train steps compiled for H200s: memory, bytes, and which transfers no matmul hides.

No GPU is needed, only the CUDA wheels (`make wheels`); nothing runs. `CASES` is the table of what
is compiled. Each case writes a row to results/ahead_of_time.md, in place of that of the same jax.

    python -m benchmarks.ahead_of_time                       # all cases: one to two hours
    python -m benchmarks.ahead_of_time "fsdp, *" zero2       # those of these names or patterns
"""

import argparse
import datetime
import fnmatch
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the devices to compile for are not here

import jax
import jax.numpy as jnp
import optax
from jax import lax

import hfjax
from benchmarks.moved_bytes import Program
from hfjax import CONTEXT, DDP, EXPERT, FSDP, HSDP, PIPE, SEQUENCE, TENSOR, ZERO1, ZERO2, Schedule
from hfjax.analysis.matmul_time import ProductModel, matmul_seconds
from hfjax.analysis.overlap import flights, products
from hfjax.analysis.targets import can_compile_for_gpus, how_to_install, target_devices
from hfjax.hardware.machine import H200
from hfjax.models.attention import dot_product
from hfjax.models.gpt import GPT, GPTConfig
from hfjax.models.llama import Llama, LlamaConfig
from hfjax.models.loss import next_token_loss
from hfjax.models.moe import MoEConfig, MoELlama, next_token_loss as routed_loss
from hfjax.models.vision.deeplab import DeepLab, DeepLabConfig
from hfjax.models.vision.losses import segmentation_loss
from hfjax.parallel.param_specs import batch_devices
from hfjax.weights.families import parse_config

# -- attention ----------------------------------------------------------------------------

BY_XLA = partial(dot_product, implementation="xla")  # cuDNN's needs cuDNN to compile


@jax.custom_vjp
def lean(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Return causal attention that saves what cuDNN's does: no scores, a number for each row."""
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
LEAN = {"attention": lambda query, key, value, **_: lean(query, key, value)}


# -- models -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A model, and how it is trained."""

    module: Callable[..., Any]
    config: Any
    loss: Callable[..., Any] = next_token_loss
    optimizer: optax.GradientTransformation = field(default_factory=lambda: optax.adamw(1e-3))


GPT_MEDIUM = GPTConfig.preset("medium", pad_vocab_to=128, attention=BY_XLA)
QWEN3 = parse_config(  # the keys of its config.json
    {
        **{"model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048},
        **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128},
        **{"num_experts_per_tok": 8, "norm_topk_prob": True, "rope_theta": 1e6},
        **{"max_position_embeddings": 4096, "intermediate_size": 6144},
    }
)
DEEPLAB = DeepLabConfig.preset("deeplabv3-resnet101")
MODELS: Mapping[str, Model] = {
    "medium": Model(GPT, GPT_MEDIUM),
    "7B": Model(Llama, LlamaConfig.preset("llama2-7b", attention=BY_XLA)),
    "8B": Model(Llama, LlamaConfig.preset("llama3-8b", attention=BY_XLA)),
    "70B": Model(Llama, LlamaConfig.preset("llama3-70b", attention=BY_XLA)),
    "Mixtral": Model(MoELlama, MoEConfig.preset("mixtral-8x7b"), routed_loss),
    "DeepSeek": Model(MoELlama, MoEConfig.preset("deepseek-16b"), routed_loss),
    "Qwen3": Model(MoELlama, replace(QWEN3, attention=BY_XLA), routed_loss),
    "DeepLab": Model(DeepLab, DEEPLAB, segmentation_loss, optax.sgd(0.01, momentum=0.9)),
}


# -- the table ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One step that is compiled."""

    model: str
    strategy: hfjax.Strategy
    mesh: Mapping[str, int]
    rows: int  # of a microbatch, on each device or group of devices that shares rows
    length: int  # tokens in a row; of an image: its side
    execution: Mapping[str, Any] = field(default_factory=dict)  # beside bf16 and max_grad_norm=1
    config: Mapping[str, Any] = field(default_factory=dict)  # what the model has otherwise
    fewer: int = 0  # layers of a second program; the row is then of one layer, by the difference


def each(cases: Mapping[str, Case], settings: Mapping[str, Mapping[str, Any]]) -> dict[str, Case]:
    """Return every case in every setting: with these fields of the execution too."""
    return {
        f"{name}, {setting}": replace(case, execution={**case.execution, **how})
        for name, case in cases.items()
        for setting, how in settings.items()
    }


def schedules(microbatches: int, chunks: int, *names: str) -> dict[str, dict[str, Any]]:
    """Return settings of pipelines; chunks: of interleaved."""
    of = lambda name: Schedule(name, microbatches, chunks if name == "interleaved" else None)
    return {name: {"schedule": of(name)} for name in names}


PRESETS = {name: {"compiler_options": name} for name in ("default", "overlap", "overlap_two")}
DOTS, FULL, UNCLIPPED = {"remat": "dots"}, {"remat": "full"}, {"max_grad_norm": None}
REMAT = {"remat=none": {}, "remat=dots": DOTS, "remat=full": FULL}
LOOP = {"in a loop": {"unroll": 1}, "in no loop": {"unroll": True}}
RINGS = {"all_gather_matmul": "reference", "matmul_reduce_scatter": "reference", "*": "xla"}
FLASH = {"kernels": {"flash_block": "pallas", "*": "reference"}}
RING = {"context": "ring", "kernels": "reference"}
OWN = {"attention": LlamaConfig().attention}
LAYERS4, LAYERS6, LAYERS16, LAYERS80 = ({"layers": n} for n in (4, 6, 16, 80))
TENSOR4 = (TENSOR | SEQUENCE, {"data": 2, "tensor": 4})
FSDP_TENSOR = (FSDP | TENSOR | SEQUENCE, {"fsdp": 2, "tensor": 4})
PIPE_TENSOR = (PIPE | TENSOR | SEQUENCE, {"pipe": 4, "tensor": 2})
CASES: dict[str, Case] = {
    # Presets of parallel/compiler_options.py: what they hide.
    **each(
        {
            "ddp": Case("medium", DDP, {"data": 8}, 8, 1024),
            "fsdp": Case("medium", FSDP, {"fsdp": 8}, 8, 1024),
            "tensor": Case("medium", *TENSOR4, 8, 1024),
            "fsdp tensor": Case("medium", *FSDP_TENSOR, 8, 1024),
            "hsdp, two nodes": Case("medium", HSDP, {"data": 2, "fsdp": 8}, 8, 1024),
            "fsdp, two nodes": Case("medium", FSDP, {"fsdp": 16}, 8, 1024),
        },
        PRESETS,
    ),
    # Layers in a loop, some in each turn of it, and in none.
    **each(
        each({"medium": Case("medium", FSDP, {"fsdp": 8}, 8, 1024, {}, LEAN)}, REMAT),
        LOOP | {"2 in a turn": {"unroll": 2}, "4 in a turn": {"unroll": 4}},
    ),
    **each({"8B": Case("8B", FSDP, {"fsdp": 8}, 1, 4096, {}, LEAN)}, LOOP),
    **each({"8B, 80 layers": Case("8B", FSDP, {"fsdp": 8}, 1, 4096, {}, LEAN | LAYERS80)}, LOOP),
    **each(
        {"medium, fsdp tensor": Case("medium", *FSDP_TENSOR, 8, 1024, {}, LEAN)},
        {"in a loop": {"unroll": 1}, "in no loop": {"unroll": True} | PRESETS["overlap_two"]},
    ),
    # New parameters, gathered; activations do not cover it.
    "zero1": Case("medium", ZERO1, {"data": 8}, 1, 1024, FULL),
    "zero2": Case("medium", ZERO2, {"data": 8}, 1, 1024, FULL),
    # What tensor sends: layers on all rows, with rings in place of gathers, on two halves.
    **each(
        {
            "tensor, medium": Case("medium", *TENSOR4, 8, 1024),
            "tensor, layer of 7B": Case(
                "7B", TENSOR | SEQUENCE, {"tensor": 8}, 2, 4096, {}, LAYERS6, 2
            ),
            "tensor, layer of 70B": Case(
                "70B", TENSOR | SEQUENCE, {"tensor": 8}, 2, 4096, {}, LAYERS6, 2
            ),
        },
        {
            "whole": PRESETS["default"],
            "rings": PRESETS["default"] | {"kernels": RINGS},
            "halves": {"tensor_overlap_chunks": 2},
        },
    ),
    # Pipelines: what stages send, and sums of gradients over data.
    **each(
        {
            "medium, pipe": Case("medium", PIPE, {"pipe": 8}, 8, 1024, DOTS),
            "medium, pipe tensor": Case("medium", *PIPE_TENSOR, 8, 1024, DOTS),
        },
        schedules(32, 3, "1f1b", "interleaved", "zb"),
    ),
    **each(
        {
            "7B, pipe": Case("7B", PIPE, {"pipe": 8}, 1, 4096, FULL),
            "7B, pipe tensor": Case("7B", *PIPE_TENSOR, 1, 4096, FULL),
        },
        schedules(32, 2, "1f1b", "interleaved", "zb"),
    ),
    **each(
        {"medium, pipe data": Case("medium", PIPE, {"pipe": 4, "data": 2}, 8, 1024, DOTS)},
        schedules(8, 3, "gpipe", "1f1b", "interleaved", "zb"),
    ),
    **each(
        {
            "16 layers, pipe data": Case(
                "medium", PIPE, {"pipe": 4, "data": 2}, 4, 1024, DOTS, LAYERS16
            )
        },
        {"1f1b, all slots": {"schedule": Schedule("1f1b", 16, branches=False)}}
        | schedules(16, 1, "1f1b", "1f1b-published", "zb-h1", "zb-v"),
    ),
    # Known models.
    "Llama 3 8B": Case("8B", FSDP, {"fsdp": 8}, 1, 8192, FULL),
    "Qwen3 30B-A3B": Case("Qwen3", FSDP | EXPERT, {"expert": 8}, 1, 4096, FULL),
    "DeepLab, ddp": Case("DeepLab", DDP, {"data": 8}, 4, 513, UNCLIPPED),
    "DeepLab, fsdp": Case("DeepLab", FSDP, {"fsdp": 8}, 4, 513, UNCLIPPED),
    # Mixtures; no capacity: none of their tokens is dropped.
    **{
        f"{model}, {devices} GPUs, capacity {capacity}": Case(
            model, FSDP | EXPERT, mesh, 1, 4096, UNCLIPPED | FULL | FLASH, {"capacity": capacity}
        )
        for model in ("Mixtral", "DeepSeek")
        for devices, mesh in ((8, {"expert": 8}), (64, {"fsdp": 8, "expert": 8}))
        for capacity in (1.25, None)
    },
    # One row on all devices.
    **{
        f"long, {n} GPUs": Case(
            "8B", FSDP | CONTEXT, {"context": n}, 1, length, UNCLIPPED | FULL | RING, OWN
        )
        for n, length in ((8, 131072), (16, 262144), (64, 1048576))
    },
    **each(
        {
            "long, 4 layers": Case(
                "8B", FSDP | CONTEXT, {"context": 8}, 1, 65536, UNCLIPPED | FULL, OWN | LAYERS4
            )
        },
        {
            "ring": RING,
            "ring of kernels": RING | FLASH,
            "allgather of kernels": {"context": "allgather"} | FLASH,
        },
    ),
}


# -- what a program tells -----------------------------------------------------------------


Numbers = defaultdict[Any, float]  # 0 of what is not there


def lowered(case: Case, config: Mapping[str, Any]) -> jax.stages.Lowered:
    """Return the step of a case, of a model that has `config` otherwise."""
    model, devices = MODELS[case.model], target_devices("h200", math.prod(case.mesh.values()))
    shape = replace(model.config, **config)
    mesh = hfjax.make_mesh(devices=devices, **case.mesh)
    init = lambda rngs: model.module(shape, rngs=rngs)
    layout = hfjax.layout(init, model.optimizer, mesh, case.strategy)
    execution = {"precision": "bf16", "max_grad_norm": 1.0, **case.execution}
    schedule = execution.get("schedule")
    rows = case.rows * batch_devices(mesh) * (schedule.microbatches if schedule else 1)
    return hfjax.train_step(layout, model.loss, **execution).lower(batch_of(case, rows))


def batch_of(case: Case, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch."""
    if case.model == "DeepLab":
        shape = (rows, case.length, case.length)
        image = jax.ShapeDtypeStruct((*shape, 3), "uint8")
        return {"image": image, "label": jax.ShapeDtypeStruct(shape, "int32")}
    return {"tokens": jax.ShapeDtypeStruct((rows, case.length + 1), "int32")}


def numbers(case: Case, **config: Any) -> Numbers:
    """Return what is counted in a program; each kind of transfer has a count, bytes and hidden."""
    length = {} if case.model == "DeepLab" else {"length": case.length}
    begun = time.process_time()
    program = lowered(case, {**length, **case.config, **config}).compile()
    told = Numbers(float)
    told["compiled"] = time.process_time() - begun
    memory = program.memory_analysis()
    assert memory is not None  # XLA's GPU compiler always tells
    told["state"], told["temporaries"] = memory.argument_size_in_bytes, memory.temp_size_in_bytes
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    told["peak"] = told["state"] + told["temporaries"] + new
    told["accessed"] = Program(program).moved.total
    for flight in flights(program):
        kind = f"{flight.kind} {'+'.join(flight.axes)}"
        told[kind, "count"] += flight.count
        told[kind, "bytes"] += flight.total
        told[kind, "hidden"] += flight.hidden
        told["seconds"] += flight.seconds * flight.count
        told["exposed"] += flight.exposed
    of = H200  # by its data sheet
    model = ProductModel(of.scheduled_flops, of.bandwidth, of.sms, of.start_up, of.tile)
    matmuls = products(program.as_text() or "")
    told["products"] = math.fsum(matmul_seconds(p, model) * p.count for p in matmuls)
    return told


def measured(case: Case) -> Numbers:
    """Return the numbers of a step, or of one layer: of two steps the difference by layer."""
    told = numbers(case)
    if case.fewer:
        less, layers = numbers(case, layers=case.fewer), case.config["layers"] - case.fewer
        told = Numbers(float, {name: (told[name] - less[name]) / layers for name in told})
    return told


# -- results ------------------------------------------------------------------------------

RESULTS = Path(__file__).parent / "results" / "ahead_of_time.md"
COLUMNS = (
    *("jax", "case", "state", "temporaries", "peak", "accessed", "hidden", "covered", "exposed"),
    *("products", "compiled in", "collectives"),
)
HEAD = f"""# Steps compiled for H200s

`python -m benchmarks.ahead_of_time` (last rows: {{date}}); nothing ran. What each case is stands in
the table `CASES` of benchmarks/ahead_of_time.py. bfloat16, parameters and AdamW's moments in
float32, clipped; numbers are those of one device and one step, or of one layer where it says so.

- **state**: parameters, moments and batch; **temporaries**: what the step needs besides; **peak**:
  both, and results that take no argument's place.
- **accessed**: bytes that instructions read and write (benchmarks/moved_bytes.py).
- **hidden**: share of collective bytes with at least 1 GFLOP of matmuls between start and done;
  **covered**: share of the modelled time of transfers for which these matmuls last; **exposed**:
  the rest of it. {H200.scheduled_flops / 1e12:.0f} TFLOP/s; a device sends
  {H200.inside / 1e9:.0f} GB/s (NVLink), {H200.between / 1e9:.0f} GB/s where groups of a collective
  cross nodes (InfiniBand); one transfer at a time (hfjax/analysis/overlap.py): a model, no clock.
- **products**: all matmuls one after another, by the model of hfjax/analysis/matmul_time.py.
- **compiled in**: seconds of processors for lowering and compiling in this process.
- **collectives**: transfers (what XLA joins is one), kind, axes, bytes and what of them is hidden.
"""


def cells(told: Numbers) -> tuple[str, ...]:
    """Return what the table shows of these numbers."""
    kinds = {key[0] for key in told if isinstance(key, tuple)}
    kinds = sorted(kinds, key=lambda kind: (-told[kind, "bytes"], kind))
    sent, hidden = (sum(told[kind, what] for kind in kinds) for what in ("bytes", "hidden"))
    ms = lambda value: f"{1e3 * value:.2f}"
    return (
        *(f"{told[name] / 2**30:.2f} GiB" for name in ("state", "temporaries", "peak")),
        f"{told['accessed'] / 1e9:.0f} GB",
        f"{hidden / sent:.1%}",
        f"{1 - told['exposed'] / told['seconds']:.1%}",
        f"{ms(told['exposed'])} of {ms(told['seconds'])} ms",
        f"{ms(told['products'])} ms",
        f"{told['compiled']:.0f} s",
        ", ".join(_of_kind(told, kind) for kind in kinds),
    )


def _of_kind(told: Numbers, kind: str) -> str:
    """Return how often a kind is sent, its bytes, and the part of them that is hidden."""
    count, size, hidden = (told[kind, what] for what in ("count", "bytes", "hidden"))
    return f"{count:g} {kind} {size / 2**20:.1f} MiB {hidden / (size or 1):.0%}"


def write(row: tuple[str, ...]) -> None:
    """Put a row into the results, in place of that of its jax and case; notes below them stay."""
    old = RESULTS.read_text() if RESULTS.exists() else ""
    kept = (tuple(re.split(r" \| ", line[2:-2])) for line in old.splitlines() if line[:2] == "| ")
    table = {r[:2]: r for r in (*kept, row) if r[0] not in (COLUMNS[0], "---")}
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(table[key] for key in sorted(table))]
    text = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
    notes = old[old.index("\n## ") :] if "\n## " in old else ""
    RESULTS.write_text(f"{HEAD.format(date=datetime.date.today())}\n{text}\n{notes}")


def main() -> None:
    """Compile what was asked for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=["*"], help="names of cases, or patterns")
    names = parser.parse_args().names
    chosen = [case for case in CASES if any(fnmatch.fnmatch(case, name) for name in names)]
    if not chosen:
        parser.error(f"no case is called {' or '.join(names)}: one of {'; '.join(CASES)}")
    if not can_compile_for_gpus():
        raise SystemExit(f"compiling for H200s needs {how_to_install()}")
    for name in chosen:
        row = (jax.__version__, name, *cells(measured(CASES[name])))
        print(" | ".join(row), flush=True)
        write(row)


if __name__ == "__main__":
    main()
