"""A schedule drawn to scale: SVG, PNG and a trace for Perfetto.

A box is a slot of a tick, as wide as the time it takes. Grey ones are masked: the stage computes,
as all stages do in a tick without branches, and what it computes is thrown away.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
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
ROW, LEFT, TOP = 26, 24, 8  # pixels: a stage, the room for its number, the room above
WIDEST = 20_000  # pixels
INK = "#282828"


@dataclass(frozen=True)
class Box:
    """One slot of one stage in one tick: what it does, when and for how long."""

    kind: str  # F, B, I (backward without weights), W; empty: masked
    stage: int
    tick: int
    start: float
    width: float
    task: Task | None
    depth: float  # 0 for the first chunk of a stage, towards 1 for the last

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
        return tuple(round(c + (255 - c) * 0.6 * self.depth) for c in COLOURS[self.kind])


def boxes(table: Table, forward: float, backward: float, weights: float) -> Iterator[Box]:
    """Yield every slot that takes time, as the executor runs them: in lockstep."""
    begins, widths = starts(table, forward, backward, weights)
    tasks = {(tick, stage, task.kind): task for task, tick, stage in table.tasks()}
    letters = "FIW" if table.split else "FBW"
    for tick, stage, slot in np.argwhere(widths > 0).tolist():
        task = tasks.get((tick, stage, KINDS[slot]))
        when = float(begins[tick, stage, slot]), float(widths[tick, stage, slot])
        depth = table.homes[task.virtual][1] / table.chunks if task else 0.0
        yield Box(letters[slot] if task else "", stage, tick, *when, task, depth)


def write(table: Table, path: Path, drawn: list[Box]) -> None:
    """Write the picture; the ending of the path, .svg or .png, says which kind."""
    if path.suffix == ".svg":
        path.write_text(svg(table, drawn), encoding="utf-8")
    elif path.suffix == ".png":
        write_png(table, path, drawn)
    else:
        raise ValueError(f"{path}: a picture is an .svg or a .png file.")


def _scale(drawn: list[Box]) -> float:
    """Return the pixels of a unit of time: room for the longest label in the narrowest box."""
    room = 8 + 8 * max(len(box.label) for box in drawn)
    end = max(box.start + box.width for box in drawn)
    return min(room / min(box.width for box in drawn), WIDEST / end)


def _size(table: Table, drawn: list[Box]) -> tuple[int, int]:
    end = max(box.start + box.width for box in drawn)
    return max(round(LEFT + _scale(drawn) * end) + TOP, 480), 2 * TOP + ROW * (table.stages + 1)


def svg(table: Table, drawn: list[Box]) -> str:
    """Return the picture as SVG; the tooltip of a box is its task and tick."""
    (width, height), scale = _size(table, drawn), _scale(drawn)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for stage in range(table.stages):
        lines.append(_svg_text(10, TOP + ROW * stage, str(stage)))
    for box in drawn:
        x, y, wide = LEFT + scale * box.start, TOP + ROW * box.stage, scale * box.width
        lines.append(f"<g><title>{box.name}, tick {box.tick}</title>")
        lines.append(_svg_box(x, y, wide, box.colour))
        lines.append(_svg_text(x + wide / 2, y, box.label) + "</g>")
    for place, kind in enumerate(_kinds(drawn)):
        x, y = LEFT + 110 * place, TOP + ROW * table.stages
        lines.append(_svg_box(x, y, 14, COLOURS[kind]) + _svg_text(x + 60, y, NAMES[kind]))
    return "\n".join([*lines, "</svg>\n"])


def _kinds(drawn: list[Box]) -> list[str]:
    found = {box.kind for box in drawn}
    return [kind for kind in NAMES if kind in found]


def _svg_box(x: float, y: float, width: float, colour: tuple[int, ...]) -> str:
    shape = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW - 2}"'
    return f'{shape} fill="rgb{colour}" stroke="white"/>'.replace(", ", ",")


def _svg_text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle">{text}</text>' if text else ""


def write_png(table: Table, path: Path, drawn: list[Box]) -> None:
    """Write the picture as PNG; a box that is too narrow for its label has none."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    width, height = _size(table, drawn)
    figure = Figure((width / 72, height / 72), dpi=72, facecolor="white")  # a point is a pixel
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
    axes.set_axis_off()
    _draw_boxes(axes, drawn)
    for stage in range(table.stages):
        _draw_text(axes, 10, TOP + ROW * stage, str(stage))
    for place, kind in enumerate(_kinds(drawn)):
        x, y = LEFT + 130 * place, TOP + ROW * table.stages
        _draw_shapes(axes, [_corners(x, x + 14, y)], [COLOURS[kind]])
        _draw_text(axes, x + 18, y, NAMES[kind], "left")
    FigureCanvasAgg(figure).print_png(path)


def _draw_boxes(axes: Any, drawn: list[Box]) -> None:
    scale, shapes = _scale(drawn), []
    for box in drawn:
        x, y = round(LEFT + scale * box.start), TOP + ROW * box.stage
        end = round(LEFT + scale * (box.start + box.width))
        shapes.append(_corners(x, max(end - 1, x + 1), y))
        if 8 * len(box.label) <= end - x:
            _draw_text(axes, (x + end) / 2, y, box.label)
    _draw_shapes(axes, shapes, [box.colour for box in drawn])


def _corners(left: int, right: int, top: int) -> list[tuple[int, int]]:
    bottom = top + ROW - 2
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _draw_shapes(axes: Any, shapes: list[Any], colours: list[tuple[int, ...]]) -> None:
    from matplotlib.collections import PolyCollection

    faces = np.array(colours) / 255
    axes.add_collection(PolyCollection(shapes, facecolors=faces, linewidths=0), autolim=False)


def _draw_text(axes: Any, x: float, top: int, text: str, align: str = "center") -> None:
    axes.text(x, top + 16, text, ha=align, size=11, color=INK)


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
