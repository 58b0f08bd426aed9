"""Wrote tests/formats, which tests/test_formats.py reads: each format that hfjax leaves on disk.

Not to be run again: files written by later code prove nothing. `python -m tests.make_formats` in a
checkout of the commit that added this file makes all of it anew:

    *.zip           checkpoints (plain, ema, master, fp16, pipe, packed, experts), run folders
                    (finished, piped: stopped, images, pretrained) and what they were made from
                    (text, photos, llama), an export, a schedule's table, a plan, a calibration,
                    configurations in YAML and Python
    expected.json   the losses of the same code when it went on
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import hfjax
from hfjax import DDP, EXPERT, FSDP, PIPE, Schedule
from hfjax.models import moe
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss
from hfjax.planner.measuring.calibrate import calibrate
from tests.small_folder import LLAMA, small_folder
from tests.small_images import photos

HERE = Path(__file__).with_name("formats")
GPT_OF: dict[str, Any] = {"vocab": 64, "length": 16, "layers": 4, "heads": 2, "embed": 8}
MIXTURE: dict[str, Any] = {
    **{"vocab": 64, "length": 16, "layers": 2, "heads": 2, "kv_heads": 2, "embed": 8},
    **{"mlp": 8, "experts": 4, "min_capacity": 1},
}
SMALL = "--model.length 16 --model.layers 2 --model.heads 2 --model.embed 8".split()
OFTEN = "--log.every 1 --log.valid-every 2 --log.sample 0 --checkpoints.keep 1".split()


class Unlike(nnx.Module):
    """A model in three parts whose layers are unlike."""

    def __init__(self, rngs: nnx.Rngs):
        self.tokens = nnx.Embed(64, 8, rngs=rngs)
        up, down = nnx.Linear(8, 12, rngs=rngs), nnx.Linear(12, 8, rngs=rngs)
        self.layers = nnx.List([up, nnx.relu, down, jax.numpy.tanh])
        self.last = nnx.Linear(8, 64, rngs=rngs)

    def embed(self, batch: Any) -> jax.Array:
        return self.tokens(batch["tokens"][:, :-1])

    def head(self, x: jax.Array) -> jax.Array:
        return self.last(x)


def gpt(rngs: nnx.Rngs) -> nnx.Module:
    """Return a small GPT with dropout."""
    return GPT(GPTConfig.tiny(**GPT_OF, dropout=0.1), rngs=rngs)


def of_experts(rngs: nnx.Rngs) -> nnx.Module:
    """Return a small mixture of experts."""
    return moe.MoELlama(moe.MoEConfig(**MIXTURE), rngs=rngs)


@dataclasses.dataclass(frozen=True)
class Saved:
    """What was trained for two steps and saved."""

    strategy: hfjax.Strategy
    sizes: dict[str, int]
    model: Callable = gpt
    optimizer: Callable = lambda: optax.adamw(1e-2)
    loss: Callable = next_token_loss
    fields: dict[str, Any] = dataclasses.field(default_factory=dict)


CHECKPOINTS = {
    "plain": Saved(FSDP, {"fsdp": 4}),
    "ema": Saved(DDP, {"data": 2}, optimizer=lambda: hfjax.ema(optax.adamw(1e-2), 0.9)),
    "master": Saved(DDP, {"data": 2}, optimizer=lambda: hfjax.master(optax.adamw(1e-2))),
    "fp16": Saved(FSDP, {"fsdp": 2}, fields={"precision": "fp16"}),
    "pipe": Saved(PIPE, {"pipe": 2}, fields={"schedule": Schedule("interleaved", 2, 2)}),
    "packed": Saved(PIPE, {"pipe": 2}, Unlike, fields={"schedule": Schedule("1f1b", 2)}),
    "experts": Saved(FSDP | EXPERT, {"expert": 2, "fsdp": 2}, of_experts, loss=moe.next_token_loss),
}


def layout_of(case: Saved, strategy: hfjax.Strategy, sizes: dict[str, int]) -> hfjax.Layout:
    """Return the layout of a case under a strategy; everything is split, however small."""
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    strategy = strategy.edit(replicate_below=0)
    return hfjax.layout(case.model, case.optimizer(), mesh, strategy)


def batch(number: int) -> dict[str, np.ndarray]:
    """Return the rows of a step: the same everywhere, drawn by no generator."""
    row, column = np.indices((8, GPT_OF["length"] + 1))
    mixed = (row + 3) * (column + 5) * (number + 7) + column**2
    return {"tokens": (mixed % GPT_OF["vocab"]).astype(np.int32)}


def two_steps(
    case: Saved, layout: hfjax.Layout, state: hfjax.State, first: int, **fields: Any
) -> tuple[list[float], hfjax.State]:
    """Return the losses of two steps with the batches from a number on, and the state then."""
    step = hfjax.train_step(layout, case.loss, clip=1.0, **fields)
    losses = []
    for number in (first, first + 1):
        state, metrics = step(state, batch(number))
        losses.append(float(metrics["loss"]))
    return losses, state


def write_checkpoint(place: Path, case: Saved) -> list[float]:
    """Save a state after two steps; return the losses of the next two."""
    layout = layout_of(case, case.strategy, case.sizes)
    state = hfjax.init(layout, 3, case.fields.get("schedule"))
    _, state = two_steps(case, layout, state, 0, **case.fields)
    with hfjax.Checkpoints(place, layout, config={"rate": 1e-2}) as checkpoints:
        checkpoints.save(state, data={"rows": 16}, metrics={"loss": 2.5})
    return two_steps(case, layout, state, 2, **case.fields)[0]


def command(*words: str, within: Path, code: int = 0) -> str:
    """Run `hfjax` within a folder; return what it said. Refuses another exit code."""
    path = f"{HERE.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "hfjax", *words],
        cwd=within,
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done.stdout


TEXT = ["--data.train", "text", *SMALL, *OFTEN, "--steps", "6", "--batch", "8"]
PIPED = [*TEXT, "--strategy", "fsdp+pipe", "--mesh.pipe", "2", "--mesh.fsdp", "2"]
PIPED += ["--pipeline.name", "1f1b", "--pipeline.microbatches", "2", "--optimizer.ema", "0.9"]
IMAGES = ["--model.preset", "resnet-tiny", "--data.train", "photos", *OFTEN, "--steps", "4"]
IMAGES += ["--batch", "8", "--data.size", "16"]
TUNED = ["--model.pretrained", "llama", "--data.train", "own", *OFTEN, "--steps", "4"]
TUNED += ["--model.length", "16", "--batch", "8", "--strategy", "fsdp", "--optimizer.master"]
RUNS = {  # the flags of `hfjax train`, and how many devices
    "finished": ([*TEXT, "--strategy", "zero1", "--accumulate", "2"], 2),
    "piped": (PIPED, 4),
    "images": (IMAGES, 2),
    "pretrained": (TUNED, 2),
}


def metrics_of(run: Path, name: str) -> dict[str, float]:
    """Return {step: value} as a run wrote it; each step must be there once."""
    lines = [json.loads(text) for text in (run / "metrics.jsonl").open(encoding="utf-8")]
    found = [(str(line["step"]), line[name]) for line in lines if name in line]
    assert len(dict(found)) == len(found)
    return dict(found)


def write_inputs(place: Path) -> None:
    """Write texts, data sets of them, images, and the folder of a model."""
    texts = place / "texts"
    texts.mkdir()
    words = ["tensor", "pipe", "data", "mesh", "step", "loss", "axis", "row"]
    for number in range(40):
        mixed = [words[(number * n + n * n + number) % 8] for n in range(8 + number % 5)]
        (texts / f"{number:02}.txt").write_text(" ".join(mixed) + "\n", encoding="utf-8")
    small_folder(place / "llama", LLAMA)
    command("data", "texts", "--out", "text", "--valid", "0.2", within=place)
    own = ("--tokenizer", "llama")
    command("data", "texts", "--out", "own", "--valid", "0.2", *own, within=place)
    for part, each in (("train", 4), ("valid", 2)):
        photos(place / "photos" / part, each, ("cat", "dog"))
    shutil.rmtree(texts)


def write_runs(place: Path) -> dict[str, Any]:
    """Make the runs; return what those that were left alone told, and the last loss of each."""
    told: dict[str, Any] = {}
    for name, (flags, devices) in RUNS.items():
        words = ["train", "--out", name, *flags, "--cpu-devices", str(devices)]
        command(*words, within=place)
        told[name] = {x: metrics_of(place / name, x) for x in ("loss", "valid_loss")}
        if name != "finished":
            told[name]["eval"] = command("eval", name, within=place)
            if name == "pretrained":
                command("export", name, "--out", "export", within=place)
            shutil.rmtree(place / name)
            command(*words, "--minutes", "0", within=place, code=75)
            command(*words, "--minutes", "0", within=place, code=75)
        else:
            told[name]["eval"] = command("eval", name, within=place)
    return told


SETTINGS = """# run.yaml
steps: 2000
batch: 64
accumulate: 4
strategy: fsdp+tensor+sequence
mesh: {tensor: 2, fsdp: 4}
precision: bf16
remat: dots
offload: 0.5
nonfinite: skip
model: {preset: gpt-tiny, length: 32, layers: 2, heads: 2, embed: 8, dropout: 0.1}
data: {train: [text]}
optimizer: {name: adamw, rate: 6e-4, warmup: 100, decay: cosine, end: 0.1, clip: 1.0, ema: 0.999}
checkpoints: {every: 100, keep: 3}
log: {every: 10, valid_every: 50, valid_batches: 2, sample: 0}
minutes: 30
"""
IN_PYTHON = """from hfjax.run import Train
from hfjax.run.config import Mesh, Model, Optimizer, PipelineOptions

