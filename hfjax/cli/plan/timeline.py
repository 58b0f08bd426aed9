"""One step of an entry of a plan, to scale: what computes, what waits, what is sent.

For a pipeline it shows the slots of every stage; else the microbatches of one device, with the
transfers below them: pale where matmuls hide them, solid where they are exposed. The legend adds
up to the predicted step time.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property

import numpy as np

from hfjax.cli.draw_timeline import Span, Timeline
from hfjax.parallel.schedules.cost import cost, start_times
from hfjax.parallel.schedules.table import KINDS
from hfjax.planner.comm_model import NEW_PARAMS, SUMS
from hfjax.planner.make_plan import PlanEntry, StepPlan

DRAWN, MANY = 3, 8  # microbatches drawn one by one if there are more than MANY
PALE = 0.3  # opacity of hidden transfers
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


def timeline(plan: StepPlan, plan_entry: PlanEntry | None = None) -> Timeline:
    """Return the timeline of one step of an entry of a plan; None: of the best."""
    step = _Step(plan, plan_entry or plan.best)
    ms = lambda span: replace(span, start=1000 * span.start, width=1000 * span.width)
    title = f"{plan.scorer.base_run.task.model.name} on {plan.count} x {plan.machine.name}"
    purposes = dict.fromkeys([*step.exposed, *step.hidden])
    colours = COLOURS | {
        name: OF_TRANSFERS[n % len(OF_TRANSFERS)] for n, name in enumerate(purposes)
    }
    entry = lambda name, seconds: f"{name}: {1e3 * seconds:,.2f} ms, {seconds / step.total:.1%}"
    total = ("the step", sum(step.parts.values()))
    legend = [
        *(
            (entry(*item), colours[item[0].removeprefix("exposed: ")], 1.0)
            for item in step.parts.items()
        ),
        (entry(*total), "none", 1.0),
        *((entry(f"hidden: {name}", s), colours[name], PALE) for name, s in step.hidden.items()),
    ]
    return Timeline(
        f"{title}: one step, {1e3 * step.total:,.4g} ms predicted\n{step.c}",
        [*step.stages, "transfers"],
        [ms(span) for span in step.spans() if span.width > 0],
        colours,
        legend,
        "ms",
    )


class _Step:
    """One step, laid out in time."""

    def __init__(self, plan: StepPlan, entry: PlanEntry) -> None:
        self.plan, self.c, self.time, self.total = (
            plan,
            entry.candidate,
            entry.time,
            entry.time.total,
        )
        self.table = (
            plan.scorer.pipeline_profile(self.c).table if self.c.pipeline is not None else None
        )
        self.stages = [f"stage {n}" for n in range(self.c.axis_size("pipe"))]
        self.stages = self.stages if self.table is not None else ["computes"]
        self.count = self.c.microbatches or self.c.gradient_accumulation_steps
        self.spent = entry.time.products + entry.time.memory + entry.time.bubble
        # Purposes of transfers once a step, after all microbatches.
        self.once = {NEW_PARAMS} | ({SUMS} if self.c.zero != "fsdp" else set())

    # -- durations ------------------------------------------------------------------------

    @cached_property
    def microbatch_seconds(self) -> tuple[float, float, float]:
        """Seconds of one microbatch: forward, backward, and embedding and head.

        They add up to the predicted time of computing and waiting in a step.
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
    def _hidden_seconds(self) -> dict[tuple[str, bool], float]:
        """Seconds of hidden transfers, by purpose and direction."""
        scorer, c = self.plan.scorer, self.c
        totals: dict[tuple[str, bool], float] = {}
        by_purpose: dict[str, float] = {}
        for comm, seconds in scorer.transfers(c, scorer.placements(c)):
            key = comm.purpose, comm.backward
            totals[key] = totals.get(key, 0.0) + seconds
            by_purpose[comm.purpose] = by_purpose.get(comm.purpose, 0.0) + seconds
        hidden_fraction = {
            name: 1 - self.time.exposed.get(name, 0.0) / s for name, s in by_purpose.items() if s
        }
        left = {key: s * hidden_fraction.get(key[0], 0.0) for key, s in totals.items()}
        return {key: s for key, s in left.items() if s > 1e-9 * self.total}

    @cached_property
    def hidden(self) -> dict[str, float]:
        """Seconds of hidden transfers, by purpose."""
        overlapped = self._hidden_seconds
        names = dict.fromkeys(name for name, _ in overlapped)
        return {name: sum(s for key, s in overlapped.items() if key[0] == name) for name in names}

    @cached_property
    def exposed(self) -> dict[str, float]:
        """Seconds of exposed transfers, by purpose; new parameters come last."""
        items = sorted(self.time.exposed.items(), key=lambda pair: pair[0] == NEW_PARAMS)
        return {name: s for name, s in items if s > 1e-9 * self.total}

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds by what a device does; they add up to the step."""
        forward, backward, ends = (self.count * seconds for seconds in self.microbatch_seconds)
        weights = backward / 2 if self.table is not None and self.table.splits_backward else 0.0
        parts = {"forward": forward, "backward": backward - weights, "weights": weights, HEAD: ends}
        if self.table is not None:
            parts["waiting"] = self.spent - sum(parts.values())
        parts |= {f"exposed: {name}": s for name, s in self.exposed.items()}
        parts |= {"optimizer": self.time.optimizer, "host": self.time.host}
        return {name: s for name, s in parts.items() if s > 1e-9 * self.total}

    # -- positions --------------------------------------------------------------------------

    def spans(self) -> Iterator[Span]:
        """Yield every box."""
        yield from self._plain_spans() if self.table is None else self._pipeline_spans()

    def _plain_spans(self) -> Iterator[Span]:
        forward, backward, ends = self.microbatch_seconds
        last = {k: s for k, s in self.exposed.items() if k in self.once}
        each = {k: s / self.count for k, s in self.exposed.items() if k not in last}
        length = forward + ends + backward + sum(each.values())
        num_drawn = self.count if self.count <= MANY else DRAWN
        for n in range(num_drawn):
            yield from self._microbatch_spans(n * length, each, n == self.count - 1)
        if rest := self.count - num_drawn:
            begin, label = num_drawn * length, f"… x {rest} {OTHERS}"
            yield Span(OTHERS, 0, begin, rest * length, label)
            sent = {name: rest * seconds for name, seconds in each.items()}
            yield from self._transfer_spans(sent, (num_drawn + rest) * length - sum(sent.values()))
            yield from self._hidden_spans(begin, rest * (forward + backward), rest, None, True)
        yield from self._final_spans(self.count * length, last)

    def _microbatch_spans(
        self, at: float, each: Mapping[str, float], is_last: bool
    ) -> Iterator[Span]:
        """Yield what one microbatch computes, its hidden transfers, and its exposed ones."""
        forward, backward, ends = self.microbatch_seconds
        yield Span("forward", 0, at, forward, "forward")
        yield from self._hidden_spans(at, forward + ends, 1, False, is_last)
        yield Span(HEAD, 0, at + forward, ends, "head")
        at += forward + ends
        yield Span("backward", 0, at, backward, "backward")
        yield from self._hidden_spans(at, backward, 1, True, is_last)
        yield from self._transfer_spans(each, at + backward)

    def _transfer_spans(
        self, sent: Mapping[str, float], at: float, alpha: float = 1.0
    ) -> Iterator[Span]:
        """Yield transfers one after another."""
        for name, seconds in sent.items():
            yield Span(name, len(self.stages), at, seconds, name, alpha=alpha)
            at += seconds

    def _hidden_spans(
        self, at: float, room: float, times: int, backward: bool | None, is_last: bool
    ) -> Iterator[Span]:
        """Yield the hidden transfers of so many microbatches: pale, as far as they fit.

        `backward` is their direction, None: both.
        """
        hidden: dict[str, float] = {}
        for (name, back), seconds in self._hidden_seconds.items():
            once = name in self.once
            if backward in (None, back) and (is_last or not once):
                share = seconds if once else seconds * times / self.count
                hidden[name] = hidden.get(name, 0.0) + share
        total = sum(hidden.values())
        scale = min(1.0, room / total) if total else 1.0
        yield from self._transfer_spans({k: scale * s for k, s in hidden.items()}, at, PALE)

    def _final_spans(self, at: float, last: Mapping[str, float]) -> Iterator[Span]:
        """Yield what follows the microbatches: transfers, the optimizer, the host."""
        yield from self._transfer_spans(last, at)
        at += sum(last.values())
        for name in ("optimizer", "host"):
            seconds = getattr(self.time, name)
            yield from (Span(name, n, at, seconds, name) for n in range(len(self.stages)))
            at += seconds

    def _pipeline_spans(self) -> Iterator[Span]:
        forward, backward, ends = self.microbatch_seconds
        table, names = self.table, {"F": "forward", "B": "backward", "W": "weights"}
        assert table is not None
        begins, widths = start_times(table, forward, backward, backward / 2)
        yield from (Span("waiting", stage, 0, self.spent) for stage in range(table.stages))
        for tick, stage, slot in np.argwhere((widths > 0) & (table.cells >= 0)).tolist():
            number = str(int(table.cells[tick, stage, slot]) // table.virtual)
            begin, wide = float(begins[tick, stage, slot]), float(widths[tick, stage, slot])
            yield Span(names[KINDS[slot]], stage, begin, wide, number)
        end, around = cost(table, forward, backward, backward / 2), self.count * ends
        # In lockstep the other stages wait for the one that runs the head.
        yield Span(HEAD, table.stage_map[table.virtual - 1][0], end, around, "head")
        yield from self._transfer_spans(self.hidden, 0.0, PALE)
        yield from self._final_spans(end + around, self.exposed)
