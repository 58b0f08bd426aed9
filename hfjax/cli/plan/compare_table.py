"""What --why tells: a configuration beside the first of a plan, part by part."""

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from hfjax.cli.plan.compare import Answer
from hfjax.cli.plan.table import ByteScale, TimeScale
from hfjax.planner.candidate import Candidate
from hfjax.planner.explain import HELD, LEAST, largest_held, largest_loss
from hfjax.planner.make_plan import MARGIN, StepPlan
from hfjax.planner.score import Scored
from hfjax.planner.step_time import in_a_node
from hfjax.utils.tables import human

OF_STATE = {"batch": "batch", "moment": "while the peak layer or head runs"}


def told(plan: StepPlan, found: Answer, said: str, words: Mapping[str, Any]) -> Group:
    """Return what --why tells.

    Args:
        plan: The plan.
        found: What was found.
        said: The words of the command line.
        words: What they mean.
    """
    return Group(*_lines(plan, found, said, words))


def _lines(plan: StepPlan, found: Answer, said: str, words: Mapping[str, Any]) -> Iterator[Any]:
    yield Text()
    c = found.asked
    assert c is not None
    if found.scored is None:
        yield Text(f'"{said}" does not run: {_full(c)}', style="bold red")
        yield Text(found.refusal)
        return
    yield Text(f'"{said}": {_full(c)}', style="bold")
    if not plan.rows:
        yield Text(_verdict(plan, found.scored, found.fits))
        yield Text()
        yield _beside(plan, found.scored, None)
        return
    yield Text(_whence(found, c, words, plan))
    yield Text(_verdict(plan, found.scored, found.fits))
    first = Scored(plan.best.candidate, plan.best.time, plan.best.peak)
    if c == first.candidate:
        yield Text("It is the first of the plan.")
    else:
        yield Text(_loss(found.scored, first))
    yield Text()
    yield _beside(plan, found.scored, first)


def _full(c: Candidate) -> str:
    shown = c.shown
    how = f"{shown['microbatches']} (microbatches x rows of a device)"
    words = (shown["mesh"], shown["strategy"], shown["schedule"], how, shown["memory"])
    return ", ".join(word for word in words if word != "-")


def _whence(found: Answer, c: Candidate, words: Mapping[str, Any], plan: StepPlan) -> str:
    if found.agreeing == 1:
        return "One of the ways that were searched is this one."
    if found.agreeing:
        return f"{found.agreeing:,} of the ways that were searched agree; this is the best of them."
    node = plan.machine.per_node
    inside = c.side("tensor") * c.side("row")
    why = f": tensor and row leave a node of {node}" if inside > node else ""
    return f"The search does not try it{why}; what the words leave open is plain."


def _verdict(plan: StepPlan, s: Scored, fits: bool) -> str:
    peak, memory = s.peak.total, plan.memory
    whole = plan.scorer.placing(s.candidate).left_whole
    more = f" {whole[0].upper()}{whole[1:]}." if whole else ""
    if fits:
        return (
            f"It fits: {human(peak)} of {human(memory)}, {1 - peak / memory:.0%} stay free.{more}"
        )
    limit = (1 - MARGIN) * memory
    return (
        f"It does not fit: {human(peak)}, and a step may use {human(memory)} with a margin of "
        f"{MARGIN:.0%}: {human(peak - limit)} too much, most of it {largest_held(s)}.{more}"
    )


def _loss(s: Scored, first: Scored) -> str:
    more = s.time.total / first.time.total - 1
    if abs(more) < LEAST:
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


def _beside(plan: StepPlan, s: Scored, best: Scored | None) -> Table:
    """Return the parts of a configuration, beside those of the best if there is one."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("this one", "the first", "difference"):
        table.add_column(name, justify="right")
    first = best or s
    scale = TimeScale.of(first.time.total)
    _settings(table, s, first)
    _numbers(table, f"{scale.unit} of a step", s.time.parts, first.time.parts, scale.seconds)
    size = ByteScale.of(max(s.peak.total, first.peak.total))
    _numbers(table, f"{size.unit} of a device", _held(s), _held(first), size.bytes)
    sent, first_sent = transfers(plan, s), transfers(plan, first)
    of = lambda sent, what: {name: numbers[what] for name, numbers in sent.items()}
    title = f"transfers, {scale.unit} beside products or not"
    _numbers(table, title, of(sent, "seconds"), of(first_sent, "seconds"), scale.seconds)
    mine, theirs = of(sent, "bytes"), of(first_sent, "bytes")
    size = ByteScale.of(max(sum(mine.values()), sum(theirs.values())))
    _numbers(table, f"transfers, {size.unit} that a device sends", mine, theirs, size.bytes)
    if best is None:
        del table.columns[2:]
    return table


def _settings(table: Table, s: Scored, first: Scored) -> None:
    table.add_row(Text("how", style="italic cyan"))
    pairs = [(k, v, first.candidate.shown[k]) for k, v in s.candidate.shown.items()]
    for n, (name, mine, theirs) in enumerate(pairs, 1):
        name = "remat, offload" if name == "memory" else name
        table.add_row(f"  {name}", mine, theirs, "", end_section=n == len(pairs))


def _held(s: Scored) -> dict[str, float]:
    """Return the bytes of a peak by what people call them."""
    names = {**OF_STATE, **HELD}
    return {names.get(name, name): size for name, size in s.peak.parts.items()}


def _numbers(
    table: Table, title: str, mine: Mapping[str, float], theirs: Mapping[str, float], unit: float
) -> None:
    names = [n for n in {**theirs, **mine} if mine.get(n, 0.0) or theirs.get(n, 0.0)]
    if not names:
        return
    table.add_row(Text(title, style="italic cyan"))
    digits = 1 if max(*mine.values(), *theirs.values(), 0.0) >= 10 * unit else 3
    for name in names:
        _row(table, f"  {name}", mine.get(name, 0.0), theirs.get(name, 0.0), unit, digits)
    mine_all, theirs_all = sum(mine.values()), sum(theirs.values())
    _row(table, "  together", mine_all, theirs_all, unit, digits, last=True)


def _row(
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


def transfers(plan: StepPlan, s: Scored) -> dict[str, dict[str, float]]:
    """Return seconds and bytes of what a step sends: by purpose, in a node or across nodes."""
    scorer, c = plan.scorer, s.candidate
    found: dict[str, dict[str, float]] = {}
    for one, seconds in scorer.transfers(c, scorer.placing(c)):
        inside, _ = in_a_node(one.axes, c.mesh, plan.machine.per_node)
        where = "in a node" if inside else "across nodes"
        here = found.setdefault(f"{one.purpose}, {where}", {"seconds": 0.0, "bytes": 0.0})
        here["seconds"] += seconds
        here["bytes"] += one.moved(c.mesh)
    return found
