"""The output about one layout: a configuration compared with the best of a plan, part by part."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hfjax.cli.plan.compare import Answer
from hfjax.cli.plan.table import ByteScale, TimeScale
from hfjax.planner.candidate import Candidate
from hfjax.planner.explain import MEMORY_NAMES, MIN_DIFFERENCE, largest_loss, largest_memory_part
from hfjax.planner.make_plan import MARGIN, StepPlan
from hfjax.planner.score import ScoredCandidate
from hfjax.planner.step_time import node_membership
from hfjax.utils.tables import human

STATE_NAMES = {"batch": "batch", "moment": "while the peak layer or head runs"}


def layout_report(plan: StepPlan, answer: Answer, layout_label: str) -> Group:
    """Return the report about a layout.

    Args:
        plan: The plan.
        answer: The result.
        layout_label: What describes it: flags, or a file.
    """
    return Group(*_lines(plan, answer, layout_label))


def _lines(plan: StepPlan, answer: Answer, layout_label: str) -> Iterator[Any]:
    yield Text()
    c = answer.queried_candidate
    assert c is not None
    if answer.scored is None:
        yield Text(f"{layout_label} does not run: {_describe(c)}", style="bold red")
        yield Text(answer.refusal)
        return
    yield Text(f"{layout_label}: {_describe(c)}", style="bold")
    yield Text(_origin(answer, c, plan))
    yield Text(_verdict(plan, answer.scored, answer.fits))
    first = ScoredCandidate(plan.best.candidate, plan.best.time, plan.best.peak)
    if c == first.candidate:
        yield Text("It is the first of the plan.")
    else:
        yield Text(_loss(answer.scored, first))
    yield Text()
    yield _comparison(plan, answer.scored, first)


def _describe(c: Candidate) -> str:
    columns = c.table_cells
    microbatches = f"{columns['microbatches']} (microbatches x examples of a device)"
    cells = (
        columns["mesh"],
        columns["strategy"],
        columns["schedule"],
        microbatches,
        columns["memory"],
    )
    return ", ".join(cell for cell in cells if cell != "-")


def _origin(answer: Answer, c: Candidate, plan: StepPlan) -> str:
    if answer.num_matches == 1:
        return "One of the ways that were searched is this one."
    if answer.num_matches:
        return (
            f"{answer.num_matches:,} of the ways that were searched agree; this is the best of "
            "them."
        )
    node = plan.machine.per_node
    inside = c.axis_size("tensor") * c.axis_size("row")
    why = f": tensor and row leave a node of {node}" if inside > node else ""
    return f"The search does not try it{why}; what is not given has its default."


def _verdict(plan: StepPlan, s: ScoredCandidate, fits: bool) -> str:
    peak, memory = s.peak.total, plan.memory
    note = plan.scorer.placements(s.candidate).replication_note
    more = f" {note[0].upper()}{note[1:]}." if note else ""
    if fits:
        return (
            f"It fits: {human(peak)} of {human(memory)}, {1 - peak / memory:.0%} stay free.{more}"
        )
    limit = (1 - MARGIN) * memory
    return (
        f"It does not fit: {human(peak)}, and a step may use {human(memory)} with a margin of "
        f"{MARGIN:.0%}: {human(peak - limit)} too much, most of it {largest_memory_part(s)}.{more}"
    )


def _loss(s: ScoredCandidate, first: ScoredCandidate) -> str:
    more = s.time.total / first.time.total - 1
    if abs(more) < MIN_DIFFERENCE:
        return f"It takes as long as the first ({first.candidate})."
    if more < 0:
        return f"It would be {-more:.1%} faster than the first."
    name, seconds = largest_loss(s, first)
    scale = TimeScale.of(first.time.total)
    return (
        f"It is {more:.1%} slower than the first ({first.candidate}); the largest part of that is "
        f"{name}, {scale.text(seconds)} {scale.unit}."
    )


# -- part by part -------------------------------------------------------------------------


def _comparison(plan: StepPlan, s: ScoredCandidate, first: ScoredCandidate) -> Table:
    """Return the parts of a configuration, beside those of the best."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("this one", "the first", "difference"):
        table.add_column(name, justify="right")
    scale = TimeScale.of(first.time.total)
    _add_settings(table, s, first)
    _add_numbers(table, f"{scale.unit} of a step", s.time.parts, first.time.parts, scale.seconds)
    size = ByteScale.of(max(s.peak.total, first.peak.total))
    _add_numbers(
        table, f"{size.unit} of a device", _memory_parts(s), _memory_parts(first), size.bytes
    )
    sent, first_sent = transfer_totals(plan, s), transfer_totals(plan, first)
    pick = lambda sent, key: {name: numbers[key] for name, numbers in sent.items()}
    title = f"transfers, {scale.unit} beside products or not"
    _add_numbers(table, title, pick(sent, "seconds"), pick(first_sent, "seconds"), scale.seconds)
    mine, theirs = pick(sent, "bytes"), pick(first_sent, "bytes")
    size = ByteScale.of(max(sum(mine.values()), sum(theirs.values())))
    _add_numbers(table, f"transfers, {size.unit} that a device sends", mine, theirs, size.bytes)
    return table


