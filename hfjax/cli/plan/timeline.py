"""One step of a row of a plan, to scale: what computes, what waits, what is sent.

Of a pipeline the slots of every stage; else the microbatches of one device, with the transfers
below them: pale where products run beside, solid where nothing does. The legend adds up to the
step as it is predicted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from hfjax.cli.draw_timeline import Span, Timeline
from hfjax.parallel.schedules.cost import cost, starts
from hfjax.parallel.schedules.table import KINDS
from hfjax.planner.comm_model import NEW, SUMS
from hfjax.planner.make_plan import PlanRow, StepPlan

DRAWN, MANY = 3, 8  # microbatches drawn one by one where there are more than so many
PALE = 0.3  # how dark transfers are beside which products run
HEAD = "embedding, head, loss"
OTHERS = "microbatches more"
COLOURS = {
    "forward": "#8db4e8",
    "backward": "#86c98f",
    "weights": "#f2bc6b",
    HEAD: "#b7a5dd",
    "waiting": "#e6e6e6",
    "optimizer": "#d9b48f",
    "host": "#9aa7b5",
    OTHERS: "#b4d3c9",
}
OF_TRANSFERS = ("#d9534f", "#c9547f", "#b0602c", "#a04a9c", "#7a5230", "#e08a3c", "#8c3b3b")


def timeline(plan: StepPlan, row: PlanRow | None = None) -> Timeline:
    """Return one step of a row of a plan, to be drawn; None: of the first."""
    step = _Step(plan, row or plan.best)
    ms = lambda span: replace(span, start=1000 * span.start, width=1000 * span.width)
    of = f"{plan.scorer.one.task.model.name} on {plan.count} x {plan.machine.name}"
    purposes = dict.fromkeys([*step.exposed, *step.hidden])
    colours = COLOURS | {
        name: OF_TRANSFERS[n % len(OF_TRANSFERS)] for n, name in enumerate(purposes)
    }
    entry = lambda name, seconds: f"{name}: {1e3 * seconds:,.2f} ms, {seconds / step.total:.1%}"
    whole = ("the step", sum(step.parts.values()))
    legend = [
        *(
            (entry(*part), colours[part[0].removeprefix("exposed: ")], 1.0)
            for part in step.parts.items()
        ),
        (entry(*whole), "none", 1.0),
        *((entry(f"hidden: {name}", s), colours[name], PALE) for name, s in step.hidden.items()),
    ]
    return Timeline(
        f"{of}: one step, {1e3 * step.total:,.4g} ms predicted\n{step.c}",
        [*step.stages, "transfers"],
        [ms(span) for span in step.spans() if span.width > 0],
        colours,
        legend,
        "ms",
    )


class _Step:
    """One step, laid out."""

    def __init__(self, plan: StepPlan, row: PlanRow) -> None:
        self.plan, self.c, self.time, self.total = plan, row.candidate, row.time, row.time.total
        self.table = plan.scorer.piped(self.c).table if self.c.pipeline is not None else None
        self.stages = [f"stage {n}" for n in range(self.c.side("pipe"))]
        self.stages = self.stages if self.table is not None else ["computes"]
        self.count = self.c.microbatches or self.c.accumulate
        self.spent = row.time.products + row.time.memory + row.time.bubble
        # What is sent once a step, after all microbatches.
        self.once = {NEW} | ({SUMS} if self.c.zero != "fsdp" else set())

    # -- how long what takes --------------------------------------------------------------

    @cached_property
    def each(self) -> tuple[float, float, float]:
        """Seconds of one microbatch: forward, backward, and around the layers.

        They add up to what the step is predicted to compute and to wait.
        """
        scorer, c = self.plan.scorer, self.c
        layers = scorer.stage_layers(c) if scorer.layers else 0
        seconds = lambda part, times: scorer.work(c, part).total * times if times else 0.0
        forward, backward = seconds("forward", layers), seconds("backward", layers)
        ends = seconds("ends", 1)
        if self.table is not None:
            around = min(ends * self.count, self.spent)
            scale = (self.spent - around) / cost(self.table, forward, backward, backward / 2)
            return scale * forward, scale * backward, around / self.count
        scale = self.spent / (self.count * (forward + backward + ends))
        return scale * forward, scale * backward, scale * ends

    @cached_property
    def _beside(self) -> dict[tuple[str, bool], float]:
        """Seconds of transfers beside which products run, by purpose and direction."""
        scorer, c = self.plan.scorer, self.c
        found: dict[tuple[str, bool], float] = {}
        whole: dict[str, float] = {}
        for one, taken in scorer.transfers(c, scorer.placing(c)):
            key = one.purpose, one.backward
            found[key] = found.get(key, 0.0) + taken
            whole[one.purpose] = whole.get(one.purpose, 0.0) + taken
        part = {name: 1 - self.time.exposed.get(name, 0.0) / s for name, s in whole.items() if s}
        left = {key: s * part.get(key[0], 0.0) for key, s in found.items()}
        return {key: s for key, s in left.items() if s > 1e-9 * self.total}

    @cached_property
    def hidden(self) -> dict[str, float]:
        """Seconds of transfers beside which products run, by purpose."""
        beside = self._beside
        names = dict.fromkeys(name for name, _ in beside)
        return {name: sum(s for key, s in beside.items() if key[0] == name) for name in names}

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Seconds of transfers beside which nothing runs, by purpose: new parameters come last."""
        found = sorted(self.time.exposed.items(), key=lambda pair: pair[0] == NEW)
        return {name: s for name, s in found if s > 1e-9 * self.total}

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds by what a device does: together the step."""
        forward, backward, ends = (self.count * seconds for seconds in self.each)
        weights = backward / 2 if self.table is not None and self.table.split else 0.0
        found = {"forward": forward, "backward": backward - weights, "weights": weights, HEAD: ends}
        if self.table is not None:
            found["waiting"] = self.spent - sum(found.values())
        found |= {f"exposed: {name}": s for name, s in self.exposed.items()}
        found |= {"optimizer": self.time.optimizer, "host": self.time.host}
        return {name: s for name, s in found.items() if s > 1e-9 * self.total}

    # -- where it lies ----------------------------------------------------------------------

    def spans(self) -> Iterator[Span]:
        """Yield every box."""
        yield from self._plain() if self.table is None else self._staged()

    def _plain(self) -> Iterator[Span]:
        forward, backward, ends = self.each
        last = {k: s for k, s in self.exposed.items() if k in self.once}
        each = {k: s / self.count for k, s in self.exposed.items() if k not in last}
        length = forward + ends + backward + sum(each.values())
        alone = self.count if self.count <= MANY else DRAWN
        for n in range(alone):
            yield from self._microbatch(n * length, each, n == self.count - 1)
        if rest := self.count - alone:
            begin, label = alone * length, f"… x {rest} {OTHERS}"
            yield Span(OTHERS, 0, begin, rest * length, label)
            sent = {name: rest * seconds for name, seconds in each.items()}
            yield from self._sent(sent, (alone + rest) * length - sum(sent.values()))
            yield from self._hidden(begin, rest * (forward + backward), rest, None, True)
        yield from self._after(self.count * length, last)

    def _microbatch(self, at: float, each: Mapping[str, float], is_last: bool) -> Iterator[Span]:
        """Yield what one microbatch computes, what runs beside that, and what nothing hides."""
        forward, backward, ends = self.each
        yield Span("forward", 0, at, forward, "forward")
        yield from self._hidden(at, forward + ends, 1, False, is_last)
        yield Span(HEAD, 0, at + forward, ends, "head")
        at += forward + ends
        yield Span("backward", 0, at, backward, "backward")
        yield from self._hidden(at, backward, 1, True, is_last)
        yield from self._sent(each, at + backward)

    def _sent(self, sent: Mapping[str, float], at: float, alpha: float = 1.0) -> Iterator[Span]:
        """Yield transfers one after another."""
        for name, seconds in sent.items():
            yield Span(name, len(self.stages), at, seconds, name, alpha=alpha)
            at += seconds

    def _hidden(
        self, at: float, room: float, times: int, backward: bool | None, is_last: bool
    ) -> Iterator[Span]:
        """Yield what runs beside the products of so many microbatches: pale, as far as it fits.

        `backward` says in which direction, None: in both.
        """
        found: dict[str, float] = {}
        for (name, back), seconds in self._beside.items():
            once = name in self.once
            if backward in (None, back) and (is_last or not once):
                part = seconds if once else seconds * times / self.count
                found[name] = found.get(name, 0.0) + part
        whole = sum(found.values())
        scale = min(1.0, room / whole) if whole else 1.0
        yield from self._sent({k: scale * s for k, s in found.items()}, at, PALE)

    def _after(self, at: float, last: Mapping[str, float]) -> Iterator[Span]:
        """Yield what follows the microbatches: transfers, the optimizer, the host."""
        yield from self._sent(last, at)
        at += sum(last.values())
        for name in ("optimizer", "host"):
            seconds = getattr(self.time, name)
            yield from (Span(name, n, at, seconds, name) for n in range(len(self.stages)))
            at += seconds

    def _staged(self) -> Iterator[Span]:
        forward, backward, ends = self.each
        table, names = self.table, {"F": "forward", "B": "backward", "W": "weights"}
        assert table is not None
        begins, widths = starts(table, forward, backward, backward / 2)
        yield from (Span("waiting", stage, 0, self.spent) for stage in range(table.stages))
        for tick, stage, slot in np.argwhere((widths > 0) & (table.cells >= 0)).tolist():
            number = str(int(table.cells[tick, stage, slot]) // table.virtual)
            begin, wide = float(begins[tick, stage, slot]), float(widths[tick, stage, slot])
            yield Span(names[KINDS[slot]], stage, begin, wide, number)
        end, around = cost(table, forward, backward, backward / 2), self.count * ends
        # In lockstep the others wait for the stage that runs the head.
        yield Span(HEAD, table.homes[table.virtual - 1][0], end, around, "head")
        yield from self._sent(self.hidden, 0.0, PALE)
        yield from self._after(end + around, self.exposed)
