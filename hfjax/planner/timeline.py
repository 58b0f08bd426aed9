"""One step of a row of a plan, drawn to scale as SVG: what computes, what waits, what is sent.

Of a pipeline the slots of every stage; else the microbatches of one device, with the transfers
below them: pale where products run beside, solid where nothing does. The legend adds up to the
step as it is predicted.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from xml.sax.saxutils import escape

import numpy as np

from hfjax.parallel.schedules.cost import cost, starts
from hfjax.parallel.schedules.table import KINDS
from hfjax.planner.make_plan import PlanRow, StepPlan
from hfjax.planner.sent import NEW, SUMS, sent_by
from hfjax.planner.step_time import seconds_of

WIDTH, LEFT, RIGHT = 900, 90, 24  # pixels: the picture, names of lines, margin
LINE, GAP, TOP, ENTRY = 26, 6, 66, 20  # a line, between lines, above the first, of the legend
LETTER = 6.6  # pixels of a character of 12
DRAWN, MANY = 3, 8  # microbatches drawn one by one where there are more than so many
INK, PALE, WAITS = "#282828", "#8a8a8a", "#e6e6e6"
HEAD = "embedding, head, loss"
COLOURS = {
    "forward": "#8db4e8",
    "backward": "#86c98f",
    "weights": "#f2bc6b",
    HEAD: "#b7a5dd",
    "waiting": WAITS,
    "optimizer": "#d9b48f",
    "host": "#9aa7b5",
}
OF_TRANSFERS = ("#d9534f", "#c9547f", "#b0602c", "#a04a9c", "#7a5230", "#e08a3c", "#8c3b3b")
OTHERS = "microbatches more"
STEP = "the step"


@dataclass(frozen=True)
class Span:
    """A box: on which line, from when, for how many seconds."""

    name: str
    line: int
    start: float
    seconds: float
    label: str = ""
    pale: bool = False


def timeline(plan: StepPlan, row: PlanRow | None = None) -> str:
    """Return one step of a row of a plan as SVG; None: of the first.

    Args:
        plan: The plan.
        row: One of its rows, or any candidate with its time.

    Example:
        >>> from hfjax.planner.make_plan import make_plan
        >>> from hfjax.planner.timeline import timeline
        >>> svg = timeline(make_plan(config))  # doctest: +SKIP
    """
    return _Picture(plan, row or plan.best).svg()


class _Picture:
    """One step, laid out."""

    def __init__(self, plan: StepPlan, row: PlanRow) -> None:
        self.plan, self.row, self.c = plan, row, row.candidate
        self.time: Any = row.time
        self.total = self.time.total

    # -- how long what takes --------------------------------------------------------------

    @cached_property
    def _work(self) -> tuple[float, float, float]:
        """Seconds of one microbatch: forward, backward, and around the layers."""
        scorer, c = self.plan.scorer, self.c
        layers = scorer.stage_layers(c) if scorer.layers else 0
        seconds = lambda part: scorer.work(c, part).total
        forward, backward = (
            seconds(p) * layers if layers else 0.0 for p in ("forward", "backward")
        )
        return forward, backward, seconds("ends")

    @cached_property
    def _count(self) -> int:
        return self.c.microbatches or self.c.accumulate

    @cached_property
    def _scaled(self) -> tuple[float, float, float]:
        """The same, such that they add up to what the step is predicted to compute and to wait."""
        forward, backward, ends = self._work
        whole = self.time.products + self.time.memory + self.time.bubble
        if self.c.pipeline is not None:
            around = min(ends * self._count, whole)
            table = self.plan.scorer.piped(self.c).table
            scale = (whole - around) / cost(table, forward, backward, backward / 2)
            return scale * forward, scale * backward, around / self._count
        scale = whole / (self._count * (forward + backward + ends))
        return scale * forward, scale * backward, scale * ends

    @property
    def _home_of_head(self) -> int:
        """The stage that runs the head; in lockstep the others wait for it."""
        table = self.plan.scorer.piped(self.c).table
        return table.homes[table.virtual - 1][0]

    @cached_property
    def _beside(self) -> dict[tuple[str, bool], float]:
        """Seconds of transfers beside which products run, by purpose and direction."""
        scorer, c = self.plan.scorer, self.c
        found: dict[tuple[str, bool], float] = {}
        whole: dict[str, float] = {}
        for one in sent_by(c, scorer.traffic(c, scorer.placing(c))):
            taken = seconds_of(one, c.mesh, self.plan.machine)
            key = one.purpose, one.backward
            found[key] = found.get(key, 0.0) + taken
            whole[one.purpose] = whole.get(one.purpose, 0.0) + taken
        part = {name: 1 - self.time.exposed.get(name, 0.0) / s for name, s in whole.items() if s}
        left = {key: s * part.get(key[0], 0.0) for key, s in found.items()}
        return {key: s for key, s in left.items() if s > 1e-9 * self.total}

    @cached_property
    def hidden(self) -> dict[str, float]:
        """Seconds of transfers beside which products run, by purpose."""
        found: dict[str, float] = {}
        for (name, _), seconds in self._beside.items():
            found[name] = found.get(name, 0.0) + seconds
        return found

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Seconds of transfers beside which nothing runs, by purpose: new parameters come last."""
        found = sorted(self.time.exposed.items(), key=lambda pair: pair[0] == NEW)
        return {name: s for name, s in found if s > 1e-9 * self.total}

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds by what a device does: together the step."""
        forward, backward, ends = self._scaled
        n, weights = self._count, 0.0
        found = {"forward": n * forward}
        if self.c.pipeline is not None:
            table = self.plan.scorer.piped(self.c).table
            weights = n * backward / 2 if table.split else 0.0
        found |= {"backward": n * backward - weights, "weights": weights}
        found[HEAD] = n * ends
        if self.c.pipeline is not None:
            spent = self.time.products + self.time.memory + self.time.bubble
            found["waiting"] = spent - sum(found.values())
        found |= {f"exposed: {name}": s for name, s in self.exposed.items()}
        found |= {"optimizer": self.time.optimizer, "host": self.time.host}
        return {name: s for name, s in found.items() if s > 1e-9 * self.total}

    # -- where it lies ----------------------------------------------------------------------

    @cached_property
    def lines(self) -> list[str]:
        """The names of the lines."""
        if self.c.pipeline is not None:
            return [f"stage {n}" for n in range(self.c.side("pipe"))] + ["transfers"]
        return ["computes", "transfers"]

    @cached_property
    def spans(self) -> list[Span]:
        """Every box."""
        return list(self._staged() if self.c.pipeline is not None else self._plain())

    def _at_end(self) -> set[str]:
        """Return the purposes of what is sent once a step, after all microbatches."""
        return {NEW} | ({SUMS} if self.c.zero != "fsdp" else set())

    def _plain(self) -> Iterator[Span]:
        forward, backward, ends = self._scaled
        last = {k: s for k, s in self.exposed.items() if k in self._at_end()}
        each = {k: s / self._count for k, s in self.exposed.items() if k not in last}
        length = forward + ends + backward + sum(each.values())
        alone = self._count if self._count <= MANY else DRAWN
        for n in range(alone):
            yield from self._microbatch(n * length, each, n == self._count - 1)
        if rest := self._count - alone:
            begin, label = alone * length, f"… x {rest} {OTHERS}"
            yield Span(OTHERS, 0, begin, rest * length, label)
            sent = {name: rest * seconds for name, seconds in each.items()}
            yield from self._in_turn(sent, 1, (alone + rest) * length - sum(sent.values()))
            yield from self._hidden(begin, rest * (forward + backward), rest, None, True)
        yield from self._after(self._count * length, last)

    def _microbatch(self, at: float, each: dict[str, float], is_last: bool) -> Iterator[Span]:
        """Yield what one microbatch computes, what runs beside that, and what nothing hides."""
        forward, backward, ends = self._scaled
        yield Span("forward", 0, at, forward, "forward")
        yield from self._hidden(at, forward + ends, 1, False, is_last)
        yield Span(HEAD, 0, at + forward, ends, "head")
        at += forward + ends
        yield Span("backward", 0, at, backward, "backward")
        yield from self._hidden(at, backward, 1, True, is_last)
        yield from self._in_turn(each, 1, at + backward)

    def _in_turn(
        self, sent: dict[str, float], line: int, at: float, pale: bool = False
    ) -> Iterator[Span]:
        """Yield transfers one after another."""
        for name, seconds in sent.items():
            yield Span(f"exposed: {name}", line, at, seconds, name, pale)
            at += seconds

    def _hidden(
        self, at: float, room: float, times: int, backward: bool | None, is_last: bool
    ) -> Iterator[Span]:
        """Yield what runs beside the products of so many microbatches: pale, as far as it fits.

        `backward` says in which direction, None: in both.
        """
        found: dict[str, float] = {}
        for (name, back), seconds in self._beside.items():
            once = name in self._at_end()
            if backward in (None, back) and (is_last or not once):
                part = seconds if once else seconds * times / self._count
                found[name] = found.get(name, 0.0) + part
        whole = sum(found.values())
        scale = min(1.0, room / whole) if whole else 1.0
        yield from self._in_turn({k: scale * s for k, s in found.items()}, 1, at, pale=True)

    def _after(self, at: float, last: dict[str, float]) -> Iterator[Span]:
        """Yield what follows the microbatches: transfers, the optimizer, the host."""
        yield from self._in_turn(last, len(self.lines) - 1, at)
        at += sum(last.values())
        for name in ("optimizer", "host"):
            seconds = getattr(self.time, name)
            for line in range(len(self.lines) - 1):
                yield Span(name, line, at, seconds, name)
            at += seconds

    def _staged(self) -> Iterator[Span]:
        forward, backward, ends = self._scaled
        table = self.plan.scorer.piped(self.c).table
        begins, widths = starts(table, forward, backward, backward / 2)
        names = {"F": "forward", "B": "backward", "W": "weights"}
        end = cost(table, forward, backward, backward / 2)
        for tick, stage, slot in np.argwhere((widths > 0) & (table.cells >= 0)).tolist():
            cell = int(table.cells[tick, stage, slot])
            begin, wide = float(begins[tick, stage, slot]), float(widths[tick, stage, slot])
            yield Span(names[KINDS[slot]], stage, begin, wide, str(cell // table.virtual))
        around = self._count * ends
        yield Span(HEAD, self._home_of_head, end, around, "head")
        yield from self._in_turn(self.hidden, table.stages, 0.0, pale=True)
        at = end + around
        yield from self._in_turn(self.exposed, table.stages, at)
        yield from self._after(at + sum(self.exposed.values()), {})

    # -- what is written --------------------------------------------------------------------

    def svg(self) -> str:
        """Return the picture."""
        legend = self._legend()
        bottom = TOP + len(self.lines) * (LINE + GAP)
        height = bottom + 50 + ENTRY * len(legend) + 16
        whole = f'width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        style = 'font-family="sans-serif" font-size="12"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {whole} {style}>',
            f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
            *self._title(),
            *self._lines(),
            *self._boxes(),
            *self._axis(bottom),
            *self._entries(legend, bottom + 50),
            "</svg>",
        ]
        return "\n".join(parts) + "\n"

    @cached_property
    def scale(self) -> float:
        """Pixels of a second."""
        return (WIDTH - LEFT - RIGHT) / self.total

    def _colour(self, name: str) -> str:
        if name in COLOURS:
            return COLOURS[name]
        if name == OTHERS:
            return "url(#more)"
        purposes = [*dict.fromkeys([*self.exposed, *self.hidden])]
        return OF_TRANSFERS[purposes.index(name.removeprefix("exposed: ")) % len(OF_TRANSFERS)]

    def _title(self) -> Iterator[str]:
        name = self.plan.scorer.one.task.model.name
        where = f"{name} on {self.plan.count} x {self.plan.machine.name}"
        yield _text(LEFT, 24, f"{where}: one step, {_ms(self.total)} predicted", size=15)
        yield _text(LEFT, 45, str(self.c), fill=PALE)
        yield (
            '<defs><pattern id="more" width="8" height="8" patternUnits="userSpaceOnUse" '
            'patternTransform="rotate(45)"><rect width="8" height="8" fill="#b4d3c9"/>'
            '<rect width="3" height="8" fill="#9cc1d8"/></pattern></defs>'
        )

    def _lines(self) -> Iterator[str]:
        staged = self.c.pipeline is not None
        for n, name in enumerate(self.lines):
            y = TOP + n * (LINE + GAP)
            yield _text(LEFT - 10, y + 17, name, anchor="end")
            if staged and n < len(self.lines) - 1:
                wide = self.scale * (self.time.products + self.time.memory + self.time.bubble)
                shape = f'x="{LEFT}" y="{y}" width="{wide:.2f}" height="{LINE}"'
                yield f'<rect {shape} fill="{WAITS}"/>'

    def _boxes(self) -> Iterator[str]:
        """Yield all boxes: those of one look are one path."""
        paths: dict[tuple[str, bool], list[str]] = {}
        labels = []
        for s in self.spans:
            x, wide = LEFT + self.scale * s.start, self.scale * s.seconds
            y = TOP + s.line * (LINE + GAP)
            wide = wide - 0.6 if wide > 3 else wide  # an edge to see
            path = f"M{x:.2f} {y}h{wide:.2f}v{LINE}h{-wide:.2f}z"
            paths.setdefault((self._colour(s.name), s.pale), []).append(path)
            if s.label and LETTER * len(s.label) + 4 <= wide:
                labels.append(_text(x + wide / 2, y + 17, s.label, anchor="middle"))
        for (colour, pale), found in paths.items():
            opacity = ' fill-opacity="0.3"' if pale else ""
            yield f'<path fill="{colour}"{opacity} d="{"".join(found)}"/>'
        yield from labels

    def _axis(self, bottom: int) -> Iterator[str]:
        end = WIDTH - RIGHT
        yield f'<path stroke="{PALE}" fill="none" d="M{LEFT} {bottom + 4}H{end}"/>'
        powers = (m * 10.0**e for e in range(-7, 5) for m in (1, 2, 5))
        step = next(step for step in powers if step * self.scale >= 90)
        for n in range(int(self.total / step + 1e-9) + 1):
            x = LEFT + n * step * self.scale
            yield f'<path stroke="{PALE}" d="M{x:.1f} {bottom + 4}v5"/>'
            yield _text(x, bottom + 23, _ms(n * step), anchor="middle", fill=PALE)

    def _legend(self) -> list[tuple[str, str, float, bool]]:
        """Return name, colour, seconds, and whether it runs beside what computes."""
        more = ""
        if self.c.pipeline is not None:
            more = f" (stage {self._home_of_head}; the others wait)"
        found = [
            (name + more * (name == HEAD), self._colour(name), s, False)
            for name, s in self.parts.items()
        ]
        beside = [
            (f"hidden: {name}", self._colour(f"exposed: {name}"), s, True)
            for name, s in self.hidden.items()
        ]
        return [*found, (STEP, "none", sum(self.parts.values()), False), *beside]

    def _entries(self, legend: list[tuple[str, str, float, bool]], y: int) -> Iterator[str]:
        right = LEFT + 24 + LETTER * max(len(name) for name, *_ in legend) + 110
        for n, (name, colour, seconds, pale) in enumerate(legend):
            top = y + n * ENTRY
            opacity = ' fill-opacity="0.3"' if pale else ""
            yield f'<rect x="{LEFT}" y="{top}" width="16" height="14" fill="{colour}"{opacity}/>'
            yield _text(LEFT + 24, top + 12, name)
            yield _text(right, top + 12, f"{1000 * seconds:,.2f} ms", anchor="end")
            yield _text(right + 70, top + 12, f"{seconds / self.total:.1%}", anchor="end")


def _ms(seconds: float) -> str:
    """Return milliseconds as a label has them."""
    ms = 1000 * seconds
    return f"{ms:,.0f} ms" if ms >= 1000 else f"{ms:.4g} ms"


def _text(
    x: float, y: float, text: str, *, anchor: str = "", size: int = 0, fill: str = INK
) -> str:
    more = f' text-anchor="{anchor}"' if anchor else ""
    more += f' font-size="{size}"' if size else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{fill}"{more}>{escape(text)}</text>'
