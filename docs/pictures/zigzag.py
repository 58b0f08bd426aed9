"""Draw the picture of docs/long_sequences.md: which device computes which blocks of scores.

python docs/pictures/zigzag.py [FILE]    # zigzag.svg next to this file; .png to look at it
"""

import sys
from functools import partial
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from hfjax.parallel.extensions.context_parallel.sequence_layout import SequenceLayout

HERE = Path(__file__).parent
INK = "#1f2328"
COLOURS = ("#2f6fd0", "#e3a62f", "#2c974b", "#b3491f")  # of devices
CHUNKS = 8


def holders(order: str) -> dict[int, int]:
    """Return which device holds each chunk of a sequence: the devices share it in this order.

    >>> list(holders("zigzag").values())
    [0, 1, 2, 3, 3, 2, 1, 0]
    """
    deal = SequenceLayout(len(COLOURS), order)
    each = CHUNKS // deal.chunks.size
    held = {
        int(chunk) * each + part: device
        for device, chunks in enumerate(deal.chunks)
        for chunk in chunks
        for part in range(each)
    }
    return dict(sorted(held.items()))


def scores(at: Axes, order: str) -> None:
    """Draw the blocks of scores under a causal mask, each in its device's colour."""
    held = holders(order)
    at.set(xlim=(-2.3, CHUNKS + 0.2), ylim=(CHUNKS + 2.6, -2.0), aspect="equal")
    at.axis("off")
    write = partial(at.text, color=INK, fontsize=9, ha="center", va="center")
    write(CHUNKS / 2, -1.6, order, fontsize=12)
    write(CHUNKS / 2, -0.95, "keys of chunk")
    write(-1.6, CHUNKS / 2, "queries of chunk", rotation=90)
    for query, device in held.items():
        write(query + 0.5, -0.35, f"{query}")
        write(-0.5, query + 0.5, f"{query}")
        for key in range(query + 1):
            at.add_patch(Rectangle((key, query), 1, 1, fc=COLOURS[device], ec="white", lw=1.2))
    blocks = [sum(q + 1 for q, d in held.items() if d == device) for device in range(len(COLOURS))]
    for device, count in enumerate(blocks):
        x, y = 4.6 * (device % 2) - 0.6, CHUNKS + 0.7 + 0.95 * (device // 2)
        at.add_patch(Rectangle((x, y - 0.3), 0.6, 0.6, fc=COLOURS[device], ec="none"))
        write(x + 0.85, y, f"device {device}: {count} blocks", ha="left")


def main(path: Path) -> None:
    """Write the picture."""
    mpl.rcParams["svg.hashsalt"] = "zigzag"
    figure, sides = plt.subplots(1, 2, figsize=(7.6, 4.5), layout="constrained")
    for at, order in zip(sides, ("contiguous", "zigzag"), strict=True):
        scores(at, order)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else HERE / "zigzag.svg")
