"""The planner's peaks beside those of compiled programs: is a formula ever too low?

Twenty configurations of four models, chosen before the formula was written, and others chosen
after it (`HELD_OUT`, `SHAPED`, `TWELVE`). Each is compiled for H200s (none is needed, only the
CUDA wheels) in a process of its own, and what its program takes is kept in
results/planner_memory.json; the formula's peaks are then compared with them, in seconds.

    python -m benchmarks.planner_memory --compile          # the programs: about half an hour
    python -m benchmarks.planner_memory                    # the table, results/planner_memory.md
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # the devices to compile for are not here

RESULTS = Path(__file__).parent / "results" / "planner_memory.json"
VOCAB = {
    **dict.fromkeys(("gpt-medium", "gpt-large", "gpt-xl"), 50257),
    **dict.fromkeys(("llama3-8b", "llama3-70b"), 128256),
    **dict.fromkeys(("llama2-7b", "mixtral-8x7b"), 32000),
}
LONG = {"model.seq_len": 4096}
# name -> model, GPUs, and the flags of `hfjax memory`; all in bfloat16
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "ddp": ("gpt-medium", 8, {"global_batch_size": 64}),
    "zero2, dots": ("gpt-medium", 8, {"zero": 2, "global_batch_size": 64, "remat": "dots"}),
    "fsdp": ("gpt-medium", 8, {"mesh.fsdp": -1, "global_batch_size": 128}),
    "fsdp, full": ("gpt-medium", 8, {"mesh.fsdp": -1, "global_batch_size": 256, "remat": "full"}),
    "1f1b, pipe 4": (
        "gpt-medium",
        8,
        {"mesh.pipe": 4, "global_batch_size": 128, "pipeline.microbatches": 8},
    ),
    "interleaved, pipe 8": (
        "gpt-medium",
        8,
        {
            "mesh.pipe": 8,
            "global_batch_size": 128,
            "pipeline.schedule": "interleaved",
            "pipeline.chunks": 3,
            "pipeline.microbatches": 16,
        },
    ),
    "tensor 4": (
        "gpt-medium",
        8,
        {"mesh.tensor": 4, "global_batch_size": 64},
    ),
    "ddp, accumulate": (
        "gpt-medium",
        8,
        {"global_batch_size": 128, "gradient_accumulation_steps": 4},
    ),
    "8b fsdp, full": (
        "llama3-8b",
        8,
        {**LONG, "mesh.fsdp": -1, "global_batch_size": 8, "remat": "full"},
    ),
    "8b fsdp, dots": (
        "llama3-8b",
        8,
        {**LONG, "mesh.fsdp": -1, "global_batch_size": 8, "remat": "dots"},
    ),
    "8b fsdp, tensor 2": (
        "llama3-8b",
        8,
        {**LONG, "mesh.fsdp": -1, "mesh.tensor": 2, "global_batch_size": 8},
    ),
    "8b hsdp, full": (
        "llama3-8b",
        8,
        {**LONG, "mesh.data": 2, "mesh.fsdp": 4, "global_batch_size": 16, "remat": "full"},
    ),
    "8b gpipe, full": (
        "llama3-8b",
        8,
        {
            **LONG,
            "mesh.fsdp": -1,
            "mesh.pipe": 4,
            "global_batch_size": 8,
            "remat": "full",
            "pipeline.schedule": "gpipe",
            "pipeline.microbatches": 4,
        },
    ),
    "8b zb-v, tensor 2": (
        "llama3-8b",
        8,
        {
            **LONG,
            "sequence_parallel": False,
            "mesh.pipe": 4,
            "mesh.tensor": 2,
            "global_batch_size": 8,
            "pipeline.schedule": "zb-v",
            "pipeline.microbatches": 8,
        },
    ),
    "8b context 2, full": (
        "llama3-8b",
        8,
        {
            "model.seq_len": 8192,
            "mesh.fsdp": -1,
            "mesh.context": 2,
            "global_batch_size": 4,
            "remat": "full",
        },
    ),
    "70b fsdp, full": (
        "llama3-70b",
        64,
        {**LONG, "mesh.fsdp": -1, "global_batch_size": 64, "remat": "full"},
    ),
    "70b fsdp, tensor 8, full": (
        "llama3-70b",
        64,
        {
            **LONG,
            "mesh.fsdp": -1,
            "mesh.tensor": 8,
            "global_batch_size": 16,
            "remat": "full",
        },
    ),
    "70b pipe 8, tensor 8, full": (
        "llama3-70b",
        64,
        {
            **LONG,
            "sequence_parallel": False,
            "mesh.pipe": 8,
            "mesh.tensor": 8,
            "global_batch_size": 16,
            "remat": "full",
            "pipeline.microbatches": 16,
        },
    ),
    "experts 8, full": (
        "mixtral-8x7b",
        8,
        {**LONG, "zero": 3, "mesh.expert": 8, "global_batch_size": 8, "remat": "full"},
    ),
    "experts 2, pipe 4, dots": (
        "mixtral-8x7b",
        16,
        {
            **LONG,
            "mesh.expert": 2,
            "mesh.fsdp": 2,
            "mesh.pipe": 4,
            "global_batch_size": 32,
            "remat": "dots",
            "pipeline.microbatches": 8,
        },
    ),
}


# Chosen after the formula was written, and not used to change it.
HELD_OUT: dict[str, tuple[str, int, dict[str, Any]]] = {
    "gpt-xl zero1, full": (
        "gpt-xl",
        8,
        {"zero": 1, "global_batch_size": 64, "gradient_accumulation_steps": 2, "remat": "full"},
    ),
    "gpt-large fsdp": ("gpt-large", 16, {"mesh.fsdp": -1, "global_batch_size": 64}),
    "7b zero2": ("llama2-7b", 8, {"zero": 2, "global_batch_size": 8}),
    "8b zero1, tensor 8, dots": (
        "llama3-8b",
        16,
        {
            **LONG,
            "zero": 1,
            "mesh.tensor": 8,
            "global_batch_size": 8,
            "remat": "dots",
        },
    ),
    "8b interleaved, pipe 8, dots": (
        "llama3-8b",
        16,
        {
            **LONG,
            "zero": 1,
            "mesh.pipe": 8,
            "global_batch_size": 32,
            "remat": "dots",
            "pipeline.schedule": "interleaved",
            "pipeline.chunks": 2,
            "pipeline.microbatches": 16,
        },
    ),
    "8b grid 2 x 4": (
        "llama3-8b",
        8,
        {**LONG, "mesh.row": 2, "mesh.tensor": 4, "global_batch_size": 4, "remat": "full"},
    ),
    "8b zb-h1, tensor 4": (
        "llama3-8b",
        16,
        {
            **LONG,
            "mesh.pipe": 4,
            "mesh.tensor": 4,
            "global_batch_size": 8,
            "pipeline.schedule": "zb-h1",
            "pipeline.microbatches": 8,
        },
    ),
    "experts 4, fsdp 4, dots": (
        "mixtral-8x7b",
        16,
        {
            **LONG,
            "mesh.expert": 4,
            "mesh.fsdp": 4,
            "global_batch_size": 16,
            "remat": "dots",
        },
    ),
}
# Deep, wide, and of large vocabularies: the first six shaped what the formula says of them. The
# twelve after them were chosen before that; one of the six compared first shaped it once more.
NARROW = {
    "model.hidden_size": 1024,
    "model.num_heads": 16,
    "model.intermediate_size": 2816,
    "model.seq_len": 2048,
}
WIDE = {
    "model.hidden_size": 12288,
    "model.num_heads": 96,
    "model.intermediate_size": 32768,
    "model.seq_len": 2048,
}


def _far(preset: str = "llama2-7b", vocab: int = 32000, count: int = 8, **flags: Any) -> Any:
    """Return a case; `layers`, `batch`, `fsdp` and the like are short names of flags."""
    of = {"layers": "model.num_layers", "batch": "global_batch_size"}
    of |= {axis: f"mesh.{axis}" for axis in ("fsdp", "tensor", "context")}
    more = flags.pop("widths", NARROW) if preset == "llama2-7b" else flags.pop("widths", {})
    return preset, count, {"vocab": vocab, **more, **{of.get(k, k): v for k, v in flags.items()}}


SHAPED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "64 layers": _far(layers=64, fsdp=-1, batch=8, remat="full"),
    "48 layers, ddp": _far(layers=48, batch=16, remat="full"),
    "vocabulary of 1M": _far("gpt-small", 2**20, layers=4, fsdp=-1, batch=8),
    "vocabulary of 1M, full": _far(vocab=2**20, layers=4, batch=8, remat="full"),
    "width 12288": _far(widths=WIDE, layers=4, fsdp=-1, batch=8),
    "width 12288, full": _far(widths=WIDE, layers=4, fsdp=-1, batch=8, remat="full"),
}
TWELVE: dict[str, tuple[str, int, dict[str, Any]]] = {
    "96 layers": _far(layers=96, fsdp=-1, batch=16, remat="full"),
    "56 layers, dots": _far(layers=56, fsdp=-1, batch=8, remat="dots"),
    "44 layers": _far(layers=44, fsdp=-1, batch=8),
    "80 layers, zero1": _far(layers=80, zero=1, batch=8, remat="full"),
    "128 layers, gpt": _far(
        "gpt-medium", 50257, layers=128, fsdp=-1, batch=64, remat="full"
    ),
    "64 layers, tensor": _far(
        layers=64, fsdp=-1, tensor=2, batch=8, remat="full"
    ),
    "64 layers, context": _far(
        layers=64, fsdp=-1, context=2, batch=8, remat="full"
    ),
    "vocabulary of 512K": _far("gpt-small", 2**19, layers=6, batch=16),
    "vocabulary of 1.5M": _far(vocab=3 * 2**19, layers=6, fsdp=-1, batch=8, remat="full"),
    "vocabulary of 800K": _far(vocab=800_000, layers=8, zero=2, batch=16),
    "width 16384": _far(
        widths=WIDE | {
            "model.hidden_size": 16384, "model.num_heads": 128, "model.intermediate_size": 53248,
        },
        layers=3, fsdp=-1, batch=8, remat="full",
    ),
    "width 8192": _far(
        widths=WIDE | {
            "model.hidden_size": 8192, "model.num_heads": 64, "model.intermediate_size": 28672,
        },
        layers=6, fsdp=-1, batch=16, remat="dots",
    ),
}  # fmt: skip
ALL = CASES | HELD_OUT | SHAPED | TWELVE


def memory_of(name: str) -> Any:
    """Return the settings of a case, as `hfjax memory` has them."""
    from hfjax.cli.memory.settings import Memory
    from hfjax.trainer import config_io

    preset, count, flags = ALL[name]
    plain = config_io.to_plain(Memory(gpu="h200", count=count, precision="bf16"))
    given = {"model.preset": preset, "vocab": VOCAB.get(preset), **flags}
    for flag, value in given.items():
        *outer, last = flag.split(".")
        place = plain
        for part in outer:
            place = place[part]
        place[last] = value
    return config_io.parse_dataclass(Memory, plain, name)


def compiled(name: str) -> dict[str, Any]:
    """Return what the program of a case takes, compiled in this process."""
    import jax

    given = memory_of(name)
    jax.config.update("jax_num_cpu_devices", given.count)
    from hfjax.analysis.targets import target_devices
    from hfjax.planner.programs.estimate import estimate
    from hfjax.planner.programs.placeholder_attention import fused_attention
    from hfjax.planner.programs.planned_run import PlannedRun

    devices = target_devices("h200", given.count)
    parts = PlannedRun(given, devices, given.vocab, attention=fused_attention)
    began = time.perf_counter()
    found = asdict(estimate(name, parts))
    return found | {"seconds": round(time.perf_counter() - began, 1), "jax": jax.__version__}


def compile_all(names: list[str], limit: float) -> None:
    """Compile what is not yet known, each in a process of its own."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in names:
        if name in known:
            continue
        command = [sys.executable, "-m", "benchmarks.planner_memory", "--one", name]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            row = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None
            why = done.stderr[-800:]
        except subprocess.TimeoutExpired:
            row, why = None, f"more than {limit:g} s"
        if row is None:
            print(f"{name}: not compiled: {why}", flush=True)
            continue
        known[name] = row
        RESULTS.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        print(f"{name}: peak {row['peak'] / 2**30:.2f} GiB, {row['seconds']} s", flush=True)


