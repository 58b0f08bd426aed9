"""The table of `hfjax plan`: the ways to run a step, the fastest first, two lines for each.

The first line says how it runs and why it is not the best, the second has the numbers: a terminal
of 80 columns has room for them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from hfjax.analysis.targets import FRACTION
from hfjax.parallel.precision.auto import has_bfloat16
from hfjax.planner.make_plan import PlanEntry, StepPlan, memory_share
from hfjax.utils.tables import align, human

LEGEND = "mesh, strategy, schedule, microbatches x examples, remat, offload (reason)"
# heading -> seconds of a step
PARTS = {
    "step": lambda time: time.total,
    "products": lambda time: time.products,
    "memory\nbound": lambda time: time.memory,
    "exposed\ntransf.": lambda time: time.all_exposed,
    "bubble": lambda time: time.bubble,
    "optim.\n+ host": lambda time: time.optimizer + time.host,
}


@dataclass(frozen=True)
class TimeScale:
    """The unit of times in one table."""

    unit: str
    seconds: float
    digits: int

    @classmethod
    def of(cls, seconds: float) -> "TimeScale":
        """Return the unit in which `seconds` is easily read."""
        if seconds >= 1:
            return cls("s", 1.0, 3)
        return cls("ms", 1e-3, 1 if seconds >= 0.01 else 3)

    def text(self, seconds: float) -> str:
        """Return a time without its unit; - for none."""
        return f"{seconds / self.seconds:.{self.digits}f}" if seconds else "-"


@dataclass(frozen=True)
class ByteScale:
    """The unit of bytes in one part of a table."""

    unit: str
    bytes: float

    @classmethod
    def of(cls, size: float) -> "ByteScale":
        """Return the unit in which `size` is easily read."""
        units = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
        return next(cls(unit, n) for unit, n in units if size >= n or n == 1)


def heading(plan: StepPlan, report: Any) -> Iterator[str]:
    """Yield the lines above the table."""
    task, config = plan.scorer.base_run.task, plan.config
    batch_text = f"{config.global_batch_size:,} {task.describe_example()}"
    if task.unit == "tokens":
        batch_text = (
            f"{config.global_batch_size * plan.scorer.length:,} tokens in a step ({batch_text})"
        )
    else:
        batch_text += " in a step"
    nodes = -(-plan.count // plan.machine.per_node)
    of_nodes = f" ({nodes} nodes)" if nodes > 1 else ""
    yield (
        f"{task.model.name} on {plan.count} x {plan.machine.name}{of_nodes}, {batch_text}, "
        f"precision {config.precision}"
    )
    yield f"a step may use {human(plan.memory)} of a device's {human(plan.machine.memory)}"
    refused = f", {plan.refused:,} refused" if plan.refused else ""
    compiled = sum(entry.compiled is not None for entry in (*plan.entries, *plan.others))
    took = f"{plan.seconds:.0f} s"
    if compiled:
        yield f"{plan.searched:,} ways searched{refused}, the first {compiled} compiled, in {took}"
        return
    why = f" ({report.why_not})" if report.compile and report.why_not else ""
    yield f"{plan.searched:,} ways searched in {took}{refused}; predicted by formulas{why}"


def plan_table(plan: StepPlan, limit: int, lines: Sequence[str], notes: Sequence[str]) -> Group:
    """Return the table, with its heading above and near misses below."""
    entries = plan.entries[:limit]
    scale = TimeScale.of(plan.best.time.total)
    unit = plan.scorer.base_run.task.unit
    blocks: list[Any] = [*heading_lines(lines), Text(), _table(entries, plan.memory, scale, unit)]
    faster = [r for r in plan.others if r.time.total < plan.best.time.total][:limit]
    if faster:
        blocks += [Text("\nwould be faster, but does not fit:", style="bold"), Text()]
        blocks.append(_table(faster, plan.memory, scale, unit, ranked=False))
    return Group(*blocks, *note_lines(notes))


def note_lines(notes: Sequence[str]) -> Iterator[Text]:
    """Yield the lines below a table."""
    yield Text()
    for note in notes:
        yield Text(f"* {note}", style="dim")


def heading_lines(lines: Sequence[str]) -> Iterator[Text]:
    """Yield the lines above a table."""
    for number, line in enumerate(lines):
        yield Text(line, style="" if number else "bold")


def _table(
    entries: Sequence[PlanEntry], memory: int, scale: TimeScale, unit: str, ranked: bool = True
) -> Table:
    size = ByteScale.of(max(entry.peak.total for entry in entries))
    columns = [*PARTS, f"{unit}/s\nper GPU", "MFU", f"peak\n{size.unit}", "margin"]
    columns[0] += f"\n{scale.unit}"
    above, below = zip(*(name.rpartition("\n")[::2] for name in columns), strict=True)
    numbers = [_numbers(entry, memory, scale, size) for entry in entries]
    lines = align([above, below, *numbers], range(len(columns)), gap=" ")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_row("", "\n".join([LEGEND, *lines[:2]]), style="bold")
    for n, (entry, line) in enumerate(zip(entries, lines[2:], strict=True), 1):
        text = Text(str(entry.candidate), style="bold" if ranked and n == 1 else "")
        text.append(f" ({entry.reason})" if entry.reason else "", style="dim")
        text.append(f"\n{line}")
        text.stylize(_colour(1 - entry.peak.total / memory), len(text) - len(line.split()[-1]))
        table.add_row(f"{n:>2}" if ranked else "  ", text)
    return table


def _numbers(entry: PlanEntry, memory: int, scale: TimeScale, size: ByteScale) -> list[str]:
    return [
        *(scale.text(read_seconds(entry.time)) for read_seconds in PARTS.values()),
        f"{entry.tokens:,.0f}",
        f"{entry.mfu:.1%}",
        f"{entry.peak.total / size.bytes:.1f}" + ("" if entry.compiled is None else "c"),
        f"{1 - entry.peak.total / memory:.0%}",
    ]


def _colour(margin: float) -> str:
    return "green" if margin > 0.1 else "yellow" if margin >= 0 else "red"


def write(console: Console, group: Group) -> None:
    """Print a table; lines are not wrapped if they are piped."""
    if not console.is_terminal:
        console.width = 10_000
    console.print(group)


def notes_of(plan: StepPlan, settings: Any) -> Iterator[str]:
    """Yield caveats."""
    if settings.device_memory is None and (fraction := memory_share(plan.machine)) < 1:
        yield (
            f"JAX takes {fraction:.0%} of a GPU's memory; {FRACTION}=0.95, here and where it runs, "
            "takes more"
        )
    task, model = plan.scorer.base_run.task, settings.model
    sizes = (settings.vocab, model.vocab_size, model.pretrained)
    if task.unit == "tokens" and not any(sizes):
        yield f"the vocabulary is that of the data, {task.model.vocab:,}; --vocab says another one"
    word = "bf16" if has_bfloat16(plan.machine) else "fp16"
    if plan.machine.platform == "gpu" and plan.scorer.itemsizes[0] >= 4:
        yield (
            f"products are in float32 (--precision {settings.precision}); --precision {word} takes "
            "about half of the time"
        )
    if plan.machine.platform == "gpu" and word == "fp16" and "bf16" in plan.config.precision:
        yield f"{plan.machine.name} has no products in bfloat16: the times are those of float16"
    if any(entry.compiled is not None for entry in plan.entries):
        yield "c: peak and exposed transfers as compiled; the others by formula"
    yield from plan.notes
