"""The plot of `hfjax memory`: a stacked bar per alternative, and a line at the device's memory."""

from pathlib import Path
from typing import Any

from hfjax.cli.memory.table import Report
from hfjax.utils.tables import human, unit_of

# segments of a bar, from the bottom -> the field of an estimate, and its colour
PARTS = {
    "parameters": ("parameters", "#8db4e8"),
    "optimizer state": ("optimizer_state", "#b79ce0"),
    "master weights": ("master", "#e6a5cf"),
    "gradients": ("gradients", "#86c98f"),
    "kept by layers": ("layers", "#f2bc6b"),
    "kept around the layers": ("ends", "#f6dba6"),
    "messages between stages": ("messages", "#79cfc0"),
}
REST, INK, LIMIT = "#e4e4e4", "#333333", "#c0392b"
HOST = {
    "parameters": ("host_parameters", "#8db4e8"),
    "optimizer state": ("host_optimizer_state", "#b79ce0"),
    "master weights": ("host_master", "#e6a5cf"),
    "kept by layers": ("host_stashes", "#f2bc6b"),
}
ROOM, LABEL = 1.12, 0.06  # above the highest bar, a factor; size of a label as a part of the axis
WIDE = 0.62  # of a bar


def draw(report: Report, path: Path) -> None:
    """Draw a report of `hfjax memory`; host memory has its own panel if it is used."""
    from matplotlib.figure import Figure

    estimates = report.estimates
    host = max(e.host for e in estimates)
    heights = [3, 1] if host else [1]
    size = (max(7.0, 2.2 + 1.5 * len(estimates)), 6.5 if host else 5.0)
    figure = Figure(size, layout="constrained")
    panels = figure.subplots(len(heights), height_ratios=heights, squeeze=False)[:, 0]
    _draw_device(panels[0], report)
    if host:
        _draw_stack(panels[1], estimates, HOST)
        _finish_axes(panels[1], report, "host, per device", host)
    title = report.title.replace("), ", ")\n", 1)
    panels[0].set_title(title, fontsize=10, loc="left", color=INK)
    figure.savefig(path, dpi=140)


def _draw_device(axes: Any, report: Report) -> None:
    """Draw the bars of device memory: known parts stacked, the rest of the compiled peak grey."""
    estimates, limit = report.estimates, report.memory
    _draw_stack(axes, estimates, PARTS)
    top = max(max(e.layout_and_trace_bytes, e.peak) for e in estimates)
    if limit is not None and limit < 4 * top:
        top = max(top, limit)
    for x, e in enumerate(estimates):
        rest, above = (
            max(e.peak - e.layout_and_trace_bytes, 0),
            _above(max(e.layout_and_trace_bytes, e.peak), limit, top),
        )
        label = "other temporaries (compiled)" if x == 0 else None
        axes.bar(
            x,
            rest,
            WIDE,
            e.layout_and_trace_bytes,
            color=REST,
            hatch="///",
            edgecolor="white",
            label=label,
        )
        axes.hlines(e.peak, x - 0.37, x + 0.37, color=INK, linewidth=2)
        axes.annotate(
            human(e.peak), (x, above), (0, 4), textcoords="offset points",
            ha="center", va="bottom", fontsize=9, fontweight="normal" if x else "bold", color=INK,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # over the limit's line
        )  # fmt: skip
    axes.plot([], [], color=INK, linewidth=2, label="peak as compiled")
    if limit is not None:
        axes.plot([], [], color=LIMIT, linestyle="--", label=f"{report.device}: {human(limit)}")
        if limit <= top:
            axes.axhline(limit, color=LIMIT, linestyle="--", linewidth=1.3)
    _finish_axes(axes, report, "device", top)
    legend_options: Any = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "reverse": True}
    axes.legend(fontsize=8, frameon=False, **legend_options)


def _above(bar: int, limit: int | None, top: int) -> int:
    """Return the position of a bar's label: above the limit if it would overlap its line."""
    on_line = limit is not None and bar <= limit < bar + LABEL * ROOM * top
    return limit if limit is not None and on_line else bar


def _draw_stack(axes: Any, estimates: Any, segments: dict[str, tuple[str, str]]) -> None:
    bottoms = [0] * len(estimates)
    for label, (name, colour) in segments.items():
        sizes = [getattr(e, name) or 0 for e in estimates]
        if any(sizes):
            style: Any = {"color": colour, "edgecolor": "white", "linewidth": 0.8, "label": label}
            axes.bar(range(len(sizes)), sizes, WIDE, bottoms, **style)
        bottoms = [a + b for a, b in zip(bottoms, sizes, strict=True)]


def _finish_axes(axes: Any, report: Report, label: str, top: int) -> None:
    """Scale and label the axes: ticks are at round numbers of the unit."""
    from matplotlib.ticker import MultipleLocator

    letter, unit = unit_of(top)
    steps = (unit * factor * scale for scale in (0.1, 1, 10, 100) for factor in (1, 2, 5))
    step = next((step for step in steps if top / step <= 7), top or 1)
    axes.set_ylim(0, max(top, 1) * ROOM)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / unit:g}")
    axes.yaxis.set_major_locator(MultipleLocator(step))
    axes.set_ylabel(f"{letter} ({label})", fontsize=9, color=INK)
    names = [e.heading for e in report.estimates]
    axes.set_xticks(range(len(names)), names, fontsize=9)
    axes.set_xlim(-0.6, len(names) - 0.4)
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(length=0, colors=INK)
