"""Draw the picture of docs/precision.md: the loss of a byte-level GPT, by precision.

python docs/pictures/precision.py [STEPS] [FILE]    # 150 steps; precision.svg beside this file
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
INK, GREY = "#1f2328", "#656d76"
RUNS = {
    "fp32": ("fp32", "#1f2328"),
    "bf16": ("bf16", "#2f6fd0"),
    "fp16": ("fp16", "#c4432b"),
    "bf16,*norm*=fp32,tokens=fp32": ("by path", "#2c974b"),
}


def losses(precision: str, steps: int, folder: Path) -> list[float]:
    """Train the default model of `hfjax train`; return its losses."""
    out = folder / str(list(RUNS).index(precision))
    words = ["--precision", precision, "--steps", str(steps), "--run-dir", str(out)]
    quiet = ["--cpu-devices", "2", "--eval.max-batches", "1"]
    command = [sys.executable, "-m", "hfjax", "train", *words, *quiet]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row["loss"] for row in map(json.loads, lines) if "grad_norm" in row]


def main() -> None:
    """Train and draw."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 150
    file = Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "precision.svg"
    mpl.rcParams["svg.hashsalt"], mpl.rcParams["svg.fonttype"] = "precision", "none"
    with tempfile.TemporaryDirectory() as folder:
        found = {precision: losses(precision, steps, Path(folder)) for precision in RUNS}
    figure, (whole, apart) = plt.subplots(1, 2, figsize=(8.4, 3.2), layout="constrained")
    for precision, (name, colour) in RUNS.items():
        whole.plot(found[precision], color=colour, lw=1.2, label=name)
        if precision != "fp32":
            pairs = zip(found[precision], found["fp32"], strict=True)
            apart.plot([100 * (a / b - 1) for a, b in pairs], color=colour, lw=1.0)
    whole.set(xlabel="step", ylabel="loss")
    apart.set(xlabel="step", ylabel="% apart from fp32")
    whole.legend(frameon=False)
    for at in (whole, apart):
        at.spines[["top", "right"]].set_visible(False)
        at.tick_params(colors=GREY)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
