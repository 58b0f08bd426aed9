"""Weights from files into a layout: time beside its two parts, bytes and memory by process.

A model of random bfloat16 weights is written once; then it is read by `np.fromfile`, as rows by
`FileRows`, moved by the programs alone, and brought in as `hfjax.init` does. Then real processes
read it together. Writes results/pretrained.md.

    python -m benchmarks.pretrained [--gigabytes N] [--folder DIR]
    python -m benchmarks.pretrained --smoke    tiny, nothing is written
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

import jax
import ml_dtypes
import numpy as np
import optax

import hfjax
from hfjax.weights.load import WeightStream
from hfjax.weights.tensor_files import header_of

RESULTS = Path(__file__).parent / "results"
EMBED, HEADS, KEYS, MLP, VOCAB = 2048, 32, 8, 8192, 32000
TINY = (64, 4, 2, 96, 256)
ROUNDS, LIMIT = 3, 900
STRATEGIES = {
    "DDP": (hfjax.DDP, "data"),
    "FSDP": (hfjax.FSDP, "fsdp"),
    "TENSOR": (hfjax.TENSOR, "tensor"),
    "PIPE": (hfjax.PIPE, "pipe"),
}


def make(folder: Path, gigabytes: float, tiny: bool) -> None:
    """Write a Llama of about so many gigabytes."""
    embed, heads, keys, mlp, vocab = TINY if tiny else (EMBED, HEADS, KEYS, MLP, VOCAB)
    of_layer = embed * (embed + 2 * embed * keys // heads) + embed * embed + 3 * embed * mlp
    left = gigabytes * 1e9 / 2 - 2 * vocab * embed
    layers = 4 if tiny else max(4, 4 * round(left / of_layer / 4))
    config = {
        **{"model_type": "llama", "vocab_size": vocab, "hidden_size": embed, "dtype": "bfloat16"},
        **{"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": keys},
        **{"intermediate_size": mlp, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    }
    width = embed // heads
    kinds: dict[str, Any] = {"model.embed_tokens.weight": (vocab, embed)}
    for i in range(layers):
        at = f"model.layers.{i}."
        kinds[f"{at}input_layernorm.weight"] = (embed,)
        kinds[f"{at}post_attention_layernorm.weight"] = (embed,)
        for name, rows in (("q", heads * width), ("k", keys * width), ("v", keys * width)):
            kinds[f"{at}self_attn.{name}_proj.weight"] = (rows, embed)
        kinds[f"{at}self_attn.o_proj.weight"] = (embed, heads * width)
        kinds[f"{at}mlp.gate_proj.weight"] = kinds[f"{at}mlp.up_proj.weight"] = (mlp, embed)
        kinds[f"{at}mlp.down_proj.weight"] = (embed, mlp)
    kinds |= {"model.norm.weight": (embed,), "lm_head.weight": (vocab, embed)}
    dtype = np.dtype(ml_dtypes.bfloat16)
    header, _ = header_of({name: (dtype, shape) for name, shape in kinds.items()})
    folder.mkdir(parents=True, exist_ok=True)
    noise = np.random.default_rng(0).normal(0, 0.02, 1 << 22).astype(dtype)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        for shape in kinds.values():
            file.write(np.resize(noise, shape).tobytes())
    (folder / "config.json").write_text(json.dumps(config))


def layout_of(model: Any, strategy: str = "FSDP") -> hfjax.Layout:
    """Return a layout of the model on all devices."""
    table, axis = STRATEGIES[strategy]
    sizes: Any = {axis: jax.device_count()}
    return hfjax.layout(model.create, optax.sgd(0.1), hfjax.make_mesh(**sizes), table)


def seconds(run: Any) -> float:
    """Return how long a call takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def plain(model: Any) -> None:
    """Read all tensors as they are, one after the other."""
    for t in model.folder.tensors.values():
        np.fromfile(t.file, np.uint8, t.bytes, offset=t.begin)


def read(stream: WeightStream) -> None:
    """Read all rows, and let go of them."""
    for group in stream.groups:
        stream.read_local_rows(group)
    stream.files.close()


def moved(stream: WeightStream, kept: dict) -> None:
    """Move rows that are here; of each shape the same ones."""
    found: dict[str, Any] = {}
    for group in stream.groups:
        here = kept.setdefault((group.rules, group.stack_shape), None) or stream.read_local_rows(
            group
        )
        kept[group.rules, group.stack_shape] = here
        stack, flags = stream.assemble(group, here, found.get(group.path))
        found[group.path] = stack
        jax.block_until_ready(flags)
    jax.block_until_ready(found)


