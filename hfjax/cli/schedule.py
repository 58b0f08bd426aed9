"""`hfjax schedule`: shows a schedule in the terminal, with its costs, and writes files of it."""

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
    TIME_MODELS,
    b_to_w_stash,
    bubble,
    cost,
    count_permutes,
    messages,
    sent_messages,
    start_times,
    stash,
)
from hfjax.parallel.schedules.named import SCHEDULES, Schedule
from hfjax.parallel.schedules.table import KINDS, Table, dependencies
from hfjax.utils.command_errors import run_command
from hfjax.utils.tables import align

STYLES = {"F": "blue", "B": "green", "I": "cyan", "W": "yellow"}
MARGIN = 10  # columns before the first tick
STAGES, MICROBATCHES = 4, 16  # defaults
MOST = 8  # blocks of a grid that a terminal shows
MOST_ROWS = 20  # of a picture
# of a picture: what is drawn -> its name and colour
MASKED = "masked"
DRAWN = {
    "F": ("forward", "#8db4e8"),
    "B": ("backward", "#86c98f"),
    "I": ("backward (input)", "#79cfc0"),
    "W": ("weights", "#f2bc6b"),
    MASKED: ("masked: computed, thrown away", "#e6e6e6"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    number = {"type": int, "metavar": "N"}
    time = {"type": float, "metavar": "TIME"}
    path = {"type": Path, "metavar": "FILE"}
    add = parser.add_argument
    add("name", nargs="?", help=f"schedule: {', '.join(SCHEDULES)} (default: a list of all)")
    add("--stages", **number, help=f"devices along the axis pipe (default: {STAGES})")
    add("--microbatches", **number, help=f"microbatches of a step (default: {MICROBATCHES})")
    add("--chunks", **number, help="pieces of the model on each stage (default: the schedule's)")
    own_help = "show a schedule of your own, .csv or text, a line for each stage (default: none)"
    add("--from", **path, dest="own", help=own_help)
    default_text = "(default: %(default)g)"
    add("--forward", **time, default=1.0, help=f"time of a forward pass on a stage {default_text}")
    add(
        "--backward", **time, default=2.0, help=f"time of a backward pass on a stage {default_text}"
    )
    weights_help = f"part of --backward that is for the gradients of weights {default_text}"
    add("--weights", **time, default=1.0, help=weights_help)
    picture_help = "draw it to scale, x.svg or x.png, or x.json for ui.perfetto.dev (default: none)"
    add("--picture", **path, help=picture_help)
    add("--csv", **path, help="write the schedule, to edit and read with --from (default: none)")


def command(argv: Sequence[str]) -> int:
    """Run `hfjax schedule` with these arguments; return the exit status."""
    parser = argparse.ArgumentParser("hfjax schedule", description="Show a schedule and its cost.")
    add_arguments(parser)
    args, console = parser.parse_args(argv), Console(highlight=False, soft_wrap=True)
    lists_all = args.name is None and args.own is None
    act = _list if lists_all else _draw
    return run_command("schedule", lambda: act(args, console))


def _draw(args: argparse.Namespace, console: Console) -> None:
    table = _table(args)
    _write(table, args)
    _show(table, args, console)


def _times(args: argparse.Namespace) -> tuple[float, float, float]:
    return args.forward, args.backward, args.weights


def _times_text(args: argparse.Namespace) -> str:
    forward, backward, weights = _times(args)
    return f"forward {forward:g}, backward {backward:g} (weights {weights:g} of it)"


def _list(args: argparse.Namespace, console: Console) -> None:
    """Print a line for every schedule."""
    for option in ("chunks", "picture", "csv"):
        if getattr(args, option) is not None:
            raise ValueError(f"--{option} is for one schedule: name one of {', '.join(SCHEDULES)}.")
    stages, microbatches = _sizes(args)
    grid = Rows(box=None, pad_edge=False)
    for head in ("schedule", "chunks", "bubble", "stash", "B-W", "sent", ""):
        grid.add_column(head, justify="left" if head in ("schedule", "") else "right")
    for name, builder in SCHEDULES.items():
        table = Schedule(name, microbatches).table(stages)
        waste, max_stash, max_crossing = (
            bubble(table, *_times(args)),
            max(stash(table)),
            max(b_to_w_stash(table)),
        )
        chunks = f"{builder.chunks}" if builder.fixed_chunks else f"any ({builder.chunks})"
        numbers = f"{waste:.1%}", f"{max_stash:g}", f"{max_crossing:g}", f"{count_permutes(table)}"
        grid.add_row(name, chunks, *numbers, builder.description)
    console.print(grid)
    console.print(
        f"\nwith {stages} stages, {microbatches} microbatches, {_times_text(args)}; stash: "
        "microbatches "
        "whose\nactivations a stage keeps; B-W: those of which it keeps what W needs of B; sent: "
        "permutes of its\nprogram. One of them: hfjax schedule interleaved --chunks 4"
    )


def _sizes(args: argparse.Namespace) -> tuple[int, int]:
    stages, microbatches = args.stages, args.microbatches
    return (
        STAGES if stages is None else stages,
        MICROBATCHES if microbatches is None else microbatches,
    )


def _table(args: argparse.Namespace) -> Table:
    """Return the table of the named schedule, or that of the given file."""
    stages, microbatches = _sizes(args)
    if args.own is None:
        return Schedule(args.name, microbatches, args.chunks).table(stages)
    if args.name is not None:
        raise ValueError(f"{args.name} and --from {args.own}: give a name or a file, not both.")
    own = Schedule.from_csv(args.own).own
    assert own is not None
    sizes = {"microbatches": own.microbatches, "chunks": own.chunks, "stages": own.stages}
    for name, count in sizes.items():
        if getattr(args, name) not in (None, count):
            raise ValueError(f"--{name} {getattr(args, name)}: {args.own} has {count}.")
    return own


def _show(table: Table, args: argparse.Namespace, console: Console) -> None:
    """Print the grid and its costs."""
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
    _print_costs(table, args, console)


def _blocks(table: Table, width: int) -> Iterator[tuple[int, int]]:
    """Yield the first and end tick of each block of columns that fit side by side."""
    first, room = 0, width - MARGIN
    for tick in range(table.ticks):
        wide = _width(table, tick) + 1
        if wide > room and tick > first:
            yield first, tick
            first, room = tick, width - MARGIN
        room -= wide
    yield first, table.ticks


def _width(table: Table, tick: int) -> int:
    return max(len(table.cell_text(tick, stage)) for stage in range(table.stages))


def _grid(table: Table, first: int, end: int) -> Text:
    """Return some ticks of the table: a line of their numbers, and one for each stage."""
    heads = ["".ljust(MARGIN - 1), *map(str, range(first, end))]
    cells = lambda stage: (table.cell_text(tick, stage) for tick in range(first, end))
    stage_cells = ([f"stage {stage}", *cells(stage)] for stage in range(table.stages))
    head, *lines = align([heads, *stage_cells], gap=" ")
    grid = Text("".join(f"{line}\n" for line in lines))
    grid.highlight_regex("[+.]", "dim")
    for kind, style in STYLES.items():
        grid.highlight_regex(rf"\d+{kind}\d+", style)
    return Text.assemble((f"{head}\n", "dim"), grid)


def _print_costs(table: Table, args: argparse.Namespace, console: Console) -> None:
    waste, *others = (bubble(table, *_times(args), model) for model in TIME_MODELS)
    time = cost(table, *_times(args))
    console.print(f"time      {time:g}, with {_times_text(args)}")
    console.print(
        f"bubble    {waste:.1%}; waiting for neighbours only: {others[0]:.1%}, for inputs only: "
        f"{others[1]:.1%}"
    )
    say = lambda counts: " ".join(f"{count:g}" for count in counts)
    console.print(f"stash     {say(stash(table))}: microbatches whose activations each stage keeps")
    if table.splits_backward:
        crossing_text = say(b_to_w_stash(table))
        console.print(
            f"B to W    {crossing_text}: microbatches of which each keeps what W needs of B"
        )
    _print_messages(table, console)


def _print_messages(table: Table, console: Console) -> None:
    """Print the messages of the program, and what tasks need of it."""
    needed = messages(table)
    if not needed:
        console.print("messages  none")
        return
    most = max(sum(n for link, n in needed.items() if link[0] == s) for s in range(table.stages))
    count = count_permutes(table)
    console.print(
        f"permutes  {count} in each stage's program; no stage has more than {most} to send"
    )
    links = (
        f"{a}->{b} {count} for {needed[a, b]}" for (a, b), count in sent_messages(table).items()
    )
    console.print(f"messages  {', '.join(links)}: sent, for those needed")
    total, empty = (
        sum(sent_messages(table).values()),
        sum(sent_messages(table).values()) - sum(needed.values()),
    )
    console.print(f"empty     {empty} of {total} messages, {empty / total:.0%} of the bytes sent")


def _write(table: Table, args: argparse.Namespace) -> None:
    """Write the requested files."""
    picture = schedule_timeline(table, *_times(args))  # also checks the times
    if args.picture is not None:
        write(args.picture, picture)
    if args.csv is not None:
        stage_cells = (
            [table.cell_text(t, s) for t in range(table.ticks)] for s in range(table.stages)
        )
        lines = (",".join("" if cell == "." else cell for cell in cells) for cells in stage_cells)
        args.csv.write_text("\n".join(lines) + "\n", encoding="utf-8")


def schedule_timeline(table: Table, forward: float, backward: float, weights: float) -> Timeline:
    """Return a schedule to scale: a box for each slot that takes time, as it runs, in lockstep.

    Masked ones are grey: the stage computes, as all stages do in a tick without branches, and the
    result is discarded. The later a chunk, the longer the bar below it.
    """
    begins, widths = start_times(table, forward, backward, weights)
    tasks = {(tick, stage, task.kind): task for task, tick, stage in table.tasks()}
    letters, spans, of_task = "FIW" if table.splits_backward else "FBW", [], {}
    for tick, stage, slot in np.argwhere(widths > 0).tolist():
        task = tasks.get((tick, stage, KINDS[slot]))
        kind = letters[slot] if task else MASKED
        depth = table.stage_map[task.virtual][1] / max(table.chunks - 1, 1) if task else 0.0
        label, name = (str(task.microbatch), task._replace(kind=kind)) if task else ("", MASKED)
        interval = float(begins[tick, stage, slot]), float(widths[tick, stage, slot])
        style = label, f"{name}, tick {tick}", 1 - 0.4 * depth, depth
        spans.append(Span(kind, stage, *interval, *style))
        if task:
            of_task[task] = spans[-1]
    read = [(need, task) for task in of_task for need, _ in dependencies(task, table.virtual)]
    pairs = [(of_task[need], of_task[task]) for need, task in read if need in of_task]
    counts = {"stage": table.stages, "microbatch": table.microbatches, "chunk": table.chunks}
    sizes = [_count_text(n, name) for name, n in counts.items() if n > 1 or name != "chunk"]
    waste = bubble(table, forward, backward, weights)
    legend = [(*DRAWN[kind], 1.0) for kind in DRAWN if kind in {span.kind for span in spans}]
    legend += [("number: the microbatch", "none", 1.0)]
    legend += [("bar: the later the chunk, the longer", BARS, 1.0)] * (table.chunks > 1)
    # Labels have to fit in the narrowest boxes.
    room = LETTER * max(len(span.label) for span in spans) / min(span.width for span in spans)
    rows = math.ceil(max(span.end for span in spans) * room / (WIDTH - LEFT))
    return Timeline(
        f"{table.name}: {', '.join(sizes)}, bubble {waste:.1%}",
        [f"stage {stage}" for stage in range(table.stages)],
        spans,
        {kind: colour for kind, (_, colour) in DRAWN.items()},
        legend,
        rows=min(rows, MOST_ROWS),
        messages=[pair for pair in pairs if pair[0].line != pair[1].line],
    )


def _count_text(count: int, name: str) -> str:
    return f"{count} {name}" + ("" if count == 1 else "es" if name.endswith("ch") else "s")
