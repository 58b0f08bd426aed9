"""Step times by formula beside real ones: one H100 that was measured here, and others' rows.

    python -m benchmarks.planner_truth          # a minute; writes results/planner_truth.md

Nothing is compiled, and no constant is fitted on a row that it is judged by: those of the H100 are
its ceilings (a copy, one product, cuDNN's own times), all else is in hfjax/hardware. The rows of
others are laid out as they were published; where hfjax has no such setting, what stands for it is
said. Theirs overlap tensor's transfers with matmuls, which hfjax does by tensor_overlap_chunks
only.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from hfjax.analysis.targets import can_compile_for_gpus
from hfjax.hardware.machine import MACHINES, Machine
from hfjax.parallel.mesh import AXES
from hfjax.planner.candidate import Candidate
from hfjax.planner.score import ScoredCandidate, Scorer
from hfjax.trainer.config import ModelConfig, TrainConfig

RESULTS = Path(__file__).parent / "results" / "planner_truth.md"
H100, H200 = MACHINES["h100"], MACHINES["h200"]


def _at_500_watts(machine: Machine) -> Machine:
    """Return torchtitan's H100: 96 GB at 2.4 TB/s; rates of products by its 500 of 700 watts."""
    names = ("flops", "attention_forward_128", "attention_backward_128")
    slower = {name: getattr(machine, name) * 500 / 700 for name in names}
    return replace(machine, stream=machine.stream * 2.4 / 3.35, **slower)


TITAN = _at_500_watts(H100)
L8, L70 = (
    ModelConfig(preset="llama3-8b", seq_len=8192),
    ModelConfig(preset="llama3-70b", seq_len=8192),
)
L405 = ModelConfig(preset="llama3-405b", seq_len=8192)
GPT3 = ModelConfig(
    preset="gpt-medium", seq_len=2048, num_layers=96, num_heads=96, hidden_size=12288
)
SMALL, MEDIUM = ModelConfig(preset="gpt-small"), ModelConfig(preset="gpt-medium")
MIXTRAL = ModelConfig(preset="mixtral-8x7b", seq_len=4096, capacity_factor=1.0)
LLAMA3, GPT = 128256, 50257
OURS, NEMO = "measured here", "NeMo 24.12, dgxc-benchmarking v25.02"
KEEPS = "names:qkv,attended"


@dataclass(frozen=True)
class Real:
    """A step that somebody measured."""

    name: str
    source: str
    model: ModelConfig
    vocab: int
    machine: Machine
    candidate: Candidate
    seconds: float
    counts: bool = False  # among the rows by which the formula is judged
    note: str = ""


def row(zero: str, rows: int, how: dict[str, Any] | None = None, **sides: int) -> Candidate:
    """Return a candidate: what is split, rows of a step, how they run, sides of the mesh."""
    pairs = tuple((axis, sides[axis]) for axis in AXES if sides.get(axis, 1) > 1)
    return Candidate(pairs, zero, rows, **(how or {}))


def _tokens(rows: int, length: int, devices: int, rate: float) -> float:
    return rows * length / devices / rate


def _staged(name: str, microbatches: int, chunks: int | None = None, **more: Any) -> dict[str, Any]:
    return {"schedule": name, "microbatches": microbatches, "chunks": chunks, **more}


