"""Offloading what layers keep, beside computing it again: step time and peak memory on a GPU.

GPT-2 medium on long rows in bfloat16 on one device. Steps of all programs are taken in turn on one
state; the peak of each comes from a process of its own. Writes results/offload.md and .json.

    python -m benchmarks.offload [--rows N] [--steps N]    on a GPU
    python -m benchmarks.offload --smoke                   tiny, on a CPU, nothing is written
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

if "--smoke" in sys.argv:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import hfjax
from hfjax.models.attention import causal_attention
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.parallel.offload.host_memory import host_sharding

RESULTS = Path(__file__).parent / "results"
RATIOS = (0.0, 0.25, 0.5, 0.75, 1.0)
CASES: dict[str, dict[str, Any]] = {
    "remat none": {},
    "remat dots": {"remat": "dots"},
    "remat full": {"remat": "full"},
    **{f"offload {r:g}": {"offload": hfjax.Offload(ratio=r)} for r in RATIOS if r},
}
LENGTH, ROWS, STEPS, WARM = 4096, 4, 20, 3
COPIED = 2**30  # bytes of a plain copy
FASTER, SPEED = 1.05, 45e9  # goals: whole offload against remat full; bytes a second
TINY = {"length": 32, "layers": 2, "heads": 2, "embed": 32, "vocab": 256}


@dataclass(frozen=True)
class Setting:
    """The model and its rows, and where they run."""

    rows: int = ROWS
    length: int = LENGTH
    tiny: bool = False

    @cached_property
    def layout(self) -> hfjax.Layout:
        """Everything on one device."""
        shape = {"pad_vocab_to": 128, "attention": causal_attention, "length": self.length}
        config = GPTConfig.preset("medium", **(shape | (TINY if self.tiny else {})))
        mesh = hfjax.make_mesh(devices=jax.devices()[:1], data=1)
        init = lambda rngs: GPT(config, rngs=rngs)
        return hfjax.layout(init, optax.adamw(1e-4), mesh, hfjax.DDP)

    def step(self, case: str) -> Any:
        """Return the training step of a case."""
        fields = {"precision": "bf16", "unroll": 1, **CASES[case]}
        return hfjax.train_step(self.layout, next_token_loss, **fields)

    @property
    def batch(self) -> dict[str, np.ndarray]:
        """One batch, the same for all."""
        length, vocab = (TINY["length"], TINY["vocab"]) if self.tiny else (self.length, 50257)
        tokens = np.random.default_rng(0).integers(0, vocab, (self.rows, length + 1))
        return {"tokens": tokens.astype(np.int32)}


@dataclass(frozen=True)
class Row:
    """What was seen of a case."""

    case: str
    seconds: float  # the median step
    peak: int | None  # bytes in use on the device, at most; None: nothing tells
    compiled: int  # the same, as the compiler tells
    host: int  # bytes of what is kept on the host
    to_host: int  # sent in a step
    to_device: int

    @property
    def rates(self) -> tuple[float, float] | None:
        """Bytes a second to the host and back, over the whole step."""
        if not self.to_host:
            return None
        return self.to_host / self.seconds, self.to_device / self.seconds


def row_of(setting: Setting, case: str, seconds: float, peak: int | None) -> Row:
    """Return what was measured of a case, and what its compiled program takes."""
    traced = setting.step(case).trace(setting.batch)
    moved = hfjax.analysis.host_transfers(traced)
    memory: Any = traced.lower().compile().memory_analysis()
    compiled = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    compiled += memory.output_size_in_bytes - memory.alias_size_in_bytes
    host = memory.host_temp_size_in_bytes
    return Row(case, seconds, peak, compiled, host, moved.to_host, moved.to_device)


# -- on a device --------------------------------------------------------------------------


def in_turn(setting: Setting, steps: int) -> dict[str, list[float]]:
    """Return the seconds of single steps of all cases, taken in turn on one state."""
    state, batch = hfjax.init(setting.layout), hfjax.shard_batch(setting.layout, setting.batch)
    programs = {case: setting.step(case) for case in CASES}
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    for turn in range(WARM + steps):
        for case, step in programs.items():
            start = time.perf_counter()
            state, _ = step(state, batch)
            jax.block_until_ready(state)
            if turn >= WARM:
                seconds[case].append(time.perf_counter() - start)
        print(".", end="", flush=True)
    print()
    return seconds


def peak_of(setting: Setting, case: str) -> int | None:
    """Return the most bytes that were in use in this process, which runs this case alone."""
    state, step = hfjax.init(setting.layout), setting.step(case)
    for _ in range(WARM):
        state, _ = step(state, setting.batch)
    step.check(state)
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def peaks_apart(given: argparse.Namespace) -> dict[str, int | None]:
    """Return the peak of each case, each measured in a process of its own."""
    found: dict[str, int | None] = {}
    for case in CASES:
        words = ["--peak-of", case, "--rows", str(given.rows), "--length", str(given.length)]
        ran = [sys.executable, "-m", "benchmarks.offload", *words]
        done = subprocess.run(ran, capture_output=True, text=True)
        lines = done.stdout.splitlines()
        found[case] = json.loads(lines[-1]) if done.returncode == 0 and lines else None
        print(f"{case}: peak {size(found[case])}", flush=True)
        if done.returncode:
            print(done.stderr[-2000:], file=sys.stderr)
    return found


def copied(setting: Setting, count: int) -> tuple[float, float]:
    """Return the bytes a second of plain copies: to the host, and from it."""
    mesh = setting.layout.mesh
    there = host_sharding(mesh, jax.P())
    here = jax.NamedSharding(mesh, jax.P())
    x = jax.device_put(jnp.zeros(count // 4, jnp.float32), here)
    y = jax.device_put(x, there)
    away, back = lambda: jax.device_put(x, there), lambda: jax.device_put(y, here)
    return rate(away, count), rate(back, count)


def rate(copy: Callable[[], jax.Array], count: int) -> float:
    """Return the bytes a second of a copy: of the median of several."""
    seconds = []
    for _ in range(WARM + 5):
        start = time.perf_counter()
        copy().block_until_ready()
        seconds.append(time.perf_counter() - start)
    return count / statistics.median(seconds[WARM:])


# -- results ------------------------------------------------------------------------------


def size(count: float | None) -> str:
    return "" if count is None else f"{count / 2**30:.2f} GiB"


def speed(rates: tuple[float, float] | None) -> str:
    return "" if rates is None else " / ".join(f"{r / 1e9:.1f}" for r in rates)


def table(rows: Sequence[Row]) -> str:
    """Return the rows in markdown."""
    base = next(row for row in rows if row.case == "remat full")
    head = ["program", "peak as compiled", "on the host", "to host", "to device"]
    head += ["step", "of remat full", "peak in use", "GB/s to / from host"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        sizes = map(size, (row.compiled, row.host, row.to_host, row.to_device))
        parts = f"{row.seconds * 1e3:.1f} ms", f"{row.seconds / base.seconds:.1%}"
        lines.append([row.case, *sizes, *parts, size(row.peak), speed(row.rates)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def goals(rows: Sequence[Row], plain: tuple[float, float]) -> Iterable[str]:
    """Yield a line for each goal: reached or not."""
    of = {row.case: row for row in rows}
    whole, full = of["offload 1"], of["remat full"]
    faster = full.seconds / whole.seconds
    yield line(faster >= FASTER, f"offload 1 is {faster:.2f} x remat full (goal {FASTER} x)")
    both = sum(whole.rates or (0.0,))
    told = f"{both / 1e9:.1f} GB/s there and back over a step (goal {SPEED / 1e9:g})"
    yield line(both >= SPEED, told)
    slower = min(plain) / 1e9
    told = f"{plain[0] / 1e9:.1f} GB/s to the host, {plain[1] / 1e9:.1f} from it in plain copies"
    yield line(slower * 1e9 >= SPEED, told)


def line(reached: bool, told: str) -> str:
    return f"- {'reached' if reached else 'MISSED'}: {told}"


def heading(setting: Setting, device: str) -> str:
    words = " ".join(["python -m benchmarks.offload", *sys.argv[1:]])
    return (
        f"# Offload beside remat\n\n`{words}`, {date.today()}, jax {jax.__version__}, Python "
        f"{platform.python_version()}, {device}. GPT-2 medium, {setting.rows} rows x "
        f"{setting.length} tokens, bfloat16, parameters and AdamW's moments in float32.\n"
    )


def smoke() -> str:
    """Return what a run on a tiny model writes."""
    setting = Setting(2, TINY["length"], tiny=True)
    rows, plain = measured(setting, dict.fromkeys(CASES), steps=1), copied(setting, 2**20)
    return "\n".join([table(rows), "", *goals(rows, plain)])


def measured(setting: Setting, peaks: dict[str, int | None], steps: int) -> list[Row]:
    """Return a row for each case, timed."""
    seconds = in_turn(setting, steps)
    return [row_of(setting, case, statistics.median(seconds[case]), peaks[case]) for case in CASES]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--peak-of", choices=[*CASES], help="of one case: print its peak bytes")
    given = parser.parse_args()
    setting = Setting(given.rows, given.length)
    if given.smoke:
        print(smoke())
    elif given.peak_of:
        print(json.dumps(peak_of(setting, given.peak_of)))
    else:
        run(given, setting)


def run(given: argparse.Namespace, setting: Setting) -> None:
    """Measure on the GPU at hand and write the results."""
    peaks = peaks_apart(given)  # before this process takes the device's memory
    rows, plain = measured(setting, peaks, given.steps), copied(setting, COPIED)
    told = list(goals(rows, plain))
    device = jax.devices()[0].device_kind
    page = [heading(setting, device), table(rows), "", *told, ""]
    print("\n".join(page))
    (RESULTS / "offload.md").write_text("\n".join(page))
    found = {"rows": [asdict(row) for row in rows], "plain copies": plain, "device": device}
    versions = {"jax": jax.__version__, "command": sys.argv}
    (RESULTS / "offload.json").write_text(json.dumps(found | versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
