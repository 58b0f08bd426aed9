"""A schedule drawn to scale: SVG, PNG and a trace for Perfetto.

A box is a slot of a tick, as wide as the time it takes. Grey ones are masked: the stage computes,
as all stages do in a tick without branches, and what it computes is thrown away. A bar at
the bottom is as long as the chunk is late: the first chunk has none, the last one's fills its box.
A long picture is cut between ticks into lines below each other.
"""

import io
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from hfjax.parallel.schedules.cost import starts
from hfjax.parallel.schedules.table import KINDS, Table, Task, needs

NAMES = {"F": "forward", "B": "backward", "I": "backward (input)", "W": "weights", "": "masked"}
COLOURS = {
    "F": (141, 180, 232),
    "B": (134, 201, 143),
    "I": (121, 207, 192),
    "W": (242, 188, 107),
    "": (230, 230, 230),
}
BAR = 3  # pixels: the height of a bar
ROW, LEFT, RIGHT, TOP = 26, 62, 16, 34  # pixels: a stage, its name, the right margin, the title
AXIS, ENTRY, BOTTOM = 46, 22, 6  # pixels below the stages: the time, a line of the legend, margin
DIGIT, LETTER = 7.0, 6.8  # pixels of a character, of a label and of other text
LEAST, LONGEST, WIDEST = 560, 1_060, 20_000  # pixels: a picture, a line of it, all lines together
SHARP = 5_000  # pixels: up to here a PNG has twice as many
INK, PALE, BARS = "#282828", "#8a8a8a", (110, 110, 110)
CHUNK, NUMBER = "chunk", "number"  # of the legend, beside the kinds


@dataclass(frozen=True)
class Box:
    """One slot of one stage in one tick: what it does, when and for how long."""

    kind: str  # F, B, I (backward without weights), W; empty: masked
    stage: int
    tick: int
    start: float
    width: float
    task: Task | None
    chunk: int  # of the stage
    depth: float  # 0 for the first chunk, 1 for the last

    @property
    def label(self) -> str:
        """The microbatch."""
        return str(self.task.microbatch) if self.task else ""

    @property
    def name(self) -> str:
        """The task as the grid has it (a backward whose weights are apart is an I), or `masked`."""
        return str(self.task._replace(kind=self.kind)) if self.task else "masked"

    @property
    def colour(self) -> tuple[int, ...]:
        """The colour of the kind, paler for later chunks."""
        return tuple(round(c + (255 - c) * 0.4 * self.depth) for c in COLOURS[self.kind])


def boxes(table: Table, forward: float, backward: float, weights: float) -> Iterator[Box]:
    """Yield every slot that takes time, as the executor runs them: in lockstep."""
    begins, widths = starts(table, forward, backward, weights)
    tasks = {(tick, stage, task.kind): task for task, tick, stage in table.tasks()}
    letters = "FIW" if table.split else "FBW"
    for tick, stage, slot in np.argwhere(widths > 0).tolist():
        task = tasks.get((tick, stage, KINDS[slot]))
        when = float(begins[tick, stage, slot]), float(widths[tick, stage, slot])
        chunk = table.homes[task.virtual][1] if task else 0
        place = chunk, chunk / max(table.chunks - 1, 1)
        yield Box(letters[slot] if task else "", stage, tick, *when, task, *place)


