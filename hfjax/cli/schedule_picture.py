"""A schedule drawn to scale: SVG, PNG and a trace for Perfetto.

A box is a slot of a tick, as wide as the time it takes. Grey ones are masked: the stage computes,
as all stages do in a tick without branches, and what it computes is thrown away.
"""

import io
import json
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
HATCHES = ("", "/////", "....", "xxxxx", "-----", "|||||", "ooo", "+++++")  # of chunks, in turn
ROW, LEFT, RIGHT, TOP = 26, 62, 16, 34  # pixels: a stage, its name, the right margin, the title
AXIS, ENTRY, BOTTOM = 46, 22, 6  # pixels below the stages: the time, a line of the legend, margin
DIGIT, LETTER = 6.5, 6.2  # pixels of a character, of a label and of other text
LEAST, WIDEST = 560, 20_000  # pixels
SHARP = 5_000  # pixels: up to here a PNG has twice as many
INK, PALE = "#282828", "#8a8a8a"
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
    depth: float  # 0 for the first chunk, towards 1 for the last

    @property
    def label(self) -> str:
        """The microbatch."""
        return str(self.task.microbatch) if self.task else ""

    @property
    def name(self) -> str:
        """The task as the grid has it (a backward whose weights are apart is an I), or `masked`."""
        return str(self.task._replace(kind=self.kind)) if self.task else "masked"

    @property
    def hatch(self) -> str:
        """What tells the chunk without colour; nothing for the first."""
        return HATCHES[self.chunk % len(HATCHES)]

    @property
    def colour(self) -> tuple[int, ...]:
        """The colour of the kind, paler for later chunks."""
        return tuple(round(c + (255 - c) * 0.6 * self.depth) for c in COLOURS[self.kind])


def boxes(table: Table, forward: float, backward: float, weights: float) -> Iterator[Box]:
    """Yield every slot that takes time, as the executor runs them: in lockstep."""
    begins, widths = starts(table, forward, backward, weights)
    tasks = {(tick, stage, task.kind): task for task, tick, stage in table.tasks()}
    letters = "FIW" if table.split else "FBW"
    for tick, stage, slot in np.argwhere(widths > 0).tolist():
        task = tasks.get((tick, stage, KINDS[slot]))
        when = float(begins[tick, stage, slot]), float(widths[tick, stage, slot])
        chunk = table.homes[task.virtual][1] if task else 0
        place = chunk, chunk / table.chunks
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
        room = 4 + DIGIT * max(len(box.label) for box in self.drawn)
        scale = min(room / min(box.width for box in self.drawn), WIDEST / self.end)
        least = max(LEAST, LEFT + 1.3 * LETTER * len(self.title))
        return max(scale, (least - LEFT - RIGHT) / self.end)

    @cached_property
    def width(self) -> int:
        """Of the picture."""
        return round(LEFT + self.scale * self.end) + RIGHT

    @cached_property
    def bottom(self) -> int:
        """The lower edge of the last stage."""
        return TOP + ROW * self.table.stages

    @cached_property
    def height(self) -> int:
        """Of the picture."""
        return 1 + ENTRY + max(y for _, y, *_ in self.legend) + BOTTOM

    def edges(self, box: Box) -> tuple[int, int, int, int]:
        """Return left, right, top and bottom of a box; a pixel is free beside the next one."""
        left, right = (round(LEFT + self.scale * t) for t in (box.start, box.start + box.width))
        top = TOP + ROW * box.stage
        return left, max(right - 1, left + 1), top, top + ROW - 2

    @cached_property
    def ticks(self) -> list[float]:
        """The times that are written below: round numbers with room between them."""
        powers = (m * 10.0**e for e in range(-3, 9) for m in (1, 2, 5))
        step = next(step for step in powers if step * self.scale >= 60)
        return [step * n for n in range(int(self.end / step + 1e-9) + 1)]

    @cached_property
    def legend(self) -> list[tuple[int, int, str, str, str]]:
        """The legend, lines as long as fit: where, what is said, the kind and the hatch shown."""
        found = {box.kind for box in self.drawn}
        said = [(_words(kind), kind, "") for kind in NAMES if kind in found]
        if self.table.chunks > 1:
            for chunk in range(self.table.chunks):
                said.append((f"chunk {chunk}", CHUNK, HATCHES[chunk % len(HATCHES)]))
        said.append(("number: the microbatch", NUMBER, ""))
        x, y, placed = LEFT, self.bottom + AXIS, []
        for words, kind, hatch in said:
            wide = round(24 + LETTER * len(words) + 14)
            if x > LEFT and x + wide > self.width:
                x, y = LEFT, y + ENTRY
            placed.append((x, y, words, kind, hatch))
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
        x, wide = LEFT + frame.scale * box.start, frame.scale * box.width
        shape = f'x="{x:.1f}" y="{TOP + ROW * box.stage}" width="{wide:.1f}" height="{ROW - 2}"'
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
    axes.text(LEFT, 21, frame.title, size=12, color=INK)
    for stage in range(frame.table.stages):
        _text(axes, LEFT - 8, TOP + ROW * stage + 12, f"stage {stage}", "right")
    _boxes(axes, frame)
    _time(axes, frame)
    _legend(axes, frame)
    return figure


