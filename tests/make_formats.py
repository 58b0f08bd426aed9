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
import shutil
import tempfile
import zipfile
import zlib
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
from hfjax.planner.calibration.calibrate import calibrate
from tests.golden import here
from tests.make_before import command, going_on, make_relative, metrics_of, write_texts
from tests.small_images import photos
from tests.small_model_folder import LLAMA, small_folder

HERE = Path(__file__).with_name("formats")
GPT_OF: dict[str, Any] = {"vocab": 64, "length": 16, "layers": 4, "heads": 2, "embed": 8}
MIXTURE: dict[str, Any] = {
    **{"vocab": 64, "length": 16, "layers": 2, "heads": 2, "kv_heads": 2, "embed": 8},
    **{"mlp": 8, "experts": 4, "min_capacity": 1},
}
SMALL = "--model.length 16 --model.layers 2 --model.heads 2 --model.embed 8".split()
STOPS = 2  # how often a run is stopped
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
    "ema": Saved(DDP, {"data": 2}, optimizer=lambda: hfjax.optimizers.ema(optax.adamw(1e-2), 0.9)),
    "master": Saved(
        DDP, {"data": 2}, optimizer=lambda: hfjax.optimizers.master_weights(optax.adamw(1e-2))
    ),
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


def checksum(layout: hfjax.Layout, state: hfjax.State) -> int:
    """Return the CRC32 of all arrays of a state, layers in the order of the model."""
    found = 0
    for x in jax.tree.leaves(hfjax.to_model_order(layout, state)):
        x = jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        found = zlib.crc32(np.asarray(x).tobytes(), found)
    return found


def write_checkpoint(place: Path, case: Saved) -> dict[str, Any]:
    """Save a state after two steps; return its checksum and the losses of the next two."""
    layout = layout_of(case, case.strategy, case.sizes)
    state = hfjax.init(layout, 3, case.fields.get("schedule"))
    _, state = going_on(layout, state, 0, case.loss, **case.fields)
    with hfjax.CheckpointManager(place, layout, config={"rate": 1e-2}) as checkpoints:
        checkpoints.save(state, data={"rows": 16}, metrics={"loss": 2.5})
    found = checksum(layout, state)
    losses = going_on(layout, state, 2, case.loss, **case.fields)[0]
    return {"crc32": found, "losses": losses}


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


def write_inputs(place: Path) -> None:
    """Write texts, data sets of them, images, and the folder of a model."""
    write_texts(place / "texts")
    small_folder(place / "llama", LLAMA)
    command("data", "texts", "--out", "text", "--valid", "0.2", within=place)
    own = ("--tokenizer", "llama")
    command("data", "texts", "--out", "own", "--valid", "0.2", *own, within=place)
    for part, each in (("train", 4), ("valid", 2)):
        photos(place / "photos" / part, each, ("cat", "dog"))
    shutil.rmtree(place / "texts")


def write_runs(place: Path) -> dict[str, Any]:
    """Make the runs, all but the first stopped; return what those that were left alone told."""
    told: dict[str, Any] = {}
    for name, (flags, devices) in RUNS.items():
        words = ["train", "--out", name, *flags, "--cpu-devices", str(devices)]
        command(*words, within=place)
        told[name] = {x: metrics_of(place / name, x) for x in ("loss", "valid_loss")}
        told[name]["eval"] = command("eval", name, within=place)
        if name == "pretrained":
            command("export", name, "--out", "export", within=place)
        if name != "finished":
            shutil.rmtree(place / name)
            for _ in range(STOPS):
                command(*words, "--minutes", "0", within=place, code=75)
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
IN_PYTHON = """from hfjax.trainer import Train
from hfjax.trainer.config import Mesh, Model, Optimizer, PipelineOptions

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
    HERE.mkdir(exist_ok=True)
    expected: dict[str, Any] = {"here": here(), "checkpoints": {}}
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder).resolve()
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
            make_relative(place / name / "config.yaml", place)
            pack(place, [name], HERE / f"{name}.zip")
        pack(place, ["text", "own", "photos", "llama"], HERE / "inputs.zip")
        pack(place, ["export"], HERE / "export.zip")
        settings = ["run.yaml", "run.py", "schedule.txt", "plan.yaml", "plan.json", "here.toml"]
        pack(place, settings, HERE / "settings.zip")
    text = json.dumps(expected, indent=1, sort_keys=True) + "\n"
    (HERE / "expected.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    import conftest  # noqa: F401  (the devices and the compiler of the tests)

    main()
