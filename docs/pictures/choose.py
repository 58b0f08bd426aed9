"""Draw the picture of docs/choose.md: questions that lead to a strategy.

python docs/pictures/choose.py [FILE]    # choose.svg beside this file; .png to look at it
"""

import sys
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

HERE = Path(__file__).parent
INK, GREY, PALE, BLUE = "#1f2328", "#656d76", "#eaeef2", "#2f6fd0"
LEFT, RIGHT, HIGH, STEP = 4.6, 5.3, 0.78, 1.12

# A question in two lines; what to take if the answer is yes: a strategy, its flags.
QUESTIONS = [
    (
        ("Do state and activations", "fit on one GPU?"),
        ("DDP; on several GPUs also ZERO1", "no flag; --zero 1"),
    ),
    (
        ("Is there only one GPU?", ""),
        ("Recompute; optimizer state on the host", "--remat full --offload.optimizer"),
    ),
    (
        ("Does the state fit when it is", "divided over the GPUs of a node?"),
        ("FSDP; on several nodes HSDP", "--mesh.fsdp -1; --mesh.data -1 --mesh.fsdp 8"),
    ),
    (
        ("Does it fit when it is divided", "over all GPUs?"),
        ("FSDP", "--mesh.fsdp -1"),
    ),
]
# What to add, if something is still too large or too slow.
ADDITIONS = [
    (("Activations too large?", ""), ("Recompute", "--remat dots, then full")),
    (
        ("Fewer sequences than GPUs,", "or very long ones?"),
        ("Divide each sequence", "--mesh.context 4"),
    ),
    (
        ("One layer too wide", "for a GPU?"),
        ("Divide its matrices, in a node", "--mesh.tensor 4"),
    ),
    (
        ("Many layers, slow links", "between nodes?"),
        ("Stages of a pipeline", "--mesh.pipe 4"),
    ),
    (
        ("Mixture of experts?", ""),
        ("Experts on different GPUs", "--mesh.expert 8"),
    ),
]


def box(at: Axes, x: float, y: float, width: float, colour: str) -> None:
    """Draw a box whose left end and middle are at x, y."""
    style = "round,pad=0,rounding_size=0.08"
    corner = (x, y - HIGH / 2)
    at.add_patch(FancyBboxPatch(corner, width, HIGH, boxstyle=style, fc=colour, ec=GREY, lw=0.8))


def lines(at: Axes, x: float, y: float, words: tuple[str, str], code: bool) -> None:
    """Write one line, or two, the second in monospace if it is code."""
    first, second = words
    gap = 0.17 if second else 0.0
    at.text(x, y + gap, first, color=INK, fontsize=10, va="center")
    family = "monospace" if code else "sans-serif"
    size, colour = (8.5, BLUE) if code else (10, INK)
    at.text(x, y - gap, second, color=colour, fontsize=size, va="center", family=family)


def arrow(at: Axes, start: tuple[float, float], end: tuple[float, float], word: str) -> None:
    """Draw an arrow with a word at its side."""
    at.annotate("", end, start, arrowprops={"arrowstyle": "-|>", "color": GREY, "lw": 1.0})
    if word:
        x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
        aside = (0.0, 0.14) if start[1] == end[1] else (0.22, 0.0)
        at.text(x + aside[0], y + aside[1], word, color=GREY, fontsize=9, ha="center", va="center")


def draw(at: Axes) -> float:
    """Draw all questions from above; return where the last one ends."""
    y = 0.0
    for number, (question, answer) in enumerate(QUESTIONS):
        box(at, 0, y, LEFT, PALE)
        lines(at, 0.15, y, question, code=False)
        box(at, RIGHT, y, LEFT, "white")
        lines(at, RIGHT + 0.15, y, answer, code=True)
        arrow(at, (LEFT, y), (RIGHT, y), "yes")
        below = "no" if number < len(QUESTIONS) - 1 else ""
        if below:
            arrow(at, (1.2, y - HIGH / 2), (1.2, y - STEP + HIGH / 2), below)
        y -= STEP
    y -= 0.25
    words = "If it still does not fit, or is slow, add:"
    at.text(0, y + 0.4, words, color=INK, fontsize=10.5, va="center", weight="bold")
    y -= 0.35
    for question, answer in ADDITIONS:
        box(at, 0, y, LEFT, PALE)
        lines(at, 0.15, y, question, code=False)
        box(at, RIGHT, y, LEFT, "white")
        lines(at, RIGHT + 0.15, y, answer, code=True)
        arrow(at, (LEFT, y), (RIGHT, y), "yes")
        y -= 1.0
    return y


def main(target: Path) -> None:
    """Write the picture."""
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "choose", "font.size": 10})
    figure, at = plt.subplots(figsize=(7.6, 8.4))
    bottom = draw(at)
    at.set_xlim(-0.1, RIGHT + LEFT + 0.1)
    at.set_ylim(bottom + 0.4, 0.55)
    at.axis("off")
    figure.subplots_adjust(0, 0, 1, 1)
    figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else None)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE / "choose.svg")
