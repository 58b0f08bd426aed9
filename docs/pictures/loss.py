"""Draw the loss of two runs, one under each of two strategies, for docs/training.md.

python docs/pictures/loss.py runs/ddp runs/fsdp-tensor    # loss.svg next to this file

The runs:
hfjax train --cpu-devices 8 --steps 1000 --log.valid-every 50 --strategy ddp --out runs/ddp
hfjax train --cpu-devices 8 --steps 1000 --log.valid-every 50 --strategy fsdp+tensor \
    --mesh.data 2 --mesh.tensor 2 --out runs/fsdp-tensor
"""

import json
import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
INK, GREY = "#1f2328", "#59636e"
LOOKS = (
    {"name": "DDP, data=8", "color": "#8db4e8", "lw": 3.0},
    {"name": "FSDP|TENSOR, data=2 fsdp=2 tensor=2", "color": "#b3491f", "lw": 0.9},
)


def curve(folder: Path, name: str) -> tuple[list[int], list[float]]:
    """Return steps and values of a run's metrics."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [(row["step"], row[name]) for row in map(json.loads, lines) if name in row]
    steps, values = zip(*found, strict=True)
    return list(steps), list(values)


def main() -> None:
    """Draw."""
    folders = [Path(word) for word in sys.argv[1:]]
    mpl.rcParams["svg.hashsalt"], mpl.rcParams["svg.fonttype"] = "loss", "none"
    figure, (at, apart) = plt.subplots(
        2, 1, figsize=(8.3, 4.6), height_ratios=(3, 1), sharex=True, layout="constrained"
    )
    for look, folder in zip(LOOKS, folders, strict=True):
        name, more = look["name"], {k: v for k, v in look.items() if k != "name"}
        at.plot(*curve(folder, "loss"), label=f"loss of a step: {name}", **more)
    for marker, look, folder in zip("ox", LOOKS, folders, strict=True):
        size = 6 if marker == "o" else 4
        steps, values = curve(folder, "valid_loss")
        look = {"color": INK, "fillstyle": "none", "ls": "none", "ms": size}
        name = LOOKS[marker == "x"]["name"].split(",")[0]
        at.plot(steps, values, marker, label=f"validation: {name}", **look)
    (steps, one), (_, other) = (curve(folder, "loss") for folder in folders)
    apart.plot(steps, [abs(a - b) for a, b in zip(one, other, strict=True)], color=INK, lw=0.8)
    at.set(ylabel="loss")
    apart.set(xlabel="step", ylabel="difference", yscale="log")
    at.legend(frameon=False, fontsize=9)
    for each in (at, apart):
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(colors=GREY)
        each.grid(alpha=0.3)
    figure.savefig(HERE / "loss.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
