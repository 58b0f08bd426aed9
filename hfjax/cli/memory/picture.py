"""The picture of `hfjax memory`: a stacked bar for each alternative, the device's memory a line."""

from pathlib import Path
from typing import Any

from hfjax.base.tables import human
from hfjax.cli.memory.memory_table import Report

# what a bar is stacked of, from below -> the field of an estimate, and its colour
PARTS = {
    "parameters": ("parameters", "#8db4e8"),
    "moments": ("moments", "#b79ce0"),
    "master weights": ("master", "#e6a5cf"),
    "gradients": ("gradients", "#86c98f"),
    "kept by layers": ("layers", "#f2bc6b"),
    "kept around the layers": ("ends", "#f6dba6"),
    "messages between stages": ("messages", "#79cfc0"),
}
REST, INK, LIMIT = "#e4e4e4", "#333333", "#c0392b"
HOST = {
    "parameters": ("host_parameters", "#8db4e8"),
    "moments": ("host_moments", "#b79ce0"),
    "master weights": ("host_master", "#e6a5cf"),
    "kept by layers": ("host_stashes", "#f2bc6b"),
}
ROOM, LABEL = 1.12, 0.06  # above the highest bar, a factor; what a label takes of the axis
UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def draw(report: Report, path: Path) -> None:
    """Draw a report of `hfjax memory`; host memory has a panel of its own, where there is any."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    host = any(e.host for e in report.estimates)
    heights = [3, 1] if host else [1]
    size = (max(7.0, 2.2 + 1.5 * len(report.estimates)), 6.5 if host else 5.0)
    figure, panels = pyplot.subplots(
        len(heights), 1, figsize=size, height_ratios=heights, layout="constrained", squeeze=False
    )
    names = _names(report)
    _device(panels[0][0], report)
    if host:
        _stack(panels[1][0], report.estimates, HOST)
        _finish(panels[1][0], names, "host, per device", max(e.host for e in report.estimates))
    panels[0][0].set_title(_wrapped(report.title), fontsize=10, loc="left", color=INK)
    figure.savefig(path, dpi=140)
    pyplot.close(figure)


def _names(report: Report) -> list[str]:
    return [e.heading for e in report.estimates]


def _wrapped(title: str) -> str:
    first, _, rest = title.partition("), ")
    return f"{first})\n{rest}" if rest else title


def _device(axes: Any, report: Report) -> None:
    """Draw the bars of the device: what is known stacked, the rest of the compiled peak grey."""
    estimates = report.estimates
    _stack(axes, estimates, PARTS)
    tops = [max(e.known, e.peak) for e in estimates]
    limit, top = report.memory, max(tops)
    if limit is not None and limit < 4 * top:
        top = max(top, limit)
    for x, e in enumerate(estimates):
        rest = max(e.peak - e.known, 0)
        label = "other temporaries (compiled)" if x == 0 else None
        axes.bar(x, rest, 0.62, e.known, color=REST, hatch="///", edgecolor="white", label=label)
        axes.hlines(e.peak, x - 0.37, x + 0.37, color=INK, linewidth=2)
        weight = "bold" if x == 0 else "normal"
        axes.annotate(
            human(e.peak), (x, _above(tops[x], limit, top)), (0, 4), textcoords="offset points",
            ha="center", va="bottom", fontsize=9, fontweight=weight, color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over the limit's line
        )  # fmt: skip
    axes.plot([], [], color=INK, linewidth=2, label="peak as compiled")
    if limit is not None:
        axes.plot([], [], color=LIMIT, linestyle="--", label=f"{report.device}: {human(limit)}")
        if limit <= top:
            axes.axhline(limit, color=LIMIT, linestyle="--", linewidth=1.3)
    _finish(axes, _names(report), "device", top)
    axes.legend(
        *_from_above(axes), fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0)
    )


def _above(bar: int, limit: int | None, top: int) -> int:
    """Return where the label of a bar begins: above the limit, if it would be on its line."""
    on_line = limit is not None and bar <= limit < bar + LABEL * ROOM * top
    return limit if limit is not None and on_line else bar


def _from_above(axes: Any) -> tuple[list[Any], list[str]]:
    """Return the legend in the order in which the bars are stacked."""
    handles, labels = axes.get_legend_handles_labels()
    return handles[::-1], labels[::-1]


def _stack(axes: Any, estimates: Any, parts: dict[str, tuple[str, str]]) -> None:
    bottoms = [0] * len(estimates)
    for label, (name, colour) in parts.items():
        sizes = [getattr(e, name) or 0 for e in estimates]
        if any(sizes):
            axes.bar(
                range(len(sizes)), sizes, 0.62, bottoms, color=colour, edgecolor="white",
                linewidth=0.8, label=label,
            )  # fmt: skip
        bottoms = [a + b for a, b in zip(bottoms, sizes, strict=True)]


def _finish(axes: Any, names: list[str], what: str, top: int) -> None:
    """Scale and label the axes."""
    unit, letter = next(((u, n) for u, n in UNITS if top >= u), (1, "B"))
    axes.set_ylim(0, max(top, 1) * ROOM)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / unit:g}")
    axes.yaxis.set_major_locator(_ticks(unit, top))
    axes.set_ylabel(f"{letter} ({what})", fontsize=9, color=INK)
    axes.set_xticks(range(len(names)), names, fontsize=9)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, colors=INK)


def _ticks(unit: int, top: int) -> Any:
    """Return where the ticks are: at round numbers of the unit."""
    from matplotlib.ticker import MultipleLocator

    steps = (unit * factor * scale for scale in (0.1, 1, 10, 100) for factor in (1, 2, 5))
    return MultipleLocator(next((step for step in steps if top / step <= 7), top or 1))
