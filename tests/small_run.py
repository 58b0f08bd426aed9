"""Runs small enough to train in seconds: a text of a few kilobytes, a model of one layer."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hfjax.data import prepare
from hfjax.trainer.config import CheckpointOptions, Data, Log, Mesh, Model, Optimizer, Train

MODEL = Model(preset="gpt-tiny", length=16, layers=1, heads=2, embed=32)
# The next token from this one alone: for what no model can change.
BIGRAMS = Model(own=f"{Path(__file__).parents[1]}/examples/my_model.py:make", length=16)
# Two layers that look behind, in three parts: for what strategies do to a model.
STACK = Model(own=f"{Path(__file__).parent}/small_model.py:make", length=16)
QUIET = Log(every=4, valid_every=6, valid_batches=3, sample=0)


def corpus(directory: Path) -> Path:
    """Return a data set of bytes with a part to validate on."""
    rng = np.random.default_rng(0)
    words = ["tensor", "pipe", "data", "mesh", "step", "loss", "axis", "row"]
    (directory / "texts").mkdir()
    for number in range(40):
        text = " ".join(rng.choice(words, rng.integers(5, 60)))
        (directory / "texts" / f"{number}.txt").write_text(text)
    prepare(str(directory / "texts"), out=directory / "data", valid=0.2)
    return directory / "data"


def small(directory: Path, text: Path, **changes: Any) -> Train:
    """Return the configuration of a small run in a directory."""
    fields: dict[str, Any] = {
        "out": directory,
        "steps": 12,
        "batch": 16,
        "model": MODEL,
        "data": Data(train=(str(text),)),
        "optimizer": Optimizer(rate=1e-2),
        "checkpoints": CheckpointOptions(every=5),
        "log": QUIET,
    }
    return Train(**(fields | _devices(changes.get("mesh")) | changes))


def _devices(mesh: Mesh | None) -> dict[str, Any]:
    """Return how many of the eight fake devices a mesh takes, if sizes say so."""
    sizes = [] if mesh is None else [size for size in asdict(mesh).values() if size is not None]
    count = math.prod(sizes)
    return {"devices": count} if sizes and 0 < count < 8 else {}


def told(directory: Path, name: str = "loss") -> dict[int, float]:
    """Return {step: loss} as the run wrote it; each step must be there once."""
    lines = [json.loads(text) for text in (Path(directory) / "metrics.jsonl").open()]
    found = [(line["step"], line[name]) for line in lines if name in line]
    assert len(dict(found)) == len(found)
    return dict(found)
