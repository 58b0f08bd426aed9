"""An executor of labels: runs a compiled table as one of tensors would, junk writes included.

What a slot holds is a label: ("y", g, m), what virtual stage g makes of microbatch m going
forward, or ("dx", g, m) going backward. Every read must find the label that it means.
"""

from collections import Counter

from hfjax.parallel.schedules.compile import LINK_NAMES, Ticks

Label = tuple[str, int, int]
JUNK: Label = ("junk", -1, -1)


class Replay:
    """The rings of every stage, and what they sent in the last tick."""

    def __init__(self, ticks: Ticks):
        self.ticks, self.table = ticks, ticks.table
        self.virtual = {home: g for g, home in enumerate(self.table.stage_map)}
        stages = range(self.table.stages)
        self.rings = {ring: [[JUNK] * n for _ in stages] for ring, n in ticks.depth.items()}
        self.sent = {"F": [JUNK for _ in stages], "B": [JUNK for _ in stages]}
        self.done: Counter = Counter()

    def run(self) -> Counter:
        """Run all ticks; return how often each task ran."""
        slots = {"F": self.forward, "B": self.backward, "W": self.weights}
        for first, end, kinds in self.ticks.segments:
            for tick in range(first, end):
                self.receive(tick, first, end)
                for kind in kinds:
                    for stage in range(self.table.stages):
                        slots[kind](tick, stage)
        return self.done

    def receive(self, tick: int, first: int, end: int) -> None:
        """Write what was sent in the last tick, on the links on which the segment receives."""
        for kind, ring in (("F", "x"), ("B", "dy")):
            for hop in self.ticks.links[kind]:
                for stage in range(
                    self.table.stages if self.receives(kind, hop, first, end) else 0
                ):
                    label = self.message(kind, (stage - hop) % self.table.stages)
                    self.write(f"{ring}_{LINK_NAMES[hop]}", ring, tick, stage, label)

    def receives(self, kind: str, hop: int, first: int, end: int) -> bool:
        return self.ticks.has_arrivals(kind, hop, first, end)

    def message(self, kind: str, stage: int) -> Label:
        """Return what a stage sent: where kinds share permutes, the one thing that it made."""
        made = [self.sent["F"][stage], self.sent["B"][stage]]
        if not self.ticks.shares_permutes:
            return self.sent[kind][stage]
        assert JUNK in made
        return next((label for label in made if label != JUNK), JUNK)

    def forward(self, tick: int, stage: int) -> None:
        g, m = self.task("F", tick, stage)
        if g > 0:
            self.read("F_x", "x", tick, stage, ("y", g - 1, m))
        y = self.sent["F"][stage] = ("y", g, m) if g >= 0 else JUNK
        if self.table.trains:
            self.write("F_stash", "stash", tick, stage, y)
            dy = ("dx", g + 1, m) if g == self.table.virtual - 1 else JUNK
            self.write("H_dy", "dy", tick, stage, dy)
        if self.table.splits_backward:
            self.write("F_w_residuals", "w_residuals", tick, stage, y)

    def backward(self, tick: int, stage: int) -> None:
        g, m = self.task("B", tick, stage)
        if g >= 0:
            self.read("B_dy", "dy", tick, stage, ("dx", g + 1, m))
            self.read("B_stash", "stash", tick, stage, ("y", g, m))
        if g >= 0 and self.table.splits_backward:
            self.read("B_w_residuals", "w_residuals", tick, stage, ("y", g, m))
        dx = self.sent["B"][stage] = ("dx", g, m) if g >= 0 else JUNK
        if self.table.splits_backward:
            self.write("B_b_to_w", "b_to_w", tick, stage, dx)

    def weights(self, tick: int, stage: int) -> None:
        g, m = self.task("W", tick, stage)
        if g >= 0:
            self.read("W_w_residuals", "w_residuals", tick, stage, ("y", g, m))
            self.read("W_b_to_w", "b_to_w", tick, stage, ("dx", g, m))

    def task(self, kind: str, tick: int, stage: int) -> tuple[int, int]:
        m = int(self.ticks.columns[f"{kind}_microbatch"][tick, stage])
        if m < 0:
            return -1, -1
        g = self.virtual[stage, int(self.ticks.columns[f"{kind}_chunk"][tick, stage])]
        self.done[kind, g, m] += 1
        return g, m

    def read(self, column: str, ring: str, tick: int, stage: int, label: Label) -> None:
        slot = self.ticks.columns[column][tick, stage]
        assert slot >= 0, (column, tick, stage)
        found = self.rings[ring][stage][slot]
        assert found == label, f"{column} in tick {tick} on stage {stage}: {found}, not {label}"

    def write(self, column: str, ring: str, tick: int, stage: int, label: Label) -> None:
        slot = self.ticks.columns[column][tick, stage]
        kind = {"H": "F", "x": "", "d": ""}.get(column[0], column[0])
        if (
            kind
            and self.table.branches
            and self.ticks.columns[f"{kind}_microbatch"][tick, stage] < 0
        ):
            return  # under a branch that this stage does not take
        assert 0 <= slot < self.ticks.depth[ring], (column, tick, stage, slot)
        self.rings[ring][stage][slot] = label
