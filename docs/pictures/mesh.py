"""Draw the picture of README.md: a mesh of 8 devices, and what each stores of one matrix.

python docs/pictures/mesh.py [FILE]    # mesh.svg beside this file; .png to look at it
"""

import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch, Rectangle

HERE = Path(__file__).parent
INK, GREY, PALE, BLUE = "#1f2328", "#656d76", "#eaeef2", "#2f6fd0"
TABLE = """\
FSDP|TENSOR
  parameters   * -> fsdp
               mlp -> tensor
  activations  batch -> data+fsdp
               mlp -> tensor"""


def matrix(at: Axes, x: float, y: float, size: tuple[float, float], piece: tuple[int, int]) -> None:
    """Draw a matrix in two by two pieces, one of them filled."""
    width, height = size[0] / 2, size[1] / 2
    for row in range(2):
        for column in range(2):
            here = (x + column * width, y + (1 - row) * height)
            colour = BLUE if (row, column) == piece else "white"
            at.add_patch(Rectangle(here, width, height, fc=colour, ec=GREY, lw=0.8))


def device(at: Axes, x: float, y: float, number: int, piece: tuple[int, int]) -> None:
    """Draw a device and the piece that it stores."""
    at.add_patch(FancyBboxPatch((x, y), 1.5, 1.0, boxstyle="round,pad=0.05", fc="white", ec=INK))
    at.text(x + 0.06, y + 0.82, f"{number}", color=INK, fontsize=9, va="center")
    matrix(at, x + 0.35, y + 0.18, (1.0, 0.64), piece)


def mesh(at: Axes) -> None:
    """Draw two groups (data) of two rows (fsdp) and two columns (tensor)."""
    for data in range(2):
        left = 0.6 + 4.2 * data
        at.add_patch(Rectangle((left - 0.25, 0.1), 3.75, 2.75, fc=PALE, ec="none"))
        at.text(left + 1.6, 3.42, f"data {data}", ha="center", color=INK, fontsize=11)
        for tensor in range(2):
            x = left + 0.75 + 1.72 * tensor
            at.text(x, 3.05, f"tensor {tensor}", ha="center", color=GREY, fontsize=9)
        for fsdp in range(2):
            y = 1.6 - 1.33 * fsdp
            for tensor in range(2):
                number = 4 * data + 2 * fsdp + tensor
                device(at, left + 1.72 * tensor, y, number, (fsdp, tensor))
    for fsdp in range(2):
        y = 2.1 - 1.33 * fsdp
        at.text(0.22, y, f"fsdp {fsdp}", rotation=90, ha="center", va="center", color=GREY, size=9)


def words(at: Axes) -> None:
    """Write the strategy's table, and what it makes of one matrix."""
    x, mono = 9.1, {"family": "monospace", "fontsize": 9.5, "color": INK}
    at.text(x, 3.42, "The strategy is a table:", color=INK, fontsize=11)
    at.text(x, 3.2, TABLE, va="top", linespacing=1.35, **mono)
    at.text(x, 1.42, "It gives each array a PartitionSpec:", color=INK, fontsize=11)
    at.text(x, 1.2, 'up/kernel [embed, mlp]\n  P("fsdp", "tensor")', va="top", **mono)
    at.text(x, 0.32, "Blue: the piece that a device stores.", color=BLUE, fontsize=10)


def main(path: Path) -> None:
    """Write the picture."""
    mpl.rcParams["svg.fonttype"] = "none"
    mpl.rcParams["svg.hashsalt"] = "mesh"
    figure, at = plt.subplots(figsize=(10.4, 3.0))
    at.set(xlim=(0, 14.2), ylim=(0, 3.75))
    at.axis("off")
    mesh(at)
    words(at)
    figure.subplots_adjust(0, 0, 1, 1)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else HERE / "mesh.svg")
