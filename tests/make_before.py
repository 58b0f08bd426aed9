"""Wrote tests/before, which tests/test_before.py reads: what hfjax left on disk before its code
was rebuilt (commit 92464be). Not to be run again: files written by later code prove nothing.

`python -m tests.make_before` in a checkout of that commit makes all of it anew:

    checkpoint/     what hfjax.CheckpointManager wrote: a GPT after two steps, FSDP on four devices
    text/           a data set of bytes, of `hfjax data`
    run/            of `hfjax train`, stopped three times; its config.yaml names `text` (relative)
    expected.json   the losses of the same code when it went on
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

import hfjax
from hfjax.models.gpt import GPT, GPTConfig, next_token_loss

HERE = Path(__file__).with_name("before")
STEPS, STOPS = 8, 3
SHAPE: dict[str, Any] = {"vocab": 64, "length": 16, "layers": 2, "heads": 2, "embed": 4}
TRAIN = [
    *("train", "--out", "run", "--data.train", "text", "--steps", str(STEPS), "--batch", "8"),
    *("--strategy", "fsdp", "--cpu-devices", "4", "--accumulate", "2", "--model.dropout", "0.1"),
    *("--model.length", "16", "--model.layers", "2", "--model.heads", "2", "--model.embed", "4"),
    *("--optimizer.rate", "1e-2", "--optimizer.ema", "0.9", "--checkpoints.keep", "1"),
    *("--log.every", "1", "--log.valid-every", "4", "--log.sample", "0"),
]


def layout(strategy: hfjax.Strategy, **sizes: int) -> hfjax.Layout:
    """Return the layout of the small GPT; everything is split, however small."""
    config = GPTConfig.tiny(**SHAPE, dropout=0.1)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = hfjax.make_mesh(devices=devices, **sizes)
    strategy = strategy.edit(replicate_below=0)
    return hfjax.layout(lambda rngs: GPT(config, rngs=rngs), optax.adamw(1e-2), mesh, strategy)


def batch(number: int) -> dict[str, np.ndarray]:
    """Return the rows of a step: the same everywhere, drawn by no generator."""
    row, column = np.indices((8, SHAPE["length"] + 1))
    mixed = (row + 3) * (column + 5) * (number + 7) + column**2
    return {"tokens": (mixed % SHAPE["vocab"]).astype(np.int32)}


def going_on(
    made: hfjax.Layout, state: hfjax.State, first: int, loss: Any = next_token_loss, **fields: Any
) -> tuple[list[float], hfjax.State]:
    """Return the losses of two steps with the batches from a number on, and the state then."""
    step, losses = hfjax.train_step(made, loss, max_grad_norm=1.0, **fields), []
    for number in (first, first + 1):
        state, metrics = step(state, batch(number))
        losses.append(float(metrics["loss"]))
    return losses, state


def judged(made: hfjax.Layout, state: hfjax.State) -> float:
    """Return the loss of a batch to evaluate on."""
    return float(hfjax.eval_step(made, next_token_loss)(state, batch(100))["loss"])


def write_checkpoint(place: Path) -> dict[str, Any]:
    """Save the small GPT after two steps; return what the same code computes then."""
    made = layout(hfjax.FSDP, fsdp=4)
    _, state = going_on(made, hfjax.init(made, 3), 0)
    with hfjax.CheckpointManager(place, made, config={"rate": 1e-2, "shape": SHAPE}) as checkpoints:
        checkpoints.save(state, data={"rows": 16}, metrics={"loss": 2.5})
    loss = judged(made, state)
    return {"loss": loss, "next": going_on(made, state, 2)[0]}


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


def metrics_of(run: Path, name: str) -> dict[str, float]:
    """Return {step: value} as a run wrote it; each step must be there once."""
    lines = [json.loads(text) for text in (run / "metrics.jsonl").open(encoding="utf-8")]
    found = [(str(line["step"]), line[name]) for line in lines if name in line]
    assert len(dict(found)) == len(found)
    return dict(found)


def write_texts(texts: Path) -> None:
    """Write forty short texts into a new folder."""
    texts.mkdir()
    words = ["tensor", "pipe", "data", "mesh", "step", "loss", "axis", "row"]
    for number in range(40):
        mixed = [words[(number * n + n * n + number) % 8] for n in range(8 + number % 5)]
        (texts / f"{number:02}.txt").write_text(" ".join(mixed) + "\n", encoding="utf-8")


def write_run(place: Path) -> dict[str, Any]:
    """Make a data set, and a run of it that is stopped; return what one left alone told."""
    write_texts(place / "texts")
    command("data", "texts", "--out", "text", "--valid", "0.2", within=place)
    shutil.rmtree(place / "texts")
    command(*TRAIN, within=place)  # left alone
    told: dict[str, Any] = {
        name: metrics_of(place / "run", name) for name in ("loss", "valid_loss")
    }
    told["eval"] = command("eval", "run", "--cpu-devices", "2", within=place)
    shutil.rmtree(place / "run")
    for _ in range(STOPS):
        command(*TRAIN, "--minutes", "0", within=place, code=75)
    told["eval when stopped"] = command("eval", "run", "--cpu-devices", "2", within=place)
    (place / "run" / "loss.png").unlink()  # nothing reads it
    make_relative(place / "run" / "config.yaml", place)
    return told


def make_relative(config: Path, place: Path) -> None:
    """Let a configuration name files from where it is used: the fixture lies anywhere."""
    text = config.read_text(encoding="utf-8")
    config.write_text(text.replace(f"{place}/", ""), encoding="utf-8")


def main() -> None:
    shutil.rmtree(HERE, ignore_errors=True)
    with tempfile.TemporaryDirectory() as name:
        place = Path(name).resolve()
        expected = {
            "checkpoint": write_checkpoint(place / "checkpoint"),
            "run": write_run(place),
        }
        text = json.dumps(expected, indent=1) + "\n"
        (place / "expected.json").write_text(text, encoding="utf-8")
        shutil.copytree(place, HERE)


if __name__ == "__main__":
    import conftest  # noqa: F401  (the devices and the compiler of the tests)

    main()