def _add_settings(table: Table, s: ScoredCandidate, first: ScoredCandidate) -> None:
    table.add_row(Text("layout", style="italic cyan"))
    pairs = [(k, v, first.candidate.table_cells[k]) for k, v in s.candidate.table_cells.items()]
    for n, (name, mine, theirs) in enumerate(pairs, 1):
        name = "remat, offload" if name == "memory" else name
        table.add_row(f"  {name}", mine, theirs, "", end_section=n == len(pairs))


def _memory_parts(s: ScoredCandidate) -> dict[str, float]:
    """Return the bytes of a peak by their names for users."""
    names = {**STATE_NAMES, **MEMORY_NAMES}
    return {names.get(name, name): size for name, size in s.peak.parts.items()}


def _add_numbers(
    table: Table, title: str, mine: Mapping[str, float], theirs: Mapping[str, float], unit: float
) -> None:
    names = [n for n in {**theirs, **mine} if mine.get(n, 0.0) or theirs.get(n, 0.0)]
    if not names:
        return
    table.add_row(Text(title, style="italic cyan"))
    digits = 1 if max(*mine.values(), *theirs.values(), 0.0) >= 10 * unit else 3
    for name in names:
        _add_entry(table, f"  {name}", mine.get(name, 0.0), theirs.get(name, 0.0), unit, digits)
    mine_all, theirs_all = sum(mine.values()), sum(theirs.values())
    _add_entry(table, "  together", mine_all, theirs_all, unit, digits, last=True)


def _add_entry(
    table: Table,
    name: str,
    mine: float,
    theirs: float,
    unit: float,
    digits: int,
    last: bool = False,
) -> None:
    least = 0.5 * 10**-digits
    number = lambda x: f"{x:.{digits}f}" if x >= least else f"<{2 * least:.{digits}f}"
    text = lambda x: number(x / unit) if x else "-"
    more = (mine - theirs) / unit
    difference = "" if round(more, digits) == 0 else f"{more:+.{digits}f}"
    style = "bold" if last else ""
    table.add_row(name, text(mine), text(theirs), difference, end_section=last, style=style)


def transfer_totals(plan: StepPlan, s: ScoredCandidate) -> dict[str, dict[str, float]]:
    """Return seconds and bytes of a step's transfers: by purpose, in a node or across nodes."""
    scorer, c = plan.scorer, s.candidate
    totals: dict[str, dict[str, float]] = {}
    for comm, seconds in scorer.transfers(c, scorer.placements(c)):
        inside, _ = node_membership(comm.axes, c.mesh, plan.machine.per_node)
        link = "in a node" if inside else "across nodes"
        entry = totals.setdefault(f"{comm.purpose}, {link}", {"seconds": 0.0, "bytes": 0.0})
        entry["seconds"] += seconds
        entry["bytes"] += comm.sent_bytes(c.mesh)
    return totals
