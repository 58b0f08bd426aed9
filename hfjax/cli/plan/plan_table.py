"""The table of `hfjax plan`: a row for each way to run a step, the fastest first."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from hfjax.base.tables import human
from hfjax.planner.make_plan import PlanRow, StepPlan
from hfjax.target import FRACTION, fraction_taken

GIB = 2**30
WORDS = ("mesh", "strategy", "schedule", "microbatches", "memory")
LEAST = {"mesh": 13, "memory": 12, "schedule": 8}  # characters of a column
# What a table has beside the words, in seconds: heading -> part of the time
PARTS = {
    "products": lambda time: time.products,
    "memory\nbound": lambda time: time.memory,
    "exposed\ntransf.": lambda time: time.all_exposed,
    "bubble": lambda time: time.bubble,
    "optim.\n+ host": lambda time: time.optimizer + time.host,
}


@dataclass(frozen=True)
class TimeScale:
    """The unit of times of one table."""

    unit: str
    seconds: float
    digits: int

    @classmethod
    def of(cls, seconds: float) -> "TimeScale":
        """Return that in which some seconds are easily read."""
        if seconds >= 1:
            return cls("s", 1.0, 3)
        return cls("ms", 1e-3, 1 if seconds >= 0.01 else 3)

    def text(self, seconds: float) -> str:
        """Return a time without its unit; - for none."""
        return f"{seconds / self.seconds:.{self.digits}f}" if seconds else "-"


def heading(plan: StepPlan, given: Any) -> Iterator[str]:
    """Yield the lines above the table."""
    task, config = plan.scorer.one.task, plan.config
    rows = f"{config.batch:,} {task.rows()}"
    if task.unit == "tokens":
        rows = f"{config.batch * plan.scorer.length:,} tokens in a step ({rows})"
    else:
        rows += " in a step"
    nodes = -(-plan.count // plan.machine.per_node)
    of_nodes = f" ({nodes} nodes)" if nodes > 1 else ""
    yield (
        f"{task.model.name} on {plan.count} x {plan.machine.name}{of_nodes}, {rows}, "
        f"precision {config.precision}"
    )
    yield f"a step may use {human(plan.memory)} of a GPU's {human(plan.machine.memory)}"
    refused = f", {plan.refused:,} refused" if plan.refused else ""
    compiled = sum(row.compiled is not None for row in (*plan.rows, *plan.others))
    took = f"{plan.seconds:.0f} s"
    if compiled:
        yield f"{plan.searched:,} ways searched{refused}, the first {compiled} compiled, in {took}"
        return
    why = f" ({given.why_not})" if given.compile and given.why_not else ""
    yield f"{plan.searched:,} ways searched in {took}{refused}; predicted by formulas{why}"


def shown(plan: StepPlan, most: int, lines: Sequence[str], notes: Sequence[str]) -> Group:
    """Return the table, its heading above, and below what is only nearly better."""
    rows = plan.rows[:most]
    scale = TimeScale.of(plan.best.time.total)
    table = _empty(scale, plan.scorer.one.task.unit)
    for number, row in enumerate(rows, 1):
        _add(table, str(number), row, plan.memory, scale, "bold" if number == 1 else "")
    faster = [r for r in plan.others if r.time.total < plan.best.time.total][:most]
    parts: list[Any] = [*headed(lines), Text(), table]
    if faster:
        parts += [Text("\nwould be faster, but does not fit:", style="bold"), Text()]
        below = _empty(scale, plan.scorer.one.task.unit)
        for row in faster:
            _add(below, "", row, plan.memory, scale, "dim")
        parts.append(below)
    return Group(*parts, *noted(notes))


def noted(notes: Sequence[str]) -> Iterator[Text]:
    """Yield the lines below a table."""
    yield Text()
    for note in notes:
        yield Text(f"* {note}", style="dim")


def headed(lines: Sequence[str]) -> Iterator[Text]:
    """Yield the lines above a table."""
    for number, line in enumerate(lines):
        yield Text(line, style="" if number else "bold")


def _empty(scale: TimeScale, unit: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=0)
    table.add_column("", justify="right", min_width=2)
    for name in WORDS:
        short = {"microbatches": "micro-\nbatches", "memory": "remat,\noffload"}.get(name, name)
        table.add_column(short, min_width=LEAST.get(name, 6))
    table.add_column(f"step\n{scale.unit}", justify="right", no_wrap=True)
    for name in PARTS:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column(f"{unit}/s\nper GPU", justify="right", no_wrap=True)
    table.add_column("MFU", justify="right", no_wrap=True)
    table.add_column("peak\nGiB", justify="right", no_wrap=True)
    table.add_column("margin", justify="right", no_wrap=True)
    table.add_column("why not the first", min_width=16)
    return table


def _add(table: Table, rank: str, row: PlanRow, memory: int, scale: TimeScale, style: str) -> None:
    words = row.candidate.shown
    peak = row.peak.total
    margin = 1 - peak / memory
    colour = "green" if margin > 0.1 else "yellow" if margin >= 0 else "red"
    table.add_row(
        rank,
        *(words[name].replace("+", " +") for name in WORDS),
        scale.text(row.time.total),
        *(scale.text(part(row.time)) for part in PARTS.values()),
        f"{row.tokens:,.0f}",
        f"{row.mfu:.1%}",
        f"{peak / GIB:.1f}" + ("" if row.compiled is None else "c"),
        Text(f"{margin:.0%}", style=colour),
        row.reason,
        style=style,
    )


def write(console: Console, group: Group) -> None:
    """Print a table; what is no terminal gets it as wide as it is, at least 160."""
    if not console.is_terminal:
        room = console.options.update(max_width=10_000)
        tables = (x for x in group.renderables if isinstance(x, Table))
        console.width = max(160, *(Measurement.get(console, room, t).maximum for t in tables), 0)
    console.print(group)


def notes_of(plan: StepPlan, given: Any) -> Iterator[str]:
    """Yield what to bear in mind."""
    if given.device_memory is None and (part := fraction_taken()) < 1:
        yield (
            f"JAX takes {part:.0%} of a GPU's memory. For more set {FRACTION}, here and where it "
            f"runs: {FRACTION}=0.95"
        )
    task = plan.scorer.one.task
    if task.unit == "tokens" and given.vocab is None and given.model.pretrained is None:
        yield f"the vocabulary is that of the data, {task.model.vocab:,}; --vocab says another one"
    if plan.scorer.numbers[0] >= 4:
        yield (
            f"products are in float32, as --precision {given.precision} says; --precision bf16 "
            "takes about half of the time"
        )
    if any(row.compiled is not None for row in plan.rows):
        yield "c: peak and exposed transfers as compiled; the others by formula"
    yield from plan.notes
