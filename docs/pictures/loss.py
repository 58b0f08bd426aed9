"""Draw the losses of two runs, one under each of two strategies, for docs/training.md.

python docs/pictures/loss.py runs/ddp runs/fsdp-tensor    # loss.svg next to this file

The runs:
hfjax train --cpu-devices 8 --steps 1000 --eval.interval 50 --run-dir runs/ddp
hfjax train --cpu-devices 8 --steps 1000 --eval.interval 50 --run-dir runs/fsdp-tensor \
    --mesh.data 2 --mesh.fsdp 2 --mesh.tensor 2 --no-sequence-parallel
"""

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np

from hfjax.trainer.logs.loss_plot import moving_average

HERE = Path(__file__).parent
INK, GREY, RAW, WINDOW = "#1f2328", "#59636e", "#d5dae0", 20
NAMES = ("DDP, 8 devices along data", "FSDP|TENSOR, 2 x 2 x 2 devices")
LINES: tuple[dict[str, Any], ...] = (
    {"color": "#8db4e8", "lw": 5.0},
    {"color": "#b3491f", "lw": 1.2},
)
MARKERS: tuple[dict[str, Any], ...] = (
    {"marker": "o", "ms": 7, "mfc": "none", "mec": "#2f6fd0"},
    {"marker": "x", "ms": 5, "mec": "#b3491f"},
)


def curve(folder: Path, name: str) -> np.ndarray:
    """Return steps and values of a run's metrics, a row each."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return np.array([(row["step"], row[name]) for row in map(json.loads, lines) if name in row]).T


def main() -> None:
    """Draw."""
    folders = [Path(word) for word in sys.argv[1:]]
    mpl.rcParams["svg.hashsalt"], mpl.rcParams["svg.fonttype"] = "loss", "none"
    figure, (at, apart) = plt.subplots(
        2, 1, figsize=(8.3, 4.6), height_ratios=(3, 1), sharex=True, layout="constrained"
    )
    (steps, one), (_, other) = losses = [curve(folder, "loss") for folder in folders]
    at.plot(steps, one, color=RAW, lw=0.8, label="each step")
    for (steps, values), name, look in zip(losses, NAMES, LINES, strict=True):
        at.plot(
            steps, moving_average(values, WINDOW), label=f"{name}: mean of {WINDOW} steps", **look
        )
    for folder, name, look in zip(folders, NAMES, MARKERS, strict=True):
        at.plot(*curve(folder, "valid_loss"), ls="none", label=f"{name}: validation", **look)
    apart.plot(steps, np.abs(one - other), color=INK, lw=0.8)
    at.set(ylabel="loss", xlim=(0, steps[-1] + 10))
    apart.set(xlabel="step", ylabel="difference", yscale="log", ylim=(1e-7, 1))
    apart.set_yticks([1e-6, 1e-3, 1])
    at.legend(frameon=False, fontsize=9)
    for each in (at, apart):
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(colors=GREY)
        each.grid(alpha=0.3)
    figure.savefig(HERE / "loss.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
