"""Runs small enough to train in seconds: a text of a few kilobytes, a model of one layer."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from hfjax.data import prepare
from hfjax.trainer.config import (
    CheckpointConfig,
    DataConfig,
    EvalConfig,
    LogConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from hfjax.trainer.logs.trackers import Trackers

MODEL = ModelConfig(preset="gpt-tiny", seq_len=16, num_layers=1, num_heads=2, hidden_size=32)
# The next token from this one alone: for what no model can change.
BIGRAMS = ModelConfig(factory=f"{Path(__file__).parents[1]}/examples/my_model.py:make", seq_len=16)
# Two layers that look behind, in three parts: for what strategies do to a model.
STACK = ModelConfig(factory=f"{Path(__file__).parent}/small_model.py:make", seq_len=16)
QUIET = LogConfig(interval=4, sample_tokens=0)
EVAL = EvalConfig(interval=6, max_batches=3)
NO_EVAL = EvalConfig(interval=0)


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


def small(directory: Path, text: Path, **changes: Any) -> TrainConfig:
    """Return the configuration of a small run in a directory."""
    fields: dict[str, Any] = {
        "run_dir": directory,
        "steps": 12,
        "global_batch_size": 16,
        "model": MODEL,
        "data": DataConfig(train=(str(text),)),
        "optimizer": OptimizerConfig(learning_rate=1e-2),
        "checkpoint": CheckpointConfig(interval=5),
        "eval": EVAL,
        "log": QUIET,
    }
    return TrainConfig(**(fields | _devices(changes.get("mesh")) | changes))


def _devices(mesh: MeshConfig | None) -> dict[str, Any]:
    """Return how many of the eight fake devices a mesh takes, if sizes say so."""
    if mesh is None or mesh == MeshConfig():
        return {}
    count = math.prod(size for size in asdict(mesh).values() if size is not None)
    return {"devices": count} if 0 < count < 8 else {}


def told(directory: Path, name: str = "loss") -> dict[int, float]:
    """Return {step: loss} as the run wrote it; each step must be there once."""
    lines = [json.loads(text) for text in (Path(directory) / "metrics.jsonl").open()]
    found = [(line["step"], line[name]) for line in lines if name in line]
    assert len(dict(found)) == len(found)
    return dict(found)


def open_trackers(directory: Path, step: int = 0, /, config: Any = None, **log: Any) -> Trackers:
    """Return the trackers of a run, started in a directory."""
    trackers = Trackers(LogConfig(**log))
    trackers.start(directory, config or {}, step)
    return trackers
