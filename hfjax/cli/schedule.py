"""`hfjax schedule`: a schedule in the terminal, what it costs, and files of it."""

import argparse
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table as Rows
from rich.text import Text

from hfjax.cli.draw_timeline import BARS, LEFT, LETTER, WIDTH, Span, Timeline, write
from hfjax.parallel.schedules.cost import (
    MODELS,
    bubble,
    cost,
    crossing,
    messages,
    permutes,
    sent,
    starts,
    stash,
)
from hfjax.parallel.schedules.named import SCHEDULES, Schedule
from hfjax.parallel.schedules.table import KINDS, Table, needs
from hfjax.utils.command_errors import carried_out
from hfjax.utils.tables import aligned

STYLES = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow"}
MARGIN = 10  # columns before the first tick
STAGES, MICROBATCHES = 4, 16  # where nothing is said
MOST = 8  # blocks of a grid that a terminal shows
MOST_ROWS = 20  # of a picture
# of a picture: what is drawn -> what it is called, and its colour
MASKED = "masked"
DRAWN = {
    "F": ("forward", "#8db4e8"),
    "B": ("backward", "#86c98f"),
    "I": ("backward (input)", "#79cfc0"),
    "W": ("weights", "#f2bc6b"),
    MASKED: ("masked: computed, thrown away", "#e6e6e6"),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    number = {"type": int, "metavar": "N"}
    time = {"type": float, "metavar": "TIME"}
    path = {"type": Path, "metavar": "FILE"}
    add = parser.add_argument
    add("name", nargs="?", help=f"schedule: {', '.join(SCHEDULES)} (default: a list of all)")
    add("--stages", **number, help=f"devices along the axis pipe (default: {STAGES})")
    add("--microbatches", **number, help=f"microbatches of a step (default: {MICROBATCHES})")
    add("--chunks", **number, help="pieces of the model on each stage (default: the schedule's)")
    own = "show a schedule of your own, .csv or text, a line for each stage (default: none)"
    add("--from", **path, dest="own", help=own)
    shown = "(default: %(default)g)"
    add("--forward", **time, default=1.0, help=f"time of a forward pass on a stage {shown}")
    add("--backward", **time, default=2.0, help=f"time of a backward pass on a stage {shown}")
    part = f"part of --backward that is for the gradients of weights {shown}"
    add("--weights", **time, default=1.0, help=part)
    drawn = "draw it to scale, x.svg or x.png, or x.json for ui.perfetto.dev (default: none)"
    add("--picture", **path, help=drawn)
    add("--csv", **path, help="write the schedule, to edit and read with --from (default: none)")


def command(argv: Sequence[str]) -> int:
    """Run `hfjax schedule` with these arguments; return the exit status."""
    parser = argparse.ArgumentParser("hfjax schedule", description="Show a schedule and its cost.")
    arguments(parser)
    given, console = parser.parse_args(argv), Console(highlight=False, soft_wrap=True)
    listed = given.name is None and given.own is None
    act = _list if listed else _draw
    return carried_out("schedule", lambda: act(given, console))


def _draw(given: argparse.Namespace, console: Console) -> None:
    table = _table(given)
    _write(table, given)
    _show(table, given, console)


def _times(given: argparse.Namespace) -> tuple[float, float, float]:
    return given.forward, given.backward, given.weights


def _say(given: argparse.Namespace) -> str:
    forward, backward, weights = _times(given)
    return f"forward {forward:g}, backward {backward:g} (weights {weights:g} of it)"


def _list(given: argparse.Namespace, console: Console) -> None:
    """Print a line for every schedule."""
    for option in ("chunks", "picture", "csv"):
        if getattr(given, option) is not None:
            raise ValueError(f"--{option} is for one schedule: name one of {', '.join(SCHEDULES)}.")
    stages, microbatches = _sizes(given)
    rows = Rows(box=None, pad_edge=False)
    for head in ("schedule", "chunks", "bubble", "stash", "B-W", "sent", ""):
        rows.add_column(head, justify="left" if head in ("schedule", "") else "right")
    for name, builder in SCHEDULES.items():
        table = Schedule(name, microbatches).table(stages)
        waste, kept, late = bubble(table, *_times(given)), max(stash(table)), max(crossing(table))
        chunks = f"{builder.chunks}" if builder.fixed else f"any ({builder.chunks})"
        numbers = f"{waste:.1%}", f"{kept:g}", f"{late:g}", f"{permutes(table)}"
        rows.add_row(name, chunks, *numbers, builder.about)
    console.print(rows)
    console.print(
        f"\nwith {stages} stages, {microbatches} microbatches, {_say(given)}; stash: microbatches "
        "whose\nactivations a stage keeps; B-W: those of which it keeps what W needs of B; sent: "
        "permutes of its\nprogram. One of them: hfjax schedule interleaved --chunks 4"
    )


def _sizes(given: argparse.Namespace) -> tuple[int, int]:
    stages, microbatches = given.stages, given.microbatches
    return (
        STAGES if stages is None else stages,
        MICROBATCHES if microbatches is None else microbatches,
    )


def _table(given: argparse.Namespace) -> Table:
    """Return the table named, or that of the file given."""
    stages, microbatches = _sizes(given)
    if given.own is None:
        return Schedule(given.name, microbatches, given.chunks).table(stages)
    if given.name is not None:
        raise ValueError(f"{given.name} and --from {given.own}: give a name or a file, not both.")
    own = Schedule.from_csv(given.own).own
    assert own is not None
    found = {"microbatches": own.microbatches, "chunks": own.chunks, "stages": own.stages}
    for name, count in found.items():
        if getattr(given, name) not in (None, count):
            raise ValueError(f"--{name} {getattr(given, name)}: {given.own} has {count}.")
    return own


def _show(table: Table, given: argparse.Namespace, console: Console) -> None:
    """Print the grid and what it costs."""
    several = f" of {table.chunks} chunks" if table.chunks > 1 else ""
    console.print(
        f"{table.name}: {table.stages} stages{several}, {table.microbatches} microbatches, "
        f"{table.ticks} ticks {'with' if table.branches else 'without'} branches\n"
    )
    blocks = list(_blocks(table, console.width))
    middle = range(MOST - 1, len(blocks) - 1) if console.is_terminal else range(0)
    for number, (first, end) in enumerate(blocks):
        if number not in middle:
            console.print(_grid(table, first, end))
        elif number == middle[0]:
            last = blocks[middle[-1]][1] - 1
            console.print(f"  ticks {first} to {last}: --csv or --picture has them all\n")
    _print_costs(table, given, console)


def _blocks(table: Table, width: int) -> Iterator[tuple[int, int]]:
    """Yield the ticks, first and end, of as many columns as fit beside each other."""
    first, room = 0, width - MARGIN
    for tick in range(table.ticks):
        wide = _width(table, tick) + 1
        if wide > room and tick > first:
            yield first, tick
            first, room = tick, width - MARGIN
        room -= wide
    yield first, table.ticks


def _width(table: Table, tick: int) -> int:
    return max(len(table.text(tick, stage)) for stage in range(table.stages))


def _grid(table: Table, first: int, end: int) -> Text:
    """Return some ticks of the table: a line of their numbers, and one for each stage."""
    heads = ["".ljust(MARGIN - 1), *map(str, range(first, end))]
    cells = lambda stage: (table.text(tick, stage) for tick in range(first, end))
    rows = ([f"stage {stage}", *cells(stage)] for stage in range(table.stages))
    head, *lines = aligned([heads, *rows], gap=" ")
    grid = Text("".join(f"{line}\n" for line in lines))
    grid.highlight_regex("[+.]", "dim")
    for kind, style in STYLES.items():
        grid.highlight_regex(rf"\d+{kind}\d+", style)
    return Text.assemble((f"{head}\n", "dim"), grid)


def _print_costs(table: Table, given: argparse.Namespace, console: Console) -> None:
    waste, *others = (bubble(table, *_times(given), model) for model in MODELS)
    time = cost(table, *_times(given))
    console.print(f"time      {time:g}, with {_say(given)}")
    console.print(
        f"bubble    {waste:.1%}; waiting for neighbours only: {others[0]:.1%}, for inputs only: "
        f"{others[1]:.1%}"
    )
    say = lambda counts: " ".join(f"{count:g}" for count in counts)
    console.print(f"stash     {say(stash(table))}: microbatches whose activations each stage keeps")
    if table.split:
        kept = say(crossing(table))
        console.print(f"B to W    {kept}: microbatches of which each keeps what W needs of B")
    _print_messages(table, console)


def _print_messages(table: Table, console: Console) -> None:
    """Print what the program sends, and what tasks need of it."""
    needed = messages(table)
    if not needed:
        console.print("messages  none")
        return
    most = max(sum(n for link, n in needed.items() if link[0] == s) for s in range(table.stages))
    count = permutes(table)
    console.print(
        f"permutes  {count} in each stage's program; no stage has more than {most} to send"
    )
    links = (f"{a}->{b} {count} for {needed[a, b]}" for (a, b), count in sent(table).items())
    console.print(f"messages  {', '.join(links)}: sent, for those needed")
    whole, empty = sum(sent(table).values()), sum(sent(table).values()) - sum(needed.values())
    console.print(f"empty     {empty} of {whole} messages, {empty / whole:.0%} of the bytes sent")


def _write(table: Table, given: argparse.Namespace) -> None:
    """Write the files asked for."""
    picture = drawn(table, *_times(given))  # also checks the times
    if given.picture is not None:
        write(given.picture, picture)
    if given.csv is not None:
        rows = ([table.text(t, s) for t in range(table.ticks)] for s in range(table.stages))
        lines = (",".join("" if cell == "." else cell for cell in row) for row in rows)
        given.csv.write_text("\n".join(lines) + "\n", encoding="utf-8")


def drawn(table: Table, forward: float, backward: float, weights: float) -> Timeline:
    """Return a schedule to scale: a box for each slot that takes time, as it runs, in lockstep.

    Masked ones are grey: the stage computes, as all stages do in a tick without branches, and what
    it computes is thrown away. The later a chunk, the longer the bar below it.
    """
    begins, widths = starts(table, forward, backward, weights)
    tasks = {(tick, stage, task.kind): task for task, tick, stage in table.tasks()}
    letters, spans, of_task = "FIW" if table.split else "FBW", [], {}
    for tick, stage, slot in np.argwhere(widths > 0).tolist():
        task = tasks.get((tick, stage, KINDS[slot]))
        kind = letters[slot] if task else MASKED
        depth = table.homes[task.virtual][1] / max(table.chunks - 1, 1) if task else 0.0
        label, name = (str(task.microbatch), task._replace(kind=kind)) if task else ("", MASKED)
        when = float(begins[tick, stage, slot]), float(widths[tick, stage, slot])
        look = label, f"{name}, tick {tick}", 1 - 0.4 * depth, depth
        spans.append(Span(kind, stage, *when, *look))
        if task:
            of_task[task] = spans[-1]
    read = [(need, task) for task in of_task for need, _ in needs(task, table.virtual)]
    pairs = [(of_task[need], of_task[task]) for need, task in read if need in of_task]
    counts = {"stage": table.stages, "microbatch": table.microbatches, "chunk": table.chunks}
    told = [_several(n, name) for name, n in counts.items() if n > 1 or name != "chunk"]
    waste = bubble(table, forward, backward, weights)
    legend = [(*DRAWN[kind], 1.0) for kind in DRAWN if kind in {span.kind for span in spans}]
    legend += [("number: the microbatch", "none", 1.0)]
    legend += [("bar: the later the chunk, the longer", BARS, 1.0)] * (table.chunks > 1)
    # Labels are to fit in the narrowest boxes.
    room = LETTER * max(len(span.label) for span in spans) / min(span.width for span in spans)
    rows = math.ceil(max(span.end for span in spans) * room / (WIDTH - LEFT))
    return Timeline(
        f"{table.name}: {', '.join(told)}, bubble {waste:.1%}",
        [f"stage {stage}" for stage in range(table.stages)],
        spans,
        {kind: colour for kind, (_, colour) in DRAWN.items()},
        legend,
        rows=min(rows, MOST_ROWS),
        messages=[pair for pair in pairs if pair[0].line != pair[1].line],
    )


def _several(count: int, name: str) -> str:
    return f"{count} {name}" + ("" if count == 1 else "es" if name.endswith("ch") else "s")