def _boxes(axes: Any, frame: Frame) -> None:
    """Draw all boxes, those of one colour and hatch together."""
    alike: dict[tuple[Any, str], list[Any]] = {}
    for box in frame.drawn:
        left, right, top, bottom = edges = frame.edges(box)
        alike.setdefault((box.colour, box.hatch), []).append(_corners(*edges))
        if box.label and DIGIT * len(box.label) <= right - left:
            behind = {"facecolor": _rgb(box.colour), "edgecolor": "none", "pad": 0.6}
            place = (left + right) / 2, (top + bottom) / 2
            _text(axes, *place, box.label, bbox=behind if box.hatch else None)
    for (colour, hatch), shapes in alike.items():
        _shapes(axes, shapes, colour, hatch)


def _time(axes: Any, frame: Frame) -> None:
    """Draw the axis of time below the stages."""
    y, end = frame.bottom + 4, LEFT + frame.scale * frame.end
    axes.plot([LEFT, end], [y, y], color=PALE, linewidth=1)
    for time in frame.ticks:
        x = LEFT + frame.scale * time
        axes.plot([x, x], [y, y + 5], color=PALE, linewidth=1)
        _text(axes, x, y + 14, f"{time:g}")
    _text(axes, LEFT - 8, y + 14, "time", "right")


def _legend(axes: Any, frame: Frame) -> None:
    for x, y, words, kind, hatch in frame.legend:
        if kind == NUMBER:
            _text(axes, x + 8, y + 9, "0")
        else:
            edge = PALE if kind == CHUNK else "none"
            shape = [_corners(x, x + 16, y, y + 17)]
            _shapes(axes, shape, COLOURS.get(kind, (255, 255, 255)), hatch)
            axes.plot(*zip(*shape[0], shape[0][0], strict=True), color=edge, linewidth=0.7)
        _text(axes, x + 24, y + 9, words, "left")


def _corners(left: int, right: int, top: int, bottom: int) -> list[tuple[int, int]]:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _shapes(axes: Any, shapes: list[Any], colour: tuple[int, ...], hatch: str) -> None:
    from matplotlib.collections import PolyCollection

    look: dict[str, Any] = {"facecolors": [_rgb(colour)], "linewidths": 0}
    if hatch:
        look |= {"hatch": hatch, "edgecolors": [(0, 0, 0, 0.35)]}
    axes.add_collection(PolyCollection(shapes, **look), autolim=False)


def _rgb(colour: tuple[int, ...]) -> tuple[float, ...]:
    return tuple(part / 255 for part in colour)


def _text(axes: Any, x: float, y: float, text: str, align: str = "center", **more: Any) -> None:
    axes.text(x, y, text, ha=align, va="center_baseline", size=10, color=INK, **more)


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