@dataclass(frozen=True)
class Frame:
    """Where things are in a picture of boxes, in pixels."""

    table: Table
    drawn: list[Box]

    @cached_property
    def end(self) -> float:
        """The time at which the last box ends."""
        return max(box.start + box.width for box in self.drawn)

    @cached_property
    def title(self) -> str:
        """What is drawn, and the part of the time in which stages do nothing of use."""
        table = self.table
        busy = sum(box.width for box in self.drawn if box.task)
        counts = {"stage": table.stages, "microbatch": table.microbatches, "chunk": table.chunks}
        told = [_several(n, name) for name, n in counts.items() if n > 1 or name != "chunk"]
        return f"{table.name}: {', '.join(told)}, bubble {1 - busy / table.stages / self.end:.1%}"

    @cached_property
    def scale(self) -> float:
        """The pixels of a unit of time: room for the longest label in the narrowest box."""
        room = 3 + DIGIT * max(len(box.label) for box in self.drawn)
        scale = min(room / min(box.width for box in self.drawn), WIDEST / self.end)
        least = max(LEAST, LEFT + 1.3 * LETTER * len(self.title))
        return max(scale, (least - LEFT - RIGHT) / self.end)

    @cached_property
    def lines(self) -> list[tuple[float, float]]:
        """The times at which lines of the picture begin and end: between ticks, of like lengths."""
        count = math.ceil(self.scale * self.end / (LONGEST - LEFT - RIGHT))
        ends = sorted((box.start, box.start + box.width) for box in self.drawn)
        cuts, last = [0.0], 0.0  # where every box before has ended
        for start, end in ends:
            if start > last - 1e-9:
                cuts.append(start)
            last = max(last, end)
        near = (min(cuts, key=lambda t: abs(t - n * self.end / count)) for n in range(1, count))
        found = [*dict.fromkeys([0.0, *near]), self.end]
        return [*itertools.pairwise(found)]

    def place(self, time: float) -> tuple[int, float]:
        """Return the line on which a box begins at this time, and its left edge."""
        line = max(n for n, (begin, _) in enumerate(self.lines) if begin <= time + 1e-9)
        return line, LEFT + self.scale * (time - self.lines[line][0])

    @cached_property
    def width(self) -> int:
        """Of the picture."""
        return round(LEFT + self.scale * max(end - begin for begin, end in self.lines)) + RIGHT

    def top(self, line: int, stage: int) -> int:
        """Return the upper edge of a stage on a line."""
        return TOP + line * (ROW * self.table.stages + AXIS) + ROW * stage

    @cached_property
    def bottom(self) -> int:
        """The lower edge of the last stage on the last line."""
        return self.top(len(self.lines) - 1, self.table.stages)

    @cached_property
    def height(self) -> int:
        """Of the picture."""
        return 1 + ENTRY + max(y for _, y, *_ in self.legend) + BOTTOM

    def edges(self, box: Box) -> tuple[int, int, int, int]:
        """Return left, right, top and bottom of a box; a pixel is free beside the next one."""
        line, start = self.place(box.start)
        left, right = round(start), round(start + self.scale * box.width)
        top = self.top(line, box.stage)
        return left, max(right - 1, left + 1), top, top + ROW - 2

    @cached_property
    def ticks(self) -> list[float]:
        """The times that are written below: round numbers with room between them."""
        powers = (m * 10.0**e for e in range(-3, 9) for m in (1, 2, 5))
        step = next(step for step in powers if step * self.scale >= 60)
        return [step * n for n in range(int(self.end / step + 1e-9) + 1)]

    @cached_property
    def legend(self) -> list[tuple[int, int, str, str, float]]:
        """The legend, lines as long as fit: where, what is said, the kind, the length of a bar."""
        found = {box.kind for box in self.drawn}
        said = [(_words(kind), kind, 0.0) for kind in NAMES if kind in found]
        if self.table.chunks > 1:
            for chunk in range(self.table.chunks):
                said.append((f"chunk {chunk}", CHUNK, chunk / (self.table.chunks - 1)))
        said.append(("number: the microbatch", NUMBER, 0.0))
        x, y, placed = LEFT, self.bottom + AXIS, []
        for words, kind, depth in said:
            wide = round(24 + LETTER * len(words) + 14)
            if x > LEFT and x + wide > self.width:
                x, y = LEFT, y + ENTRY
            placed.append((x, y, words, kind, depth))
            x += wide
        return placed


def _several(count: int, name: str) -> str:
    return f"{count} {name}" + ("" if count == 1 else "es" if name.endswith("ch") else "s")


def _words(kind: str) -> str:
    return NAMES[kind] if kind else "masked: computed, thrown away"


def write(table: Table, path: Path, drawn: list[Box]) -> None:
    """Write the picture; the ending of the path, .svg or .png, says which kind."""
    if path.suffix == ".svg":
        path.write_text(svg(table, drawn), encoding="utf-8")
    elif path.suffix == ".png":
        path.write_bytes(png(table, drawn))
    else:
        raise ValueError(f"{path}: a picture is an .svg or a .png file.")


def svg(table: Table, drawn: list[Box]) -> str:
    """Return the picture as SVG; the tooltip of a box is its task and tick."""
    from matplotlib import rc_context

    frame, text = Frame(table, drawn), io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "hfjax"}):  # the same each time
        _figure(frame).savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    return text.getvalue().replace("</svg>", "\n".join([*_tips(frame), "</svg>"]))


def _tips(frame: Frame) -> Iterator[str]:
    """Yield what shows a tooltip, over each box."""
    for box in frame.drawn:
        (line, x), wide = frame.place(box.start), frame.scale * box.width
        y = frame.top(line, box.stage)
        shape = f'x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{ROW - 2}"'
        tip = f"<title>{box.name}, tick {box.tick}</title>"
        yield f'<g>{tip}<rect {shape} fill-opacity="0"/></g>'


def png(table: Table, drawn: list[Box]) -> bytes:
    """Return the picture as PNG."""
    frame, found = Frame(table, drawn), io.BytesIO()
    _figure(frame).savefig(found, format="png", dpi=72 * zoom(frame))
    return found.getvalue()


def zoom(frame: Frame) -> int:
    """Return how many pixels a PNG has for one of the frame's."""
    return 2 if frame.width <= SHARP else 1