def scored(name: str, scorers: dict[Any, Any]) -> Any:
    """Return what the formula says of a case; `scorers` keeps what cases share."""
    from hfjax.hardware.machine import MACHINES
    from hfjax.planner.candidate import Candidate
    from hfjax.planner.score import Scorer

    _, count, _ = ALL[name]
    config = memory_of(name)
    key = config.model, config.vocab
    if key not in scorers:
        scorers[key] = Scorer(config, config.vocab, MACHINES["h200"], "h200")
    return scorers[key].score(Candidate.of(config, count))


def table() -> str:
    """Return the peaks of programs, and what the formula says."""
    programs = json.loads(RESULTS.read_text(encoding="utf-8"))
    lines, scorers = [], {}
    for name in (name for name in ALL if name in programs):
        real = programs[name]["peak"]
        ours = scored(name, scorers).peak.total
        preset, count, flags = ALL[name]
        words = " ".join(f"{k.split('.')[-1]}={v}" for k, v in flags.items())
        mark = " *" * (name in HELD_OUT) + " +" * (name in SHAPED) + " **" * (name in TWELVE)
        cells = [f"{name}{mark}", f"{count} x {preset}", words]
        cells += [f"{real / GIB:.2f}", f"{ours / GIB:.2f}", f"{ours / real - 1:+.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*HEAD, *lines, "", *NOTES]) + "\n"


GIB = 2**30
HEAD = (
    "# Peaks by formula, and of compiled programs",
    "",
    "`python -m benchmarks.planner_memory --compile`, then `python -m benchmarks.planner_memory`.",
    "GiB of one H200, bfloat16; programs compiled ahead of time, jax 0.10.2.",
    "",
    "| case | GPUs, model | settings | program | formula | off |",
    "| --- | --- | --- | --- | --- | --- |",
)
NOTES = (
    "The first twenty were chosen before the formula was written. Those with * came after it. At",
    "first sight three of these eight were outside of -2 to +15 %: gpt-large fsdp +15.4, 8b grid",
    "-5.9, 8b zb-h1 -8.2 %; what was missing is in the formula since (gathered weights that wait,",
    "what stages of a tensor axis keep whole, copies on a grid). Those with + (jax 0.12) shaped",
    "what it says of deep and wide models and of large vocabularies; those with ** (jax 0.12)",
    "were chosen before that. Six of these twelve were compared first: 128 layers of gpt were",
    "-5.8 %, so the formula now counts a loop's gradients from its beginning. The other six (44,",
    "80 and 64 layers, vocabulary of 800K, width 8192) were compiled later, and changed nothing.",
)


def main() -> None:
    """Compile, or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--one", choices=list(ALL))
    parser.add_argument("--limit", type=float, default=900.0)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(compiled(given.one)))
        return
    if given.compile:
        compile_all(list(ALL), given.limit)
    text = table()
    RESULTS.with_suffix(".md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
