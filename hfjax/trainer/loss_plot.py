"""The picture of a run: loss by step, raw and its mean, validations, and the learning rate.

Of a model with experts also how evenly tokens go to them.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hfjax.utils.atomic import replacing
from hfjax.utils.tables import named

HARD = "\u00a0"  # a space at which no line ends
INK, LOSS, VALID, RATE = "#333333", "#2f6db5", "#c0392b", "#8a8a8a"
LOAD, LOST = "#7a4fa3", "#c77d2e"
WIDTH, MOST = 105, 70  # characters: of a line of settings, of the name of a run
PART = 40  # the mean is over one part of so many of the run, and at least LEAST steps
LEAST = 5


def draw(lines: Sequence[Mapping[str, Any]], path: Path, settings: Mapping[str, Any]) -> None:
    """Draw the lines of a metrics file; without a loss in them nothing is drawn."""
    if any(line.get("loss") is not None for line in lines):
        made = figure(lines, named(path.absolute().parent.name), settings)
        with replacing(path) as file:
            made.savefig(file, format=path.suffix[1:], dpi=120)


def figure(lines: Sequence[Mapping[str, Any]], name: str, settings: Mapping[str, Any]) -> Any:
    """Return the picture of a run, without pyplot."""
    from matplotlib.figure import Figure

    loss, valid, rate = (_curve(lines, name) for name in ("loss", "valid_loss", "lr"))
    load, lost = (_curve(lines, of) for of in ("load_max_over_mean", "dropped_mean"))
    panels = 2 if len(load) else 1
    made = Figure(figsize=(8, 4.8 if panels == 1 else 6.4), layout="constrained")
    axes, *more = np.ravel(made.subplots(panels, height_ratios=(3, 1)[:panels]))
    if more:
        _experts(more[0], load, lost)
    _losses(axes, loss, valid)
    _rate(axes, rate)
    _title(axes, name, subtitle(settings))
    made.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return made


def _title(axes: Any, name: str, below: str) -> None:
    """Write the name of a run, and its settings below."""
    plain: dict[str, Any] = {"color": INK, "parse_math": False}
    axes.set_title(below, loc="left", y=1.0, pad=6, fontsize=8, **plain)
    name = name if len(name) <= MOST else f"{name[: MOST - 1]}…"
    up = 8 + 11 * len(below.splitlines())  # points
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(name, (0, 1), (0, up), fontsize=12, **plain, **place)


def _curve(lines: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Return steps and values, a row each; those that are not there are left out."""
    found = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return np.array(found, float).reshape(-1, 2)


def _losses(axes: Any, loss: np.ndarray, valid: np.ndarray) -> None:
    from matplotlib.ticker import MaxNLocator

    steps, values = loss.T
    smooth = mean(values, window := max(len(values) // PART, LEAST))
    few = len(values) <= window
    look: Any = {"marker": "."} if few else {"alpha": 0.3, "linewidth": 1}
    axes.plot(steps, values, color=LOSS, label="loss of a step", **look)
    if not few:
        axes.plot(steps, smooth, color=LOSS, linewidth=2, label=f"mean of {window} steps")
    if len(valid):
        axes.plot(*valid.T, "o", color=VALID, markersize=5, label="validation")
    axes.set(xlabel="step", ylabel="loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.spines["top"].set_visible(False)


def mean(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the values around each one, fewer at both ends.

    >>> mean(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist()
    [1.5, 3.0, 3.0, 3.0]
    """
    ones = np.ones(min(window, len(values)))
    total, count = (np.convolve(x, ones, "same") for x in (values, np.ones(len(values))))
    return total / count


def _rate(axes: Any, rate: np.ndarray) -> None:
    """Draw the learning rate on an axis of its own, behind the losses."""
    if not rate[:, 1].any():
        return
    beside = axes.twinx()
    beside.plot(*rate.T, "--", color=RATE, linewidth=1, label="learning rate")
    beside.set_ylabel("learning rate", color=RATE)
    beside.set_ylim(0, 1.05 * rate[:, 1].max())
    beside.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    beside.tick_params(colors=RATE)
    beside.spines["top"].set_visible(False)
    axes.set_zorder(beside.get_zorder() + 1)
    axes.patch.set_visible(False)


def _experts(axes: Any, load: np.ndarray, lost: np.ndarray) -> None:
    """Draw the busiest expert's load over the mean, and the share of choices without a place."""
    axes.plot(*load.T, color=LOAD, linewidth=1.5, label="busiest expert over the mean")
    axes.set_ylabel("load", color=LOAD)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    beside = axes.twinx()
    beside.plot(*lost.T, color=LOST, linewidth=1, label="dropped")
    beside.set_ylabel("dropped", color=LOST)
    beside.set_ylim(0, max(0.01, 1.05 * lost[:, 1].max()))
    beside.yaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    for each in (axes, beside):
        each.spines["top"].set_visible(False)


def subtitle(settings: Mapping[str, Any]) -> str:
    """Return the settings of a run that matter to its losses, in lines of their own.

    >>> subtitle({"steps": 300, "batch": 32, "strategy": "fsdp", "model": {"preset": "gpt-tiny"}})
    'gpt-tiny, strategy fsdp, 32 rows in a step, 300 steps'
    """
    of = lambda part, name: (settings.get(part) or {}).get(name)
    own = lambda part: (name := of(part, "own")) and Path(name).name
    told = {
        "{}": own("model") or of("model", "preset"),
        "{} tokens in a row": of("model", "length"),
        "strategy {}": settings.get("strategy"),
        "{} rows in a step": settings.get("batch"),
        "optimizer {}": own("optimizer") or of("optimizer", "name"),
        "rate {}": of("optimizer", "rate"),
        "precision {}": settings.get("precision"),
        "seed {}": settings.get("seed"),
        "{} steps": settings.get("steps"),
    }
    words = [text.format(value) for text, value in told.items() if value is not None]
    kept = ", ".join(word.replace(" ", HARD) for word in words)  # lines end between settings
    return "\n".join(textwrap.wrap(kept, WIDTH)).replace(HARD, " ")