config = Train(
    steps=10,
    strategy="zero1+pipe",
    mesh=Mesh(pipe=2, data=2),
    pipeline=PipelineOptions(name="interleaved", microbatches=4, chunks=2),
    model=Model(preset="gpt-tiny", length=32, layers=4, heads=2, embed=8),
    optimizer=Optimizer(rate=1e-3, warmup=2),
)
"""


def write_settings(place: Path) -> None:
    """Write configurations, a schedule's table, a plan and a calibration."""
    (place / "run.yaml").write_text(SETTINGS, encoding="utf-8")
    (place / "run.py").write_text(IN_PYTHON, encoding="utf-8")
    (place / "schedule.txt").write_text(str(Schedule("zb", 4).table(2)), encoding="utf-8")
    planned = ["plan", "--gpu", "h200", "--count", "8", "--model.preset", "gpt-tiny", "--batch"]
    planned += ["64", "--compile", "0", "--out", "plan.yaml", "--json", "plan.json"]
    command(*planned, within=place)
    calibrate(place / "here.toml", devices=jax.devices()[:2], quick=True)


def pack(folder: Path, names: list[str], to: Path) -> None:
    """Pack files and folders into an archive whose bytes depend on nothing else."""
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        paths = [p for name in names for p in [folder / name, *sorted((folder / name).rglob("*"))]]
        for path in paths:
            inside = str(path.relative_to(folder)) + "/" * path.is_dir()
            info = zipfile.ZipInfo(inside, (2026, 11, 28, 0, 0, 0))
            info.external_attr = (0o40755 if path.is_dir() else 0o100644) << 16
            archive.writestr(
                info, b"" if path.is_dir() else path.read_bytes(), zipfile.ZIP_DEFLATED, 9
            )


def main() -> None:
    """Write tests/formats anew."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    HERE.mkdir(exist_ok=True)
    expected: dict[str, Any] = {"jax": jax.__version__, "checkpoints": {}}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name, case in CHECKPOINTS.items():
            print(name, flush=True)
            expected["checkpoints"][name] = write_checkpoint(place / name, case)
            pack(place, [name], HERE / f"{name}.zip")
        write_inputs(place)
        print("runs", flush=True)
        expected["runs"] = write_runs(place)
        print("settings", flush=True)
        write_settings(place)
        for name in RUNS:
            (place / name / "loss.png").unlink(missing_ok=True)  # nothing reads it
            config = place / name / "config.yaml"  # names files from where it is used
            config.write_text(config.read_text(encoding="utf-8").replace(f"{place}/", ""))
            pack(place, [name], HERE / f"{name}.zip")
        pack(place, ["text", "own", "photos", "llama"], HERE / "inputs.zip")
        pack(place, ["export"], HERE / "export.zip")
        settings = ["run.yaml", "run.py", "schedule.txt", "plan.yaml", "plan.json", "here.toml"]
        pack(place, settings, HERE / "settings.zip")
    text = json.dumps(expected, indent=1, sort_keys=True) + "\n"
    (HERE / "expected.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
