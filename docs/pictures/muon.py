"""Draw the picture of docs/optimizers.md: losses of muon and AdamW, from benchmarks/results.

python docs/pictures/muon.py [FILE]    # muon.svg beside this file
"""

import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULT = HERE.parents[1] / "benchmarks" / "results" / "muon.md"
GREY = "#656d76"
COLOURS = {"muon": "#2f6fd0", "AdamW": "#c4432b"}


def main() -> None:
    """Draw the table: the best rate of each optimizer thick, the others thin."""
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "muon.svg"
    mpl.rcParams["svg.hashsalt"], mpl.rcParams["svg.fonttype"] = "muon", "none"
    table = [line.strip("| \n").split(" | ") for line in RESULT.open() if line.startswith("| ")]
    (_, _, *steps), *rows = table
    figure, plot = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for name, rate, *losses in rows:
        optimizer, is_best = name.strip("*"), name.startswith("*")
        label = f"{optimizer}, rate {rate.strip('*')}" if is_best else None
        values = [float(loss.strip("*")) for loss in losses]
        width, alpha = (1.8, 1.0) if is_best else (0.8, 0.5)
        colour = COLOURS[optimizer]
        plot.plot([*map(int, steps)], values, color=colour, label=label, lw=width, alpha=alpha)
    plot.set(xlabel="step", ylabel="held-out loss (nats a byte)")
    plot.legend(frameon=False)
    plot.spines[["top", "right"]].set_visible(False)
    plot.tick_params(colors=GREY)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


if __name__ == "__main__":
    main()