def _figure(frame: Frame) -> Any:
    """Return the picture, without pyplot: a point is a pixel, a box too narrow has no label."""
    from matplotlib.figure import Figure

    width, height = frame.width, frame.height
    figure = Figure((width / 72, height / 72), dpi=72, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    axes.text(LEFT, 21, frame.title, size=13, color=INK)
    for line in range(len(frame.lines)):
        for stage in range(frame.table.stages):
            _text(axes, LEFT - 8, frame.top(line, stage) + 12, f"stage {stage}", "right")
        _time(axes, frame, line)
    _boxes(axes, frame)
    _legend(axes, frame)
    return figure


def _boxes(axes: Any, frame: Frame) -> None:
    """Draw all boxes, those of one colour together, then the bars of later chunks."""
    alike: dict[Any, list[Any]] = {}
    bars = []
    for box in frame.drawn:
        left, right, top, bottom = edges = frame.edges(box)
        alike.setdefault(box.colour, []).append(_corners(*edges))
        bars.append(_bar(box.depth, left, right, bottom))
        if box.label and DIGIT * len(box.label) <= right - left:
            up = BAR - 1 if frame.table.chunks > 1 else 0
            _text(axes, (left + right) / 2, (top + bottom) / 2 - up, box.label)
    for colour, shapes in alike.items():
        _shapes(axes, shapes, colour)
    _shapes(axes, bars, BARS)


def _bar(depth: float, left: int, right: int, bottom: int) -> list[tuple[int, int]]:
    """Return the corners of the bar of a chunk, along the lower edge of a box."""
    return _corners(left, left + round(depth * (right - left)), bottom - BAR, bottom)


def _time(axes: Any, frame: Frame, line: int) -> None:
    """Draw the axis of time below the stages of a line."""
    begin, until = frame.lines[line]
    y, end = frame.top(line, frame.table.stages) + 4, LEFT + frame.scale * (until - begin)
    axes.plot([LEFT, end], [y, y], color=PALE, linewidth=1)
    for time in frame.ticks:
        if begin <= time <= until:
            x = LEFT + frame.scale * (time - begin)
            axes.plot([x, x], [y, y + 5], color=PALE, linewidth=1)
            _text(axes, x, y + 14, f"{time:g}")
    _text(axes, LEFT - 14, y + 14, "time", "right")


def _legend(axes: Any, frame: Frame) -> None:
    for x, y, words, kind, depth in frame.legend:
        if kind == NUMBER:
            _text(axes, x + 8, y + 9, "0")
        else:
            edge = PALE if kind == CHUNK else "none"
            shape = [_corners(x, x + 16, y, y + 17)]
            _shapes(axes, shape, COLOURS.get(kind, (255, 255, 255)))
            _shapes(axes, [_bar(depth, x, x + 16, y + 17)], BARS)
            axes.plot(*zip(*shape[0], shape[0][0], strict=True), color=edge, linewidth=0.7)
        _text(axes, x + 24, y + 9, words, "left")


def _corners(left: int, right: int, top: int, bottom: int) -> list[tuple[int, int]]:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _shapes(axes: Any, shapes: list[Any], colour: tuple[int, ...]) -> None:
    from matplotlib.collections import PolyCollection

    look: dict[str, Any] = {"facecolors": [_rgb(colour)], "linewidths": 0}
    axes.add_collection(PolyCollection(shapes, **look), autolim=False)


def _rgb(colour: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(part / 255 for part in colour)


def _text(axes: Any, x: float, y: float, text: str, align: str = "center", **more: Any) -> None:
    axes.text(x, y, text, ha=align, va="center_baseline", size=11, color=INK, **more)


def trace(table: Table, drawn: list[Box]) -> str:
    """Return the boxes as a Chrome trace: a line per stage, a unit of time as a millisecond."""
    event = lambda kind, stage, time, **more: dict(
        ph=kind, pid=0, tid=stage, ts=round(1000 * time), **more
    )
    events = [
        event("M", stage, 0, name="thread_name", args={"name": f"stage {stage}"})
        for stage in range(table.stages)
    ]
    for box in drawn:
        says = {
            "name": box.name,
            "cat": NAMES[box.kind],
            "args": {"tick": box.tick},
        }
        events.append(event("X", box.stage, box.start, dur=round(1000 * box.width), **says))
    for number, (sent, used) in enumerate(_messages(table, drawn)):
        arrow = {"name": "message", "cat": "message", "id": number}
        events.append(event("s", sent.stage, sent.start + 0.99 * sent.width, **arrow))
        events.append(event("f", used.stage, used.start, bp="e", **arrow))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _messages(table: Table, drawn: list[Box]) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes that make and use what goes from one stage to another."""
    found = {box.task: box for box in drawn if box.task}
    for task, box in found.items():
        for need, _ in needs(task, table.virtual):
            if need in found and found[need].stage != box.stage:
                yield found[need], box