def alone(folder: Path) -> list[str]:
    """Return the lines of one process."""
    model = hfjax.pretrained(folder)
    layout = layout_of(model)
    make_stream = lambda: WeightStream(layout.model_layout, model.mappings)
    kept: dict = {}
    whole = lambda: jax.block_until_ready(make_stream().parameters())
    runs = {
        "np.fromfile": lambda: plain(model),
        "rows read": lambda: read(make_stream()),
        "moved": lambda: moved(make_stream(), kept),
        "all": whole,
    }
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            times[name].append(seconds(run))
    best = {name: statistics.median(found) for name, found in times.items()}
    parts = best["rows read"] + best["moved"]
    return [
        f"| np.fromfile of each tensor | {best['np.fromfile']:.2f} s | |",
        f"| reading rows | {best['rows read']:.2f} s | "
        f"{best['rows read'] / best['np.fromfile']:.2f} of np.fromfile |",
        f"| the moving programs | {best['moved']:.2f} s | |",
        f"| the whole way in | {best['all']:.2f} s | {best['all'] / parts:.2f} of both parts |",
    ]


class Peak:
    """The most memory of this process that is its own, looked at while something runs."""

    def __init__(self) -> None:
        self.most, self.ended = 0, False
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Peak":
        self.before = resident()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self.thread.join()

    def _look(self) -> None:
        while not self.ended:
            self.most = max(self.most, resident())
            time.sleep(0.002)


def resident() -> int:
    """Return the bytes in memory that no file backs."""
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("RssAnon:")[2].split()[0])


def worker(folder: Path, strategy: str) -> None:
    """Bring the model in beside others; say bytes and peak."""
    hfjax.init_distributed()
    model = hfjax.pretrained(folder)
    layout = layout_of(model, strategy)
    small = WeightStream(layout.model_layout, model.mappings)
    weights = model.weights
    with Peak() as peak:
        found = weights.into(layout.model_layout)
        jax.block_until_ready(found)
    own = sum(s.data.nbytes for x in found.values() for s in x.addressable_shards)
    del small
    told = {"read": weights.read, "own": own, "over": peak.most - peak.before - own}
    told |= {"max_rss": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    print(json.dumps(told), flush=True)


def together(folder: Path, strategy: str, processes: int, devices: int) -> str:
    """Return the line of several processes."""
    count = sum(t.nbytes for t in hfjax.pretrained(folder).folder.tensors.values())
    command = [sys.executable, "-m", "hfjax", "launch", "--processes", str(processes), "--"]
    command += [sys.executable, "-m", "benchmarks.pretrained", "--worker", strategy]
    command += ["--folder", str(folder)]
    done = subprocess.run(
        command,
        env=os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    lines = [line[line.index("{") :] for line in done.stdout.splitlines() if '"read"' in line]
    if len(lines) != processes:
        raise RuntimeError(done.stdout[-2000:] + done.stderr[-2000:])
    told = [json.loads(line) for line in lines]
    read = ", ".join(f"{t['read'] / 1e6:,.0f}" for t in told)
    total = sum(t["read"] for t in told) / count
    over = max(t["over"] for t in told) / 1e6
    own = max(t["own"] for t in told) / 1e6
    head = f"| {strategy} | {processes} of {devices} devices | {read} | {total:.4f}"
    return f"{head} | {own:,.0f} | {over:,.0f} |"


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--worker", choices=[*STRATEGIES], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(given.folder, given.worker)
        return
    with tempfile.TemporaryDirectory() as own:
        folder = given.folder or Path(own) / "model"
        if not (folder / "config.json").exists():
            make(folder, given.gigabytes, given.smoke)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        cases = [("FSDP", 1, 4), ("FSDP", 2, 2), ("FSDP", 4, 2), ("DDP", 4, 1), ("PIPE", 4, 1)]
        cases = cases[1:2] if given.smoke else cases
        page = "\n".join(
            [
                "# Weights from files into a layout",
                "",
                f"`python -m benchmarks.pretrained --gigabytes {given.gigabytes:g}`, "
                f"{date.today()}, jax {jax.__version__}, {os.cpu_count()} cores, page cache warm.",
                f"A Llama of {size / 1e9:.2f} GB in bfloat16, stored in float32.",
                "",
                "| FSDP over 4 fake devices, one process | time | |",
                "|---|---|---|",
                *alone(folder),
                "",
                "| strategy | processes | MB read by each | of the files | own shards, MB "
                "| memory above them, MB |",
                "|---|---|---|---|---|---|",
                *(together(folder, *case) for case in cases),
            ]
        )
    print(page)
    if not given.smoke:
        (RESULTS / "pretrained.md").write_text(page + "\n")


if __name__ == "__main__":
    main()