SEQUENCE = {"sequence": True}
FULL, DOTS = {"remat": "full"}, {"remat": "dots"}
RATES = ((8, 6667), (128, 6514))  # torchtitan's GPUs, and tokens a second of each
REAL = (
    Real("GPT-2 124M, 16 x 1024", OURS, SMALL, GPT, H100, row("ddp", 16), 0.0355, True),
    Real("GPT-2 medium, 16 x 1024", OURS, MEDIUM, GPT, H100, row("ddp", 16), 0.0903, True),
    Real("GPT-2 124M, 32 x 1024", OURS, SMALL, GPT, H100, row("ddp", 32), 0.0683),
    Real("GPT-2 124M, 32, full", OURS, SMALL, GPT, H100, row("ddp", 32, FULL), 0.0818),
    Real("GPT-2 124M, 32, dots", OURS, SMALL, GPT, H100, row("ddp", 32, DOTS), 0.0770),
    Real(
        "Llama 3.1 70B, 256 H200, FSDP 128 x data 2",
        "MaxText, gpu-recipes",
        L70,
        LLAMA3,
        H200,
        row("fsdp", 512, {"remat": KEEPS}, data=2, fsdp=128),
        15.516,
        True,
        "keeps the out projection too",
    ),
    Real(
        "Llama 3 70B, 128 H100, FSDP 128",
        "MaxText 25.01, dgxc-benchmarking",
        L70,
        LLAMA3,
        H100,
        row("fsdp", 256, {"remat": "names:qkv"}, fsdp=128),
        15.563,
    ),
    *(
        Real(
            f"Llama 3.1 8B, {n} H100, FSDP",
            "torchtitan, compiled",
            L8,
            LLAMA3,
            TITAN,
            row("fsdp", 2 * n, {"remat": KEEPS}, fsdp=n),
            _tokens(2 * n, 8192, n, rate),
            True,
            "again: k, out and w3; here out, w1 and w3",
        )
        for n, rate in RATES
    ),
    Real(
        "Llama 3.1 70B, 256 H100, FSDP 32 x TP 8",
        "torchtitan, compiled",
        L70,
        LLAMA3,
        TITAN,
        row("fsdp", 512, FULL | SEQUENCE, fsdp=32, tensor=8),
        _tokens(512, 8192, 256, 597),
        True,
    ),
    *(
        Real(
            f"Llama 3.1 8B, {2 * n} H100, CP 2, DP {n}",
            NEMO,
            L8,
            LLAMA3,
            H100,
            row("zero1", 32 * n, {"gradient_accumulation_steps": 32}, data=n, context=2),
            seconds,
            True,
        )
        for n, seconds in ((4, 12.78), (64, 13.16))
    ),
    Real(
        "Llama 3.1 70B, 64 H100, TP 4, PP 4 x 5, CP 2, DP 2",
        NEMO,
        L70,
        LLAMA3,
        H100,
        row(
            "zero1",
            128,
            _staged("interleaved", 64, 5, sequence=True),
            data=2,
            context=2,
            tensor=4,
            pipe=4,
        ),
        14.61,
        True,
    ),
    Real(
        "Llama 3.1 405B, 576 H100, TP 8, PP 9 x 7, CP 2, DP 4",
        NEMO,
        L405,
        LLAMA3,
        H100,
        row(
            "zero1",
            252,
            _staged("interleaved", 63, 7, sequence=True),
            data=4,
            context=2,
            tensor=8,
            pipe=9,
        ),
        17.5,
        True,
    ),
    Real(
        "Llama 3.1 405B cut to 7 layers, 32 H100, TP 8, CP 2, DP 2",
        NEMO,
        replace(L405, num_layers=7),
        LLAMA3,
        H100,
        row(
            "zero1",
            126,
            {"gradient_accumulation_steps": 63, **SEQUENCE},
            data=2,
            context=2,
            tensor=8,
        ),
        9.0,
        True,
    ),
    Real(
        "GPT-3 175B, 128 H100, TP 4, PP 8 x 6, DP 4",
        NEMO,
        GPT3,
        GPT,
        H100,
        row("zero1", 256, _staged("interleaved", 64, 6, sequence=True), data=4, tensor=4, pipe=8),
        8.309,
        True,
        "its README says 12 chunks, its settings 6",
    ),
    Real(
        "Llama 3 70B, 64 H100, FSDP 32, CP 2",
        "NeMo AutoModel",
        L70,
        LLAMA3,
        H100,
        row("fsdp", 128, {"gradient_accumulation_steps": 4, **FULL}, fsdp=32, context=2),
        18.9,
        True,
    ),
    Real(
        "Mixtral 8x7B, 256 H200, EP 8",
        "NeMo, gpu-recipes",
        MIXTRAL,
        32000,
        H200,
        row("zero1", 1024, {"gradient_accumulation_steps": 2}, data=32, expert=8),
        2.740,
        False,
        "microbatches of 2 rows",
    ),
)

