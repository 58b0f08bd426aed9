"""Draws boxes on lines over time: a picture (SVG, PNG), or a trace for ui.perfetto.dev (JSON).

A long picture is cut, where no box is, into rows one below the other.
"""

import io
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hfjax.utils.atomic import atomic_file

ENDINGS = (".svg", ".png", ".json")
WIDTH, LINE, ROW, TOP, ENTRY = 1000, 26, 44, 40, 18  # points: the picture, a line, its time, …
LEFT, LETTER = 100, 6.8  # points: names of lines and margins, a character
INK, BARS = "#282828", "#6e6e6e"


@dataclass(frozen=True)
class Span:
    """A box.

    Attributes:
        kind: What its colour means.
        line: Its line, from the top.
        start: When it begins, in milliseconds.
        width: Its duration.
        label: The text inside, if there is room.
        name: Its name in a trace, and its tooltip in an SVG.
        alpha: Its opacity.
        bar: The fraction of its lower edge that is marked.
    """

    kind: str
    line: int
    start: float
    width: float
    label: str = ""
    name: str = ""
    alpha: float = 1.0
    bar: float = 0.0

    @property
    def end(self) -> float:
        """The end of the box."""
        return self.start + self.width


@dataclass(frozen=True)
class Timeline:
    """The contents of a picture.

    Attributes:
        title: The title at the top.
        lines: The names of the lines.
        spans: The boxes; later ones cover earlier ones.
        colours: The colour of each kind.
        legend: Texts with their colour and opacity.
        unit: The unit of time.
        rows: The number of rows of the picture.
        messages: Pairs of the box that makes a message and the box that reads it.
    """

    title: str
    lines: Sequence[str]
    spans: Sequence[Span]
    colours: Mapping[str, str]
    legend: Sequence[tuple[str, str, float]]
    unit: str = "time"
    rows: int = 1
    messages: Sequence[tuple[Span, Span]] = field(default=(), repr=False)

    @cached_property
    def end(self) -> float:
        """The end of the last box."""
        return max(span.end for span in self.spans)

    @cached_property
    def row_ranges(self) -> list[tuple[float, float]]:
        """The begin and end of each row: no box is cut, and lengths are similar."""
        cuts, last = [0.0], 0.0  # where every earlier box has ended
        for start, end in sorted((span.start, span.end) for span in self.spans):
            if start > last - 1e-9:
                cuts.append(start)
            last = max(last, end)
        even = [n * self.end / self.rows for n in range(1, self.rows)]
        near = (min(cuts, key=lambda time: abs(time - at)) for at in even)
        return [*itertools.pairwise([*dict.fromkeys([0.0, *near]), self.end])]


def write(path: Path, timeline: Timeline) -> None:
    """Write a picture or a trace, depending on the suffix of the path."""
    check_ending(path)
    with atomic_file(path) as file:
        if path.suffix == ".json":
            file.write(trace(timeline).encode())
        elif path.suffix == ".svg":
            file.write(svg(timeline).encode())
        else:
            figure(timeline).savefig(file, format="png", dpi=144)


def check_ending(path: Path) -> None:
    """Refuse a path whose suffix is not known."""
    if path.suffix not in ENDINGS:
        raise ValueError(
            f"{path}: a picture is an .svg or a .png file; a .json file is a trace for "
            "ui.perfetto.dev."
        )


def svg(timeline: Timeline) -> str:
    """Return the picture as SVG; boxes have their names as tooltips."""
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hfjax"}):  # deterministic
        figure(timeline).savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r'<g id="tip (.*?)">', r"<g><title>\1</title>", text.getvalue())


def figure(timeline: Timeline) -> Any:
    """Return the picture, without pyplot."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    ranges, columns = (
        timeline.row_ranges,
        max(int(WIDTH / LETTER / (6 + max(len(x) for x, *_ in timeline.legend))), 1),
    )
    high = (
        TOP
        + len(ranges) * (LINE * len(timeline.lines) + ROW)
        + ENTRY * (1 + len(timeline.legend) // columns)
    )
    canvas = Figure((WIDTH / 72, high / 72), dpi=72, layout="constrained")
    panels = canvas.subplots(len(ranges), squeeze=False)[:, 0]
    longest = max(end - begin for begin, end in ranges)
    for axes, (begin, end) in zip(panels, ranges, strict=True):
        axes.set_xlim(begin, begin + longest)
        axes.set_ylim(len(timeline.lines), 0)
        axes.set_yticks([n + 0.5 for n in range(len(timeline.lines))], timeline.lines)
        axes.tick_params(length=0, colors=INK, labelsize=11)
        axes.spines[:].set_visible(False)
        _boxes(
            axes,
            [s for s in timeline.spans if begin - 1e-9 <= s.start < end - 1e-9],
            timeline,
            longest,
        )
    panels[0].set_title(timeline.title, loc="left", fontsize=13, color=INK)
    panels[-1].set_xlabel(timeline.unit, color=INK)
    entries = [
        Patch(color=colour, alpha=alpha, label=text) for text, colour, alpha in timeline.legend
    ]
    legend_options: Any = {"loc": "outside lower left", "ncols": columns, "frameon": False}
    canvas.legend(handles=entries, fontsize=11, labelcolor=INK, **legend_options)
    return canvas


def _boxes(axes: Any, spans: Sequence[Span], timeline: Timeline, longest: float) -> None:
    """Draw the boxes of a row, each with its label if there is room."""
    from matplotlib.patches import Rectangle

    unit = longest / (WIDTH - LEFT)  # of a point
    for s in spans:
        corner, wide = (s.start, s.line + 0.04), max(s.width - unit, s.width / 2)  # a visible edge
        style: Any = {"facecolor": timeline.colours[s.kind], "alpha": s.alpha}
        axes.add_patch(Rectangle(corner, wide, 0.92, gid=f"tip {s.name or s.kind}", **style))
        if s.bar:
            axes.add_patch(Rectangle((s.start, s.line + 0.84), wide * s.bar, 0.12, color=BARS))
        if s.label and LETTER * len(s.label) * unit <= wide:
            middle = s.start + wide / 2, s.line + 0.5
            axes.text(*middle, s.label, ha="center", va="center", fontsize=11, color=INK)


def trace(timeline: Timeline) -> str:
    """Return the boxes as a Chrome trace, with an arrow for each message."""
    event = lambda kind, line, time, **more: dict(
        ph=kind, pid=0, tid=line, ts=round(1000 * time), **more
    )
    named = enumerate(timeline.lines)
    events = [event("M", n, 0, name="thread_name", args={"name": name}) for n, name in named]
    for s in timeline.spans:
        details = {"name": s.name or s.kind, "cat": s.kind, "dur": round(1000 * s.width)}
        events.append(event("X", s.line, s.start, **details))
    for number, (sent, used) in enumerate(timeline.messages):
        arrow = {"name": "message", "cat": "message", "id": number}
        events.append(event("s", sent.line, sent.start + 0.99 * sent.width, **arrow))
        events.append(event("f", used.line, used.start, bp="e", **arrow))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})
