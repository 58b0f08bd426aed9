"""The plot of a run: loss by step, raw and averaged, validation losses and the learning rate.

For a model with experts also how evenly tokens are routed to them.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hfjax.utils.atomic import atomic_file
from hfjax.utils.tables import quote

NO_BREAK = "\u00a0"  # a space at which no line ends
INK, LOSS, VALID, RATE = "#333333", "#2f6db5", "#c0392b", "#8a8a8a"
LOAD, DROPPED = "#7a4fa3", "#c77d2e"
WIDTH, MOST = 105, 70  # characters: of a line of settings, of the name of a run
MEAN_PARTS = 40  # the mean is over the run's steps divided by this, and at least LEAST
LEAST = 5


def draw_plot(lines: Sequence[Mapping[str, Any]], path: Path, settings: Mapping[str, Any]) -> None:
    """Plot the lines of a metrics file; draw nothing if they have no loss."""
    if any(line.get("loss") is not None for line in lines):
        fig = make_figure(lines, quote(path.absolute().parent.name), settings)
        with atomic_file(path) as file:
            fig.savefig(file, format=path.suffix[1:], dpi=120)


def make_figure(lines: Sequence[Mapping[str, Any]], name: str, settings: Mapping[str, Any]) -> Any:
    """Return the figure of a run, without pyplot."""
    from matplotlib.figure import Figure

    loss, valid, rate = (_curve(lines, name) for name in ("loss", "valid_loss", "lr"))
    load, dropped = (_curve(lines, metric) for metric in ("load_max_over_mean", "dropped_mean"))
    panels = 2 if len(load) else 1
    fig = Figure(figsize=(8, 4.8 if panels == 1 else 6.4), layout="constrained")
    axes, *more = np.ravel(fig.subplots(panels, height_ratios=(3, 1)[:panels]))
    if more:
        _draw_experts(more[0], load, dropped)
    _draw_losses(axes, loss, valid)
    _draw_rate(axes, rate)
    _draw_title(axes, name, subtitle(settings))
    fig.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    return fig


def _draw_title(axes: Any, name: str, below: str) -> None:
    """Write the name of a run, and its settings below."""
    text_style: dict[str, Any] = {"color": INK, "parse_math": False}
    axes.set_title(below, loc="left", y=1.0, pad=6, fontsize=8, **text_style)
    name = name if len(name) <= MOST else f"{name[: MOST - 1]}…"
    up = 8 + 11 * len(below.splitlines())  # points
    coords: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(name, (0, 1), (0, up), fontsize=12, **text_style, **coords)


def _curve(lines: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Return (step, value) pairs of a metric; lines without it are left out."""
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return np.array(points, float).reshape(-1, 2)


def _draw_losses(axes: Any, loss: np.ndarray, valid: np.ndarray) -> None:
    from matplotlib.ticker import MaxNLocator

    steps, values = loss.T
    smooth = moving_average(values, window := max(len(values) // MEAN_PARTS, LEAST))
    is_short = len(values) <= window
    style: Any = {"marker": "."} if is_short else {"alpha": 0.3, "linewidth": 1}
    axes.plot(steps, values, color=LOSS, label="loss of a step", **style)
    if not is_short:
        axes.plot(steps, smooth, color=LOSS, linewidth=2, label=f"mean of {window} steps")
    if len(valid):
        axes.plot(*valid.T, "o", color=VALID, markersize=5, label="validation")
    axes.set(xlabel="step", ylabel="loss")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.grid(alpha=0.3)
    axes.spines["top"].set_visible(False)


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Return the mean of the values around each one, fewer at both ends.

    >>> moving_average(np.array([0.0, 3.0, 6.0, 0.0]), 3).tolist()
    [1.5, 3.0, 3.0, 3.0]
    """
    ones = np.ones(min(window, len(values)))
    sums, count = (np.convolve(x, ones, "same") for x in (values, np.ones(len(values))))
    return sums / count


def _draw_rate(axes: Any, rate: np.ndarray) -> None:
    """Draw the learning rate on an axis of its own, behind the losses."""
    if not rate[:, 1].any():
        return
    twin = axes.twinx()
    twin.plot(*rate.T, "--", color=RATE, linewidth=1, label="learning rate")
    twin.set_ylabel("learning rate", color=RATE)
    twin.set_ylim(0, 1.05 * rate[:, 1].max())
    twin.ticklabel_format(axis="y", style="sci", scilimits=(-2, 2))
    twin.tick_params(colors=RATE)
    twin.spines["top"].set_visible(False)
    axes.set_zorder(twin.get_zorder() + 1)
    axes.patch.set_visible(False)


def _draw_experts(axes: Any, load: np.ndarray, dropped: np.ndarray) -> None:
    """Draw the busiest expert's load over the mean, and the fraction of dropped choices."""
    axes.plot(*load.T, color=LOAD, linewidth=1.5, label="busiest expert over the mean")
    axes.set_ylabel("load", color=LOAD)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    twin = axes.twinx()
    twin.plot(*dropped.T, color=DROPPED, linewidth=1, label="dropped")
    twin.set_ylabel("dropped", color=DROPPED)
    twin.set_ylim(0, max(0.01, 1.05 * dropped[:, 1].max()))
    twin.yaxis.set_major_formatter(lambda x, _: f"{x:.0%}")
    for each in (axes, twin):
        each.spines["top"].set_visible(False)


def subtitle(settings: Mapping[str, Any]) -> str:
    """Return the settings of a run that matter to its losses, in lines of their own.

    >>> mesh = {"data": 2, "fsdp": 4, "tensor": 1}
    >>> subtitle({"steps": 9, "global_batch_size": 8, "mesh": mesh, "seed": 3})
    'mesh data=2 fsdp=4, global batch size 8, seed 3, 9 steps'
    """
    setting = lambda section, name: (settings.get(section) or {}).get(name)
    file = lambda name: name and Path(name).name
    sizes = (settings.get("mesh") or {}).items()
    mesh = " ".join(f"{axis}={size}" for axis, size in sizes if size not in (None, 1))
    templates = {
        "{}": file(setting("model", "factory")) or setting("model", "preset"),
        "sequence length {}": setting("model", "seq_len"),
        "mesh {}": mesh or "data=-1",
        "ZeRO {}": settings.get("zero"),
        "strategy {}": file(settings.get("strategy")),
        "global batch size {}": settings.get("global_batch_size"),
        "optimizer {}": file(setting("optimizer", "factory")) or setting("optimizer", "name"),
        "learning rate {}": setting("optimizer", "learning_rate"),
        "precision {}": settings.get("precision"),
        "seed {}": settings.get("seed"),
        "{} steps": settings.get("steps"),
    }
    items = [text.format(value) for text, value in templates.items() if value is not None]
    line = ", ".join(item.replace(" ", NO_BREAK) for item in items)  # lines end between settings
    return "\n".join(textwrap.wrap(line, WIDTH)).replace(NO_BREAK, " ")