# Rows in float8 with asynchronous TP: the order of their tokens a second alone is compared.
ORDERS: dict[str, tuple[str, tuple[tuple[str, ModelConfig, Candidate, float], ...]]] = {
    "Llama 3.1 405B, 512 H100, TP 8, PP 8, FSDP 8": (
        "torchtitan; sides as far as known",
        tuple(
            (name, L405, row("fsdp", 256, how | FULL | SEQUENCE, pipe=8, fsdp=8, tensor=8), rate)
            for name, how, rate in (
                ("1F1B", _staged("1f1b", 32), 100.0),
                ("interleaved", _staged("interleaved", 32, 2), 128.0),
            )
        ),
    ),
    "Llama 3.1 8B, 8 H100, context 1 to 8": (
        "torchtitan, lengths of 32k to 262k",
        tuple(
            (
                f"{length // 1024}k",
                replace(L8, seq_len=length),
                row("fsdp", 8 // context, FULL, fsdp=8 // context, context=context),
                rate,
            )
            for length, context, rate in (
                (32768, 1, 3890.0),
                (65536, 2, 2540.0),
                (131072, 4, 1071.0),
                (262144, 8, 548.0),
            )
        ),
    ),
}


def scored(
    model: ModelConfig, vocab: int, machine: Machine, candidate: Candidate
) -> ScoredCandidate:
    """Return what the formula says of a configuration."""
    config = TrainConfig(global_batch_size=candidate.batch_size, precision="bf16", model=model)
    gpu = "h200" if can_compile_for_gpus() else None
    return Scorer(config, vocab, machine, gpu).score(candidate)


def table() -> str:
    """Return all rows with what was predicted, and the verdict on those that count."""
    lines, errors, seconds = [], [], {}
    for real in REAL:
        found = scored(real.model, real.vocab, real.machine, real.candidate)
        error = found.time.total / real.seconds - 1
        seconds[real.name] = found.time.total
        errors += [abs(error)] * (real.counts and real.source != OURS)
        parts = _parts(found)
        name = f"{real.name}{' ^' if real.counts else ''}"
        cells = (name, real.source, f"{real.seconds:.4g}", f"{found.time.total:.4g}")
        lines.append("| " + " | ".join((*cells, f"{error:+.1%}", parts, real.note)) + " |")
    orders = [_order(name, *of) for name, of in ORDERS.items()]
    (few, rate), (many, other) = RATES
    lost = (
        1 - seconds[f"Llama 3.1 8B, {few} H100, FSDP"] / seconds[f"Llama 3.1 8B, {many} H100, FSDP"]
    )
    errors.sort()
    verdict = (
        f"Of the {len(errors)} rows of others that count (^): median error "
        f"{errors[len(errors) // 2]:.1%}, largest {errors[-1]:.1%}.",
        f"{many} GPUs against {few}: {lost:.1%} fewer tokens a second of each predicted, "
        f"{1 - other / rate:.1%} published.",
    )
    return "\n".join([*HEAD, *lines, "", *verdict, "", *ORDER_HEAD, *orders]) + "\n"


def _parts(found: ScoredCandidate) -> str:
    total = found.time.total
    shown = {"products": found.time.products, "memory": found.time.memory}
    shown |= {"exposed": found.time.all_exposed, "bubble": found.time.bubble}
    return ", ".join(f"{name} {s / total:.0%}" for name, s in shown.items() if s > total / 200)


def _order(
    name: str, source: str, rows: tuple[tuple[str, ModelConfig, Candidate, float], ...]
) -> str:
    rates, told = [], []
    for what, model, candidate, real in rows:
        found = scored(model, LLAMA3, TITAN, candidate)
        rate = candidate.batch_size * (model.seq_len or 0) / candidate.devices / found.time.total
        rates.append((real, rate))
        told.append(f"{what} {real:.0f} ({rate:.0f}; {found.peak.total / 2**30:.0f} GiB)")
    by_real, ours = sorted(rates), sorted(rates, key=lambda pair: pair[1])
    same = "same order" if by_real == ours else "ANOTHER ORDER"
    return f"| {name} | {source} | {', '.join(told)} | {same} |"


HEAD = (
    "# Steps by formula, and real ones",
    "",
    "`python -m benchmarks.planner_truth`. Nothing compiled. Seconds of a step; bfloat16. The row",
    "of a GPU that is not an H100 or H200 of 700 W is scaled: torchtitan's by bandwidth and watts.",
    "",
    "| step | source | real | formula | off | parts | note |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)
ORDER_HEAD = (
    "In float8 with asynchronous TP: tokens a second, in brackets by formula in bfloat16.",
    "",
    "| rows | source | real (formula) | order |",
    "| --- | --- | --- | --- |",
)


if __name__ == "__main__":
    found = table()
    RESULTS.write_text(found, encoding="utf-8")
    print(found)
